"""What the driver hands to the training ranks: rows that point at their tokens, and windows of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt_core.contract import Rollout, Segment, StoredRollout


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One segment to train, without its tokens, so that the driver stays light.

    ``source`` is where the tokens are: a StoredRollout, a Rollout, or a Segment itself.
    ``segment`` is the index within the rollout. ``length`` T and ``num_actions`` are the segment's. ``advantage`` is
    one number, or (T-1,) float32 on the next-token axis; for a critic it is the return. ``rollout``
    and ``group`` number the rollout and its prompt.
    """

    source: StoredRollout | Rollout | Segment
    segment: int
    length: int
    num_actions: int
    advantage: float | np.ndarray = 0.0
    rollout: int = 0
    group: int = 0

    @classmethod
    def of_segment(cls, segment: Segment, index: int = 0) -> TrainRow:
        """A row without an advantage, for supervised training; ``index`` numbers it."""
        return cls(segment, 0, len(segment.ids), segment.num_actions, rollout=index, group=index)


@dataclass(frozen=True, slots=True)
class WeightedRow:
    """A row and the weight of its tokens where prompts count once: 1 / action tokens of its prompt in the window."""

    row: TrainRow
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """One rank's share of one optimizer step: its micro-batches, and what the whole window holds over all ranks.

    Every rank has equally many micro-batches; one without rows keeps the ranks in step.
    """

    micro_batches: tuple[tuple[WeightedRow, ...], ...]
    tokens: int
    sequences: int
    prompts: int


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """What is minimised. ``loss`` None: negative log-likelihood of the actions, the supervised objective.

    ``loss_args`` are the options of the loss plugin. ``agg_*`` is how token losses become one number (see
    algorithms.aggregate). ``is_*`` is the correction of the mismatch between rollout and training policy (see
    algorithms.correction). ``entropy_coef`` > 0 rewards entropy. ``kl``: estimator of the KL term in the loss, None for
    no term; ``kl_ref``: to the "reference" model, or to the "rollout" policy.
    """

    loss: str | None = None
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    agg_mode: str = "token-mean"
    agg_norm: float | None = None
    entropy_coef: float = 0.0
    kl: str | None = None
    kl_ref: str = "reference"
    is_level: str = "off"
    is_mode: str = "trunc"
    is_threshold: tuple[float, float] = (0.5, 5.0)
    is_gating: str = "ratio"


def fetch_rollouts(places: Sequence[StoredRollout]) -> list[Rollout]:
    """The rollouts at these places, in order; what lies in Ray's store is fetched at once."""
    refs = list({place.group: None for place in places if not isinstance(place.group, Sequence)})
    groups: dict[Any, Sequence[Rollout]] = {}
    if refs:
        import ray

        groups = dict(zip(refs, ray.get(refs), strict=True))
    return [(p.group if isinstance(p.group, Sequence) else groups[p.group])[p.index] for p in places]


def resolve_segments(rows: Sequence[TrainRow]) -> list[Segment]:
    """The segment of every row, in order; objects in Ray's store are fetched at once."""
    stored = iter(fetch_rollouts([row.source for row in rows if isinstance(row.source, StoredRollout)]))
    segments = []
    for row in rows:
        source = next(stored) if isinstance(row.source, StoredRollout) else row.source
        segment = source if isinstance(source, Segment) else source.segments[row.segment]
        assert len(segment.ids) == row.length, f"a row of length {row.length} points at {len(segment.ids)} tokens"
        assert segment.num_actions == row.num_actions, "a row and its segment disagree about the action tokens"
        segments.append(segment)
    return segments
