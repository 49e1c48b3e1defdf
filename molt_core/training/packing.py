"""Which rows go together: balanced micro-batches for every rank, and their padded tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from molt_core.contract import Segment
from molt_core.training.rows import TrainRow, WeightedRow, WindowPlan

if TYPE_CHECKING:
    import torch


def partition(
    lengths: Sequence[int], num_ranks: int, *, max_tokens: int, micro_batch_size: int | None = None
) -> list[list[list[int]]]:
    """Row indices per rank and micro-batch; every index once, every rank equally many micro-batches.

    Rows are sorted by length, so that a micro-batch pads little. A micro-batch holds ``micro_batch_size`` rows, or, if
    that is None, as many as fit into ``max_tokens`` padded tokens (rows x longest); a longer row is alone. What runs at
    the same time on different ranks is of similar size. With fewer rows than ranks some micro-batches are empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    chunks: list[list[int]] = []
    for i in order:
        full = not chunks or (
            len(chunks[-1]) >= micro_batch_size
            if micro_batch_size
            else (len(chunks[-1]) + 1) * lengths[chunks[-1][0]] > max_tokens
        )
        if full:
            chunks.append([])
        chunks[-1].append(i)

    def cost(chunk: list[int]) -> int:
        return len(chunk) * lengths[chunk[0]]

    while len(chunks) % num_ranks and any(len(chunk) > 1 for chunk in chunks):
        largest = max((chunk for chunk in chunks if len(chunk) > 1), key=cost)
        cut = min(range(1, len(largest)), key=lambda k: max(cost(largest[:k]), cost(largest[k:])))
        chunks.remove(largest)
        chunks += [largest[:cut], largest[cut:]]
    chunks.sort(key=lambda chunk: (-cost(chunk), chunk[0]))
    chunks += [[] for _ in range(-len(chunks) % num_ranks if chunks else num_ranks)]

    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for step in range(0, len(chunks), num_ranks):
        together = chunks[step : step + num_ranks]
        for rank, chunk in zip(
            range(num_ranks), together if step // num_ranks % 2 == 0 else together[::-1], strict=True
        ):
            ranks[rank].append(chunk)
    return ranks


def plan_window(
    rows: Sequence[TrainRow], num_ranks: int, *, max_tokens: int, micro_batch_size: int | None = None
) -> list[WindowPlan]:
    """The plan of one optimizer step for every rank. Rows without an action token train nothing and are left out."""
    trained = [row for row in rows if row.num_actions]
    tokens_of_prompt: Counter[int] = Counter()
    for row in trained:
        tokens_of_prompt[row.group] += row.num_actions
    weighted = [WeightedRow(row, 1.0 / tokens_of_prompt[row.group]) for row in trained]
    lengths = [row.length for row in trained]
    ranks = partition(lengths, num_ranks, max_tokens=max_tokens, micro_batch_size=micro_batch_size)
    tokens = sum(tokens_of_prompt.values())
    return [
        WindowPlan(
            tuple(tuple(weighted[i] for i in chunk) for chunk in rank), tokens, len(trained), len(tokens_of_prompt)
        )
        for rank in ranks
    ]


@dataclass(frozen=True)
class MicroBatch:
    """Padded tensors of B rows, T the longest; right padding, which causal attention never looks at.

    ids, attention, positions (B, T); positions count the attended tokens. On the next-token axis (B, T-1): mask (bool,
    true on actions), behaviour (the engine's log-probs), advantages. ``index`` (N,): where the mask is true in the
    flattened (B, T) grid of predicting positions; ``targets`` (N,): the ids that they predict. ``weights`` (B,).
    """

    ids: torch.Tensor
    attention: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    index: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})


def collate(
    segments: Sequence[Segment], advantages: Sequence[float | np.ndarray], weights: Sequence[float], pad_id: int
) -> MicroBatch:
    """Pad segments into one micro-batch. Without segments: one row of two pad tokens that trains nothing."""
    import torch

    num_rows, width = max(len(segments), 1), max([2, *(len(s.ids) for s in segments)])
    ids = np.full((num_rows, width), pad_id, np.int64)
    attention = np.zeros((num_rows, width), np.int64)
    mask = np.zeros((num_rows, width - 1), np.bool_)
    behaviour = np.zeros((num_rows, width - 1), np.float32)
    values = np.zeros((num_rows, width - 1), np.float32)
    if not segments:
        attention[:] = 1
    for i, (segment, advantage) in enumerate(zip(segments, advantages, strict=True)):
        length = len(segment.ids)
        ids[i, :length] = segment.ids
        attention[i, :length] = 1
        mask[i, : length - 1] = segment.action_mask[1:]
        behaviour[i, : length - 1] = segment.logprobs[1:]
        values[i, : length - 1] = advantage
    rows, columns = np.nonzero(mask)
    return MicroBatch(
        ids=torch.from_numpy(ids),
        attention=torch.from_numpy(attention),
        positions=torch.from_numpy(np.maximum(attention.cumsum(1) - 1, 0)),
        mask=torch.from_numpy(mask),
        behaviour=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(values),
        weights=torch.tensor(weights or [0.0], dtype=torch.float32),
        index=torch.from_numpy(rows * width + columns),
        targets=torch.from_numpy(ids[rows, columns + 1]),
    )
