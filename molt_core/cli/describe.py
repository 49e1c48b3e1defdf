"""``molt describe``."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Any

import click

from molt_core.cli import NO_PLUGIN, plugin_spec
from molt_core.errors import ConfigError, did_you_mean
from molt_core.plugins import Plugins, load_plugins
from molt_core.plugins.hookspecs import KINDS


def description(plugins: Plugins, kind: str, name: str) -> dict[str, Any]:
    """Everything about a component as plain data; ConfigError for a kind or a name that there is not.

    Keys: kind, name, distribution ("" for local code), reference, summary (first line of the docstring), text (the
    rest), needs (by name; empty where the kind has none), options (each name, type, default, required, description).
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind {kind}{did_you_mean(kind, KINDS)}; there are: {', '.join(KINDS)}")
    cls = plugins.resolve(kind, name)
    offer = plugins.find(kind, name)
    doc = inspect.cleandoc(cls.__doc__ or "")
    summary, _, text = doc.partition("\n\n")
    needs: Any = getattr(cls, "needs", None)
    return {
        "kind": kind,
        "name": name,
        "distribution": offer.distribution if offer else "",
        "reference": offer.reference if offer else name,
        "summary": " ".join(summary.split()),
        "text": text,
        "needs": dataclasses.asdict(needs) if needs is not None else {},
        "options": list(_options(cls, kind, name)),
    }


def _options(cls: Any, kind: str, name: str) -> Iterator[dict[str, Any]]:
    """The options of a component under the names that a command line takes."""
    from molt_core.config.flags import flags

    prefix = f"--{KINDS[kind].args}." if KINDS[kind].args else ""
    prefix += f"{name}." if kind == "tracker" else ""
    for flag in flags(cls.Config):
        yield {
            "name": prefix + flag.dotted,
            "type": {"switch": "BOOL", "table": "TABLE"}.get(flag.form, flag.metavar),
            "default": None if flag.required else flag.default,
            "required": flag.required,
            "description": flag.help,
        }


def as_text(data: dict[str, Any]) -> str:
    """The description for people, with colours."""
    parts = [
        f"{click.style(data['name'], bold=True)} ({data['kind']})\n"
        + click.style(f"{data['distribution'] or 'local code'}, {data['reference']}", dim=True),
        data["summary"] or "It has no description.",
        data["text"],
    ]
    formatter = click.HelpFormatter(width=120)
    if data["needs"]:
        with formatter.section("Needs"):
            formatter.write_dl([(name, _shown(value)) for name, value in data["needs"].items()])
    if data["options"]:
        with formatter.section("Options"):
            formatter.write_dl([_line(option) for option in data["options"]], col_max=60)
    parts += [formatter.getvalue().strip(), "" if data["options"] else "It has no options."]
    return "\n\n".join(part for part in parts if part)


def _line(option: dict[str, Any]) -> tuple[str, str]:
    default = "required" if option["required"] else f"default: {_shown(option['default'])}"
    return click.style(f"{option['name']} {option['type']}", fg="green"), f"{option['description']}  [{default}]"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value)


@click.command("describe")
@click.argument("kind")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--no-plugin", multiple=True, metavar="NAME", help=NO_PLUGIN)
@click.pass_context
def describe(ctx: click.Context, kind: str, name: str, as_json: bool, no_plugin: tuple[str, ...]) -> None:
    """Show what a component does, what it needs, and its options.

    KIND is that of a component, such as estimator or loss; NAME is what an option would take. Only the component's own
    module is imported.
    """
    above = ctx.parent.params.get("no_plugin", ()) if ctx.parent else ()
    data = description(load_plugins(plugin_spec((*above, *no_plugin))), kind, name)
    if as_json:
        click.echo(json.dumps(data, indent=2, default=str))
    else:
        click.echo(as_text(data))
