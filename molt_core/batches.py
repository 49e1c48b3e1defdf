"""From finished groups to what the trainer takes: the estimator's batch, advantages per row, windows of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    from molt_core.rollout.runner import RolloutSummary


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
        return [(r, s) for r, x in enumerate(self.rollouts) for s, seg in enumerate(x.segments) if seg.num_actions]

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
        return torch.tensor([r.status == RolloutStatus.TRUNCATED for r in self.rollouts])

    def for_estimator(self, config: RewardConfig) -> Batch:
        """The tensors an estimator sees, with shaped rewards."""
        rows = self.rows
        lengths = [self.rollouts[r].segments[s].length for r, s in rows]
        mask = np.zeros((len(rows), max(lengths, default=1) - 1), np.bool_)
        for i, (r, s) in enumerate(rows):
            for start, end in self.rollouts[r].segments[s].action_ranges:
                mask[i, start - 1 : end - 1] = True
        return Batch(
            rewards=self.shaped_rewards(config)[0],
            groups=torch.tensor(self.groups, dtype=torch.int64),
            rollout_of_row=torch.tensor([r for r, _ in rows], dtype=torch.int64),
            action_mask=torch.from_numpy(mask),
            truncated=self._truncated(),
        )

    def cut_rows(self) -> Tensor:
        """Each cut rollout's last row with a sampled token, (S,) bool; cut: not ended by the environment."""
        cut = [r.status == RolloutStatus.TRUNCATED and not r.terminated for r in self.rollouts]
        rows = self.rows
        last = dict(rows)
        return torch.tensor([cut[r] and s == last[r] for r, s in rows])

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
    if advantages.dim() == 1:
        return [replace(row, advantage=float(advantages[row.rollout])) for row in rows]
    return [replace(row, advantage=advantages[i, : row.length - 1].float().numpy()) for i, row in enumerate(rows)]


def pad_tokens(values: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Arrays of up to L tokens, one per row, as one tensor shaped ``like`` (S, L), 0 behind their ends."""
    padded = np.zeros(like.shape, np.float32)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return torch.from_numpy(padded)


def split_windows(rows: Sequence[TrainRow], num_windows: int) -> list[list[TrainRow]]:
    """Split the rows into optimizer steps of equally many rollouts; a rollout's rows stay together."""
    rollouts = sorted({row.rollout for row in rows})
    parts = np.array_split(np.asarray(rollouts), min(num_windows, max(len(rollouts), 1)))
    window_of = {int(r): w for w, part in enumerate(parts) for r in part}
    windows: list[list[TrainRow]] = [[] for _ in parts]
    for row in rows:
        windows[window_of[row.rollout]].append(row)
    return windows
