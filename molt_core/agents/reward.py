"""Rewards: functions of a finished rollout, selected with ``--reward.name``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from molt_core.agents.env import EnvContext
from molt_core.component import Component
from molt_core.contract import Rollout


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with the numbers behind it."""

    reward: float
    info: Mapping[str, float] = field(default_factory=dict)


class Reward(Component):
    """Scores a finished rollout; its value replaces the environment's reward.

    An exception or a time-out is retried and then excludes the rollout: it is never taken for a reward of 0.
    An instance serves many rollouts, all on one event loop; a process may have several instances.
    """

    kind: ClassVar[str] = "reward"

    async def score(self, rollout: Rollout, ctx: EnvContext) -> float | Score:
        """The reward of the rollout; ``ctx.row`` is its dataset row, ``rollout.text`` the decoded conversation."""
        raise NotImplementedError
