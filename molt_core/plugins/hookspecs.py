"""Every hook of molt, in one place.

A plugin package has one entry point in the group ``molt`` that points at a light module. Functions of that module
named after a hook and marked with ``molt_core.hookimpl`` are called; an implementation may leave out arguments that it
does not use. Registration hooks run when plugins are loaded, in the driver and in every worker. Event hooks run where
the event happens: `molt_rollout_finished` in the process that runs environments, the others in the driver. An exception
in one is logged with the plugin's name and never stops a run or another plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

    from molt_core.contract import Rollout

hookspec = pluggy.HookspecMarker("molt")


class Register(Protocol):
    """What a registration hook is given."""

    def __call__(self, name: str, ref: str | type, always: bool = False) -> None:
        """Offer a component under ``name``.

        ``ref``: "package.module:Class", imported when it is first used, or the class itself. ``always`` is for
        trackers only: it is on in every run, whatever ``logger.trackers`` says.
        """


@hookspec
def molt_register_environments(register: Register) -> None:
    """Register subclasses of ``molt_core.Env``, selected with ``--env.name``."""


@hookspec
def molt_register_estimators(register: Register) -> None:
    """Register subclasses of ``molt_core.Estimator``, selected with ``--algo.advantage.estimator``."""


@hookspec
def molt_register_rewards(register: Register) -> None:
    """Register subclasses of ``molt_core.Reward``, selected with ``--reward.name``."""


@hookspec
def molt_register_chat_templates(register: Register) -> None:
    """Register subclasses of ``molt_core.chat.template.ChatTemplate``, selected with ``--data.chat_template``."""


@hookspec
def molt_register_losses(register: Register) -> None:
    """Register subclasses of ``molt_core.Loss``, selected with ``--actor.loss_mode``."""


@hookspec
def molt_register_trackers(register: Register) -> None:
    """Register subclasses of ``molt_core.Tracker``, selected with ``--logger.trackers``."""


@hookspec
def molt_configure(config: BaseModel) -> None:
    """A run is about to start with this configuration, which is frozen."""


@hookspec
def molt_rollout_finished(rollout: Rollout) -> None:
    """A rollout has ended, scored or excluded."""


@hookspec
def molt_step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """A training step has ended; ``metrics`` are those that trackers get."""


@hookspec
def molt_add_commands(cli: click.Group) -> None:
    """Add commands to ``molt`` with ``cli.add_command`` or ``@cli.command()``. Existing names cannot be replaced."""


EVENTS = ("molt_configure", "molt_rollout_finished", "molt_step_finished", "molt_add_commands")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of component: its hook, the class to subclass, and the options that select and configure it."""

    hook: str
    base: str
    option: str
    args: str


KINDS = {
    "environment": Kind("molt_register_environments", "molt_core.Env", "env.name", "env.args"),
    "estimator": Kind(
        "molt_register_estimators", "molt_core.Estimator", "algo.advantage.estimator", "algo.advantage.args"
    ),
    "reward": Kind("molt_register_rewards", "molt_core.Reward", "reward.name", "reward.args"),
    "chat-template": Kind(
        "molt_register_chat_templates", "molt_core.chat.template.ChatTemplate", "data.chat_template", ""
    ),
    "loss": Kind("molt_register_losses", "molt_core.Loss", "actor.loss_mode", "actor.loss_args"),
    "tracker": Kind("molt_register_trackers", "molt_core.Tracker", "logger.trackers", "logger.tracker_args"),
}
"""Every kind of component, by the name that ``Component.kind`` carries."""
