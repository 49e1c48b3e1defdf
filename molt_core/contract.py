"""The token-first contract: the types that carry tokens from the engine to the loss.

A *turn* is one model call, a *segment* one monotonic token sequence, a *rollout* one run of an agent with
one reward, a *batch* what an estimator sees. What the engine sampled is stored as ids and never re-tokenised.

Token axis: length T, entry k belongs to token k. Next-token axis: length T-1, entry k belongs to token k+1.
Arrays are kept on the token axis here; ``array[1:]`` is the next-token axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor


class RolloutStatus(StrEnum):
    """How a rollout ended. What the model caused is scored; what infrastructure caused is excluded."""

    COMPLETED = "completed"
    """The environment ended it."""
    TRUNCATED = "truncated"
    """Cut by context length, token limit or turn limit; scored."""
    ENGINE_ERROR = "engine_error"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    REWARD_ERROR = "reward_error"
    INVALID_REWARD = "invalid_reward"
    """The reward was not a finite number."""
    EMPTY = "empty"
    """It ended without a sampled token, so there is nothing to train."""

    @property
    def is_scored(self) -> bool:
        """Whether the reward counts, for loss, baseline and metrics alike."""
        return self in (RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the new ids put before it, and what the engine sampled.

    ``observation_ids`` are the prompt for the first turn and the appended tokens for later ones.
    ``logprobs`` (natural log, of the sampling distribution) and ``versions`` (policy version) have one entry
    per sampled id. ``finish_reason`` is the engine's: "stop" or "length".
    """

    observation_ids: Sequence[int]
    action_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str = "stop"

    def __post_init__(self) -> None:
        n = len(self.action_ids)
        if len(self.logprobs) != n or len(self.versions) != n:
            raise ValueError(
                f"a turn of {n} sampled ids needs as many log-probs and versions, "
                f"got {len(self.logprobs)} and {len(self.versions)}"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """One token sequence as the engine saw it. All arrays are on the token axis, length T.

    ids (T,) int32; action_mask (T,) bool, true on sampled tokens; logprobs (T,) float32, behaviour log-probs, 0 off
    the mask; versions (T,) int32, policy version of each sampled token, -1 off the mask.
    """

    ids: np.ndarray
    action_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray

    def __post_init__(self) -> None:
        shape = (len(self.ids),)
        if not (self.action_mask.shape == self.logprobs.shape == self.versions.shape == shape):
            raise ValueError(f"a segment's arrays must all have length {shape[0]}")
        if self.action_mask.dtype != np.bool_:
            raise ValueError("a segment's action_mask must be boolean")
        if shape[0] and self.action_mask[0]:
            raise ValueError("a segment's first token cannot be an action: nothing predicts it")
        if not np.isfinite(self.logprobs[self.action_mask]).all():
            raise ValueError("every sampled token needs a finite behaviour log-prob")
        if (self.versions[self.action_mask] < 0).any():
            raise ValueError("every sampled token needs the policy version that sampled it")

    @classmethod
    def from_turns(cls, turns: Sequence[Turn]) -> Segment:
        """Stitch turns into one sequence; sampled ids are copied as they are."""
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for turn in turns:
            new, n = len(turn.observation_ids), len(turn.action_ids)
            ids += [*turn.observation_ids, *turn.action_ids]
            mask += [False] * new + [True] * n
            logprobs += [0.0] * new + list(turn.logprobs)
            versions += [-1] * new + list(turn.versions)
        return cls(
            np.asarray(ids, np.int32),
            np.asarray(mask, np.bool_),
            np.asarray(logprobs, np.float32),
            np.asarray(versions, np.int32),
        )

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of an agent: its segments, its one reward, and how it ended.

    ``reward`` is NaN exactly when ``status`` is not scored. ``terminated``: the environment ended the episode, so that
    nothing follows its last state, also where an action was cut. ``info`` holds numbers that the environment reports,
    ``text`` the decoded conversation for logs only, ``error`` what went wrong.
    """

    id: str
    group_id: str
    row: Mapping[str, Any]
    segments: tuple[Segment, ...]
    reward: float
    status: RolloutStatus
    num_turns: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error: str = ""
    seconds: float = 0.0
    terminated: bool = False

    def __post_init__(self) -> None:
        if self.status.is_scored != math.isfinite(self.reward):
            raise ValueError(f"rollout {self.id}: status {self.status} does not go with reward {self.reward}")
        if self.status.is_scored and not any(s.action_mask.any() for s in self.segments):
            raise ValueError(f"rollout {self.id}: scored, but without a sampled token")

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among its sampled tokens."""
        return min(int(s.versions[s.action_mask].min()) for s in self.segments if s.action_mask.any())

    @property
    def num_actions(self) -> int:
        return sum(s.num_actions for s in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """Where a rollout is. ``group``: the rollouts of its group, or a reference to them, one object, in Ray's store."""

    group: ObjectRef | Sequence[Rollout]
    index: int


@dataclass(frozen=True)
class Batch:
    """What an advantage estimator sees: R rollouts in groups, and their S segments (rows) on L = max T - 1.

    rewards (R,) float32, NaN = no score; groups (R,) int64, 0..G-1; rollout_of_row (S,) int64 into R;
    action_mask (S, L) bool on the next-token axis; truncated (R,) bool. Only where the estimator declared the need:
    token_kl (S, L) float32, log-prob ratio estimate against the reference; values (S, L) float32, the critic's, of the
    states that the actions were taken in; bootstrap (S,) float32, its value of the state behind the row's end where the
    episode was cut off there, 0 elsewhere.
    """

    rewards: Tensor
    groups: Tensor
    rollout_of_row: Tensor
    action_mask: Tensor
    truncated: Tensor
    token_kl: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    kl_coef: float = 0.0

    def _group_sum(self, x: Tensor) -> Tensor:
        """Sum of x (R,) over scored rollouts per group, (G,) float64."""
        import torch

        num_groups = int(self.groups.max()) + 1 if len(self.groups) else 0
        scored = ~self.rewards.isnan()
        x = torch.where(scored, x.double(), 0.0)
        return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, self.groups, x)

    @property
    def scored(self) -> Tensor:
        """Which rollouts have a score, (R,) bool."""
        return ~self.rewards.isnan()

    def num_actions(self) -> Tensor:
        """Action tokens of each rollout over its rows, (R,) int64."""
        per_row = self.action_mask.sum(dim=-1)
        return per_row.new_zeros(len(self.rewards)).index_add_(0, self.rollout_of_row, per_row)

    def group_size(self) -> Tensor:
        """Scored rollouts in each rollout's group, (R,) float32."""
        return self._group_sum(self.rewards.new_ones(len(self.rewards)))[self.groups].float()

    def group_mean(self) -> Tensor:
        """Mean reward of each rollout's group over its scored rollouts, (R,) float32; NaN without any.

        A group of equal rewards has exactly that reward as its mean.
        """
        import torch

        mean = self._group_sum(self.rewards)[self.groups] / self.group_size()
        low, high = self.group_range()
        return torch.where(low == high, low, mean.float())

    def leave_one_out(self) -> Tensor:
        """Mean reward of the *other* scored rollouts of each rollout's group, (R,) float32; 0 where there is none.

        NaN for a rollout without a score. In a group of equal rewards it is exactly that reward.
        """
        import torch

        size = self.group_size()
        others = (self._group_sum(self.rewards)[self.groups] - self.rewards.double()) / (size - 1).clamp(min=1)
        low, high = self.group_range()
        return torch.where(size <= 1, 0.0, torch.where(low == high, low, others.float()))

    def group_std(self) -> Tensor:
        """Sample standard deviation (n-1) of each rollout's group, (R,) float32; 0 for equal rewards or one."""
        import torch

        mean = self._group_sum(self.rewards)[self.groups] / self.group_size()
        squares = self._group_sum((self.rewards.double() - mean) ** 2)[self.groups]
        std = (squares / (self.group_size() - 1).clamp(min=1)).sqrt().float()
        low, high = self.group_range()
        return torch.where(low == high, torch.zeros_like(std), std)

    def group_range(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest scored reward of each rollout's group, (R,) each; inf and -inf without any."""
        import torch

        num_groups = int(self.groups.max()) + 1 if len(self.groups) else 0
        scored = ~self.rewards.isnan()
        low = torch.full((num_groups,), torch.inf).scatter_reduce_(
            0, self.groups, torch.where(scored, self.rewards, torch.inf), "amin"
        )
        high = torch.full((num_groups,), -torch.inf).scatter_reduce_(
            0, self.groups, torch.where(scored, self.rewards, -torch.inf), "amax"
        )
        return low[self.groups], high[self.groups]
