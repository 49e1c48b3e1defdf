"""``molt train`` and ``molt sft``: options from a configuration model, then one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import BaseModel

from molt_core.cli import NO_PLUGIN, autoload, warn_of_failures
from molt_core.config import RLConfig, SFTConfig
from molt_core.config.flags import Flag, flags, nested, parse_text, read_option, resolve
from molt_core.config.toml import dump_toml
from molt_core.errors import ConfigError
from molt_core.plugins import PluginSpec, absolute_name, load_plugins
from molt_core.plugins.hookspecs import KINDS

CONFIG = (
    "TOML file; may be repeated: later files win over earlier ones, options over files. "
    "Relative paths in it are relative to the current directory."
)
Call = Callable[..., object]


class ConfigCommand(click.Command):
    """A command whose options are the leaves of a configuration model. ``run`` is left out in a dry run."""

    def __init__(self, name: str, model: type[BaseModel], check: Call, run: Call, help: str) -> None:
        self.model, self.check, self.run = model, check, run
        self.flags = list(flags(model))
        self.tables = [flag for flag in self.flags if flag.form == "table"]
        params: list[click.Parameter] = [
            click.Option(
                ["--config", "files"], multiple=True, type=click.Path(path_type=Path), metavar="FILE", help=CONFIG
            ),
            click.Option(["--dry-run"], is_flag=True, help="Check everything, print the configuration, start nothing."),
            click.Option(["--no-plugin"], multiple=True, metavar="NAME", help=NO_PLUGIN),
            *(_option(flag) for flag in self.flags if flag.form != "table"),
        ]
        super().__init__(
            name,
            params=params,
            callback=click.pass_context(self._call),
            help=help,
            context_settings={"max_content_width": 120},
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take `--env.args.KEY VALUE` out before click sees it: its keys are the plugin's."""
        rest, tables = [], []
        items = iter(args)
        for item in items:
            table = next(
                (flag for flag in self.tables if item.startswith(flag.name) and item[len(flag.name) :][:1] in "=."),
                None,
            )
            if table is None:
                rest.append(item)
            else:
                tables.append(_table_item(table, item, items))
        ctx.meta["molt.tables"] = tables
        return super().parse_args(ctx, rest)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for flag in self.flags:
            sections.setdefault(flag.path[0] if len(flag.path) > 1 else "", []).append(_help(flag))
        own = [record for param in self.params if (record := param.get_help_record(ctx)) and "." not in param.opts[0]]
        with formatter.section("Options"):
            formatter.write_dl([*(r for r in own if not r[0].startswith("--device")), *sections.pop("", [])])
        for name, rows in sections.items():
            doc = (self.model.model_fields[name].annotation.__doc__ or "").strip().splitlines()
            with formatter.section(f"{name} ({doc[0].rstrip('.')})" if doc else name):
                formatter.write_dl(rows)

    def _call(
        self, ctx: click.Context, files: Sequence[Path], dry_run: bool, no_plugin: Sequence[str], **_: Any
    ) -> None:
        above = ctx.parent.params.get("no_plugin", ()) if ctx.parent else ()
        config = _absolute(resolve(self.model, files, self._given(ctx)))
        config = _with_plugins(config, (*above, *no_plugin))
        plugins = load_plugins(PluginSpec.from_config(config.plugins))
        warn_of_failures(plugins)
        inputs = self.check(config, plugins)
        if dry_run:
            click.echo(dump_toml(config), nl=False)
        else:
            self.run(config, plugins, inputs)

    def _given(self, ctx: click.Context) -> Iterator[dict[str, Any]]:
        """What the command line says, one nested table per option."""
        for flag in self.flags:
            if ctx.get_parameter_source(_key(flag)) is ParameterSource.COMMANDLINE:
                yield read_option(flag, ctx.params[_key(flag)])
        yield from ctx.meta["molt.tables"]


def _key(flag: Flag) -> str:
    return "__".join(flag.path)


def _option(flag: Flag) -> click.Option:
    """Everything but a switch stays text here; the model reads it."""
    if flag.form == "switch":
        return click.Option([f"{flag.name}/--no-{flag.dotted}", _key(flag)], default=None)
    return click.Option([flag.name, _key(flag)], type=str, nargs=flag.arity, multiple=flag.form == "list")


def _table_item(table: Flag, item: str, rest: Iterator[str]) -> dict[str, Any]:
    option, equals, text = item.partition("=")
    key = option[len(table.name) + 1 :]
    if not key or not all(key.split(".")):
        raise ConfigError(f"{table.name} needs a key: {table.name}.KEY VALUE")
    if not equals:
        text = next(rest, "--")
        if text.startswith("--"):
            raise ConfigError(f"{option} needs a value")
    return nested((*table.path, *key.split(".")), parse_text(text))


def _help(flag: Flag) -> tuple[str, str]:
    name = {"switch": f"--[no-]{flag.dotted}", "table": f"{flag.name}.KEY VALUE"}.get(
        flag.form, f"{flag.name} {flag.metavar}"
    )
    if flag.default in (None, "", (), {}) or "Default:" in flag.help:
        return name, flag.help
    default = flag.default
    if flag.form == "switch":
        default = "on" if default else "off"
    elif flag.form == "tuple":
        default = " ".join(map(str, default))
    return name, f"{flag.help}  [default: {default}]"


def _absolute(config: BaseModel) -> BaseModel:
    """Component names that are files become absolute, because workers run in other directories."""
    update: dict[str, Any] = {}
    for kind in KINDS.values():
        section, *path = kind.option.split(".")
        node = getattr(config, section, None)
        if node is not None and hasattr(node, path[0]):
            update[section] = _replaced(update.get(section, node), path)
    tracker_args = update["logger"].tracker_args
    renamed = {absolute_name(name): args for name, args in tracker_args.items()}
    update["logger"] = update["logger"].model_copy(update={"tracker_args": renamed})
    return config.model_copy(update=update)


def _replaced(node: Any, path: Sequence[str]) -> Any:
    """``node`` with the name or names at ``path`` made absolute."""
    value = getattr(node, path[0])
    if len(path) > 1:
        value = _replaced(value, path[1:])
    elif isinstance(value, tuple):
        value = tuple(absolute_name(name) for name in value)
    elif value is not None:
        value = absolute_name(value)
    return node.model_copy(update={path[0]: value})


def _with_plugins(config: Any, no_plugin: Sequence[str]) -> Any:
    """--no-plugin and the environment variable become part of the configuration, which the run saves."""
    section = config.plugins
    disable = tuple(dict.fromkeys((*section.disable, *no_plugin)))
    section = section.model_copy(update={"disable": disable, "autoload": section.autoload and autoload()})
    return config.model_copy(update={"plugins": section})


def _launch(function: str) -> Call:
    """A function of ``molt_core.launch``, imported when it is called."""

    def call(*args: Any) -> object:
        from molt_core import launch

        return getattr(launch, function)(*args)

    return call


train = ConfigCommand(
    "train",
    RLConfig,
    _launch("check_train"),
    _launch("train"),
    "Train an agent with reinforcement learning.",
)
sft = ConfigCommand("sft", SFTConfig, _launch("check_sft"), _launch("sft"), "Fine-tune a model on conversations.")
