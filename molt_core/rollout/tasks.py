"""What goes into a runner and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from molt_core.contract import Rollout, RolloutStatus, Segment, StoredRollout


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample. ``max_new_tokens`` per turn; None: what the context leaves."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One prompt to be run ``num_samples`` times. ``group_id`` and ``seed`` together determine all sampling seeds."""

    group_id: str
    row: Mapping[str, Any]
    num_samples: int
    seed: int
    sampling: SamplingSettings = SamplingSettings()
    is_eval: bool = False
    row_index: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the controller needs to know of a segment. ``length``: T, all tokens.

    ``action_ranges``: [start, end) of each run of sampled tokens on the token axis. ``version_sum``: sum of the policy
    versions of the sampled tokens. Without any, the oldest and newest version are -1.
    """

    length: int
    num_actions: int
    oldest_version: int
    newest_version: int
    version_sum: int
    action_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segment: Segment) -> SegmentInfo:
        edges = np.flatnonzero(np.diff(segment.action_mask, prepend=False, append=False)).tolist()
        versions = segment.versions[segment.action_mask]
        return cls(
            length=len(segment.ids),
            num_actions=len(versions),
            oldest_version=int(versions.min()) if len(versions) else -1,
            newest_version=int(versions.max()) if len(versions) else -1,
            version_sum=int(versions.sum(dtype=np.int64)),
            action_ranges=tuple(zip(edges[::2], edges[1::2], strict=True)),
        )


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A rollout without its tokens; ``data`` says where the Rollout is.

    ``reward`` is NaN unless the status is scored. ``failed_attempts``: how earlier attempts of this rollout ended.
    ``terminated``: the environment ended the episode.
    """

    id: str
    group_id: str
    reward: float
    status: RolloutStatus
    info: Mapping[str, float]
    num_turns: int
    segments: tuple[SegmentInfo, ...]
    data: StoredRollout
    seconds: float
    error: str = ""
    failed_attempts: tuple[RolloutStatus, ...] = ()
    terminated: bool = False

    @classmethod
    def of(cls, rollout: Rollout, data: StoredRollout, failed_attempts: Sequence[RolloutStatus] = ()) -> RolloutSummary:
        return cls(
            id=rollout.id,
            group_id=rollout.group_id,
            reward=rollout.reward,
            status=rollout.status,
            info=rollout.info,
            num_turns=rollout.num_turns,
            segments=tuple(SegmentInfo.of(segment) for segment in rollout.segments),
            data=data,
            seconds=rollout.seconds,
            error=rollout.error,
            failed_attempts=tuple(failed_attempts),
            terminated=rollout.terminated,
        )

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among its sampled tokens; it must have one."""
        return min(segment.oldest_version for segment in self.segments if segment.num_actions)
