"""``molt list-plugins``."""

from __future__ import annotations

import json

import click

from molt_core.cli import NO_PLUGIN, plugin_spec
from molt_core.plugins import load_plugins
from molt_core.plugins.listing import as_data, as_table


@click.command("list-plugins")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, one object per plugin.")
@click.option("--no-plugin", multiple=True, metavar="NAME", help=NO_PLUGIN)
@click.pass_context
def list_plugins(ctx: click.Context, as_json: bool, no_plugin: tuple[str, ...]) -> None:
    """Show installed plugins, what they offer, and why one is not loaded.

    Nothing but the plugins' own light modules is imported.
    """
    above = ctx.parent.params.get("no_plugin", ()) if ctx.parent else ()
    plugins = load_plugins(plugin_spec((*above, *no_plugin)))
    if as_json:
        click.echo(json.dumps(as_data(plugins), indent=2))
        return
    from rich.console import Console

    Console().print(as_table(plugins))
