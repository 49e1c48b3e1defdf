"""Environments: plain Python classes that hand out observations and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from molt_core.component import Component

Message = dict[str, Any]
"""A chat message in the OpenAI form: at least ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the model did in one turn. ``text`` is decoded for the environment; training uses ``ids``."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    """"stop": the model ended its turn; "length": the turn was cut."""

    @property
    def is_cut_off(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class EnvContext:
    """What an environment may know about its rollout: the dataset row, the rollout's id, a seed, eval or not.

    The rollouts of one prompt have the same seed: what is drawn from it is the same task for all of them.
    """

    row: Mapping[str, Any]
    rollout_id: str
    seed: int
    is_eval: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The environment's answer to one action.

    ``reward`` is added to the rollout's reward; int and bool count as numbers, anything not finite excludes the
    rollout. Without ``terminated`` or ``truncated`` the rollout goes on and needs an ``observation``: messages in
    the OpenAI form, or a plain string for one user message (plain text, where the prompt was plain text).
    ``info``: numbers for the metrics.
    """

    reward: float = 0.0
    observation: Sequence[Message] | str | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Env(Component):
    """One instance per rollout. ``reset`` gives the first messages, ``step`` answers each action.

    ``columns`` names the dataset columns it needs, `a|b` for one of two; they are checked before the run starts.
    ``gives_reward``: false if its reward means nothing, so that it needs an estimator or a reward plugin to go with.
    """

    kind: ClassVar[str] = "environment"
    columns: ClassVar[tuple[str, ...]] = ()
    gives_reward: ClassVar[bool] = True

    async def reset(self, row: Mapping[str, Any], ctx: EnvContext) -> Sequence[Message] | str:
        """The first messages of the conversation; a plain string is a raw prompt without a chat template."""
        raise NotImplementedError

    async def step(self, action: Action, ctx: EnvContext) -> Result:
        """Judge the action; end the rollout, or observe and go on."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free what the rollout holds. Always called, also after a failure."""
