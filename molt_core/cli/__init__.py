"""The command line: ``molt``. Light to import; each command imports what it needs when it is called."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

import molt_core
from molt_core.errors import ConfigError, RunError, did_you_mean
from molt_core.logs import setup_logging

if TYPE_CHECKING:
    from molt_core.plugins import Plugins, PluginSpec

logger = logging.getLogger("molt")

COMMANDS = {
    "train": ("molt_core.cli.programs", "Train an agent with reinforcement learning."),
    "sft": ("molt_core.cli.programs", "Fine-tune a model on conversations."),
    "list-plugins": (
        "molt_core.cli.list_plugins",
        "Show installed plugins, what they offer, and why one is not loaded.",
    ),
    "describe": ("molt_core.cli.describe", "Show what a component does, what it needs, and its options."),
    "doctor": ("molt_core.cli.doctor", "Check the installation and the devices."),
}
NO_PLUGIN = "Leave a plugin out, by entry-point or distribution name; may be repeated, and also takes the core's own."


def plugin_spec(no_plugin: Sequence[str]) -> PluginSpec:
    """What commands without a configuration load."""
    from molt_core.plugins import PluginSpec

    return PluginSpec(tuple(no_plugin), autoload=autoload())


def autoload() -> bool:
    """Whether installed plugins load by themselves: MOLT_DISABLE_PLUGIN_AUTOLOAD, read in the driver alone."""
    import os

    return os.environ.get("MOLT_DISABLE_PLUGIN_AUTOLOAD", "0") in ("", "0")


class MoltGroup(click.Group):
    """The core's commands, imported when used, and those that plugins add, found when the core has none of the name."""

    _loaded = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load_plugins(ctx)
        return [*COMMANDS, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module = import_module(COMMANDS[cmd_name][0])
            return getattr(module, cmd_name.replace("-", "_"))
        self._load_plugins(ctx)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            raise ConfigError(f"unknown command {args[0]}{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        name = name or cmd.name
        if name in COMMANDS or name in self.commands:
            raise ValueError(f"there is a command {name!r} already")
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Like click's, without importing the core's commands."""
        names = self.list_commands(ctx)
        added = {name: self.commands[name].get_short_help_str(limit=90) for name in names if name in self.commands}
        with formatter.section("Commands"):
            formatter.write_dl([*((name, text) for name, (_, text) in COMMANDS.items()), *added.items()])

    def _load_plugins(self, ctx: click.Context) -> None:
        if not self._loaded:
            from molt_core.plugins import load_plugins

            self._loaded = True
            load_plugins(plugin_spec(ctx.params.get("no_plugin") or ())).hook.molt_add_commands(cli=self)


def make_cli() -> click.Group:
    """A fresh ``molt`` command."""

    @click.group(cls=MoltGroup, name="molt", invoke_without_command=True, context_settings={"max_content_width": 120})
    @click.version_option(molt_core.__version__, prog_name="molt")
    @click.option("--no-plugin", multiple=True, is_eager=True, metavar="NAME", help=NO_PLUGIN)
    @click.pass_context
    def cli(ctx: click.Context, no_plugin: tuple[str, ...]) -> None:
        """Train language-model agents with reinforcement learning."""
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())

    return cli


def main(args: Sequence[str] | None = None) -> int:
    """Run ``molt``; the exit code. What the user can fix is one line on stderr and code 2; a failed run is code 1."""
    setup_logging()
    try:
        result: Any = make_cli().main(args, prog_name="molt", standalone_mode=False)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    except RunError as error:
        logger.debug("the run failed", exc_info=True)
        click.echo(f"Error: {error}", err=True)
        return 1
    except click.NoSuchOption as error:
        click.echo(f"Error: {_no_such_option(error)}", err=True)
        return 2
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        return error.exit_code
    except click.Abort:
        click.echo("Aborted.", err=True)
        return 130
    return result if isinstance(result, int) else 0


def _no_such_option(error: click.NoSuchOption) -> str:
    known = [name for p in error.ctx.command.params for name in (*p.opts, *p.secondary_opts)] if error.ctx else []
    return f"unknown option {error.option_name}{did_you_mean(error.option_name, known)}"


def warn_of_failures(plugins: Plugins) -> None:
    """One line per plugin that could not be loaded; a run that needs it ends with an error of its own."""
    for record in plugins.records:
        if record.status in ("failed", "incompatible"):
            logger.warning("plugin %s is not loaded: %s", record.key, record.error)
        elif record.note:
            logger.warning("plugin %s: %s", record.key, record.note)
