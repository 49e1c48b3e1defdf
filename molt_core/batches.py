"""From finished groups to what the trainer takes: the estimator's batch, advantages per row, windows of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch

from molt_core.algorithms.rewards import clip_rewards, overlong_penalty, stop_properly
from molt_core.contract import Batch, RolloutStatus
from molt_core.training.rows import TrainRow

if TYPE_CHECKING:
    from torch import Tensor

    from molt_core.config.rl import RewardConfig
    from molt_core.rollout.generator import Group
    from molt_core.rollout.tasks import RolloutSummary


@dataclass(frozen=True, slots=True)
class _Rows:
    """The S rows of a batch: their rollout, segment within it and length T, (S,) each.

    ``edges``: where a run of sampled tokens starts or ends, in turn, (K, 2): row and entry on the next-token axis.
    """

    rollout: np.ndarray
    segment: np.ndarray
    length: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True)
class RolloutBatch:
    """The scored rollouts of one step, flat: rollout r belongs to group ``groups[r]`` (0..G-1)."""

    rollouts: tuple[RolloutSummary, ...]
    groups: tuple[int, ...]

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> RolloutBatch:
        """Keep what is scored; a failure counts nowhere."""
        pairs = [(r, g) for g, group in enumerate(groups) for r in group.rollouts if r.status.is_scored]
        return cls(tuple(r for r, _ in pairs), tuple(g for _, g in pairs))

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(rollout, segment) of every row that has a sampled token."""
        return list(zip(self._rows.rollout.tolist(), self._rows.segment.tolist(), strict=True))

    @cached_property
    def _rows(self) -> _Rows:
        """The numbers of all rows, gathered from the summaries once; from here on there are only arrays."""
        per_rollout = list(map(attrgetter("segments"), self.rollouts))
        segments = list(chain.from_iterable(per_rollout))
        ranges = list(map(attrgetter("action_ranges"), segments))
        counts = _integers(map(len, per_rollout))
        first = np.repeat(counts.cumsum() - counts, counts)
        acting = _integers(map(attrgetter("num_actions"), segments)) > 0
        row = np.repeat(acting.cumsum() - 1, 2 * _integers(map(len, ranges)))
        entry = _integers(chain.from_iterable(chain.from_iterable(ranges))) - 1
        return _Rows(
            rollout=np.repeat(np.arange(len(counts)), counts)[acting],
            segment=(np.arange(len(segments)) - first)[acting],
            length=_integers(map(attrgetter("length"), segments))[acting],
            edges=np.stack([row, entry], axis=-1),
        )

    def _action_mask(self) -> np.ndarray:
        """(S, L) bool on the next-token axis. Runs alternate over all rows, one behind the other: false, true, ..."""
        rows = self._rows
        shape = (len(rows.length), int(rows.length.max(initial=1)) - 1)
        edges = rows.edges[:, 0] * shape[1] + rows.edges[:, 1]
        runs = np.diff(edges, prepend=0, append=shape[0] * shape[1])
        return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(shape)

    def shaped_rewards(self, config: RewardConfig) -> tuple[Tensor, Tensor]:
        """What the estimator takes for rewards, (R,) float32, and how much of it the shaping added, (R,).

        The environment's reward is clamped first; then comes the penalty on length, or the factor of what was cut.
        """
        raw = torch.tensor([r.reward for r in self.rollouts], dtype=torch.float32)
        clipped, _ = clip_rewards(raw, *config.clip_range)
        shaped = stop_properly(clipped, self._truncated(), config.stop_properly)
        if config.overlong_max is not None and config.overlong_buffer is not None:
            lengths = torch.tensor([r.num_actions for r in self.rollouts])
            shaped = shaped + overlong_penalty(lengths, config.overlong_max, config.overlong_buffer)
        return shaped, shaped - clipped

    def _truncated(self) -> Tensor:
        return torch.tensor([r.status == RolloutStatus.TRUNCATED for r in self.rollouts], dtype=torch.bool)

    def for_estimator(self, config: RewardConfig) -> Batch:
        """The tensors an estimator sees, with shaped rewards."""
        return Batch(
            rewards=self.shaped_rewards(config)[0],
            groups=torch.tensor(self.groups, dtype=torch.int64),
            rollout_of_row=torch.from_numpy(self._rows.rollout),
            action_mask=torch.from_numpy(self._action_mask()),
            truncated=self._truncated(),
        )

    def cut_rows(self) -> Tensor:
        """Each cut rollout's last row with a sampled token, (S,) bool; cut: not ended by the environment."""
        terminated = torch.tensor([r.terminated for r in self.rollouts], dtype=torch.bool)
        rollout = torch.from_numpy(self._rows.rollout)
        is_last = torch.diff(rollout, append=torch.tensor([-1])) != 0
        return is_last & (self._truncated() & ~terminated)[rollout]

    def train_rows(self) -> list[TrainRow]:
        """One row per segment that has a sampled token, still without advantages; as many as ``for_estimator`` has."""
        return [
            TrainRow(
                source=self.rollouts[r].data,
                segment=s,
                length=self.rollouts[r].segments[s].length,
                num_actions=self.rollouts[r].segments[s].num_actions,
                rollout=r,
                group=self.groups[r],
            )
            for r, s in self.rows
        ]


def with_advantages(rows: Sequence[TrainRow], advantages: Tensor) -> list[TrainRow]:
    """The rows, each with its number out of (R,), one per rollout, or its (T-1,) out of (S, L), one per token."""
    values = advantages.float().numpy()
    if advantages.dim() == 1:
        per_rollout = values.tolist()
        return [replace(row, advantage=per_rollout[row.rollout]) for row in rows]
    return [replace(row, advantage=value[: row.length - 1]) for row, value in zip(rows, values, strict=True)]


def pad_tokens(values: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Arrays of up to L tokens, one per row, as one tensor shaped ``like`` (S, L), 0 behind their ends."""
    padded = np.zeros(like.shape, np.float32)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return torch.from_numpy(padded)


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def split_windows(rows: Sequence[TrainRow], num_windows: int) -> list[list[TrainRow]]:
    """Split the rows into optimizer steps of equally many rollouts; a rollout's rows stay together."""
    rollouts = sorted({row.rollout for row in rows})
    parts = np.array_split(np.asarray(rollouts), min(num_windows, max(len(rollouts), 1)))
    window_of = {int(r): w for w, part in enumerate(parts) for r in part}
    windows: list[list[TrainRow]] = [[] for _ in parts]
    for row in rows:
        windows[window_of[row.rollout]].append(row)
    return windows
