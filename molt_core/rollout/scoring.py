"""Rewards and infos that users' code gives, checked, and the reward plugin at work."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from molt_core.agents.env import EnvContext
from molt_core.agents.reward import Reward, Score
from molt_core.contract import Rollout, RolloutStatus
from molt_core.rollout.threads import Lease

if TYPE_CHECKING:
    from molt_core.config.rl import RewardConfig

logger = logging.getLogger("molt")


class RolloutFailedError(Exception):
    """A rollout cannot go on, and ends with ``status``."""

    def __init__(self, status: RolloutStatus, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Tally:
    """What a rollout has earned: the sum of its rewards, and the newest number under each key of its infos."""

    reward: float = 0.0
    info: dict[str, float] = field(default_factory=dict)

    def add(self, source: str, reward: Any, info: Any) -> None:
        """Take what ``source`` returned. Raises RolloutFailedError; an info that is no finite number is left out."""
        number = as_number(reward)
        if not math.isfinite(number):
            raise RolloutFailedError(RolloutStatus.INVALID_REWARD, f"{source} returned a reward of {reward!r}")
        if not isinstance(info, Mapping):
            message = f"{source} returned an info of type {type(info).__name__}, not a mapping of names to numbers"
            raise RolloutFailedError(RolloutStatus.ENV_ERROR, message)
        self.reward += number
        for key, value in info.items():
            number = as_number(value)
            if math.isfinite(number):
                self.info[str(key)] = number
            else:
                _warn_left_out(str(key), value)


class Scorer:
    """Asks a reward plugin for the score of finished rollouts. There is one instance of it per environment loop."""

    def __init__(self, make_reward: Callable[[], Reward], config: RewardConfig) -> None:
        self._make_reward, self._config = make_reward, config

    async def score(self, rollout: Rollout, ctx: EnvContext, lease: Lease, tally: Tally) -> Tally:
        """``tally`` with the plugin's reward in place of the environment's, and its infos.

        Asked again, without playing again, when it fails; RolloutFailedError when it fails to the end.
        """
        failure: RolloutFailedError | None = None
        for _ in range(self._config.retries + 1):
            scored = Tally(info=dict(tally.info))
            try:
                answer = await lease.call(self._ask, rollout, ctx, lease, timeout=self._config.timeout)
                score = answer if isinstance(answer, Score) else Score(answer)
                scored.add("scoring", score.reward, score.info)
            except RolloutFailedError as error:
                failure = error
            except Exception as error:
                failure = RolloutFailedError(RolloutStatus.REWARD_ERROR, f"scoring raised {describe(error)}")
            else:
                return scored
        assert failure is not None
        raise failure

    def _ask(self, rollout: Rollout, ctx: EnvContext, lease: Lease) -> Any:
        """Make and use the plugin in one call, on one loop: clients often belong to one."""
        reward: Reward = lease.shared(Reward, self._make_reward)
        return reward.score(rollout, ctx)


def as_number(value: Any) -> float:
    """A Python, numpy or 0-d tensor number or boolean as a float; NaN for anything else."""
    try:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        return float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.inf
    except Exception:
        # A number of a class of its own, or a tensor without a value.
        return math.nan


def describe(error: BaseException) -> str:
    """An error of users' code in one line, for a rollout's message."""
    return f"{type(error).__name__}: {error}"[:1000]


_left_out: set[str] = set()


def _warn_left_out(key: str, value: Any) -> None:
    if key not in _left_out:
        _left_out.add(key)
        logger.warning("info %r is not a finite number (%.80r) and is left out of the metrics", key, value)
