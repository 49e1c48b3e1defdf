"""Supervised fine-tuning: epochs over segments, one optimizer step per batch, by the same training group as RL."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from molt_core.config.sft import SftTrainConfig
from molt_core.contract import Segment
from molt_core.data.prompts import PromptCursor, digest_of
from molt_core.training.rows import TrainRow

if TYPE_CHECKING:
    from molt_core.training.group import TrainGroup


def num_sft_steps(num_segments: int, config: SftTrainConfig) -> int:
    """Optimizer steps of a run: ceil(segments x epochs / batch size), or max_steps if that is less."""
    steps = math.ceil(num_segments * config.max_epochs / config.batch_size)
    return min(steps, config.max_steps or steps)


def run_sft(
    segments: Sequence[Segment],
    group: TrainGroup,
    config: SftTrainConfig,
    *,
    on_step: Callable[[int, Mapping[str, float], dict[str, Any]], None],
    state: Mapping[str, Any] | None = None,
) -> int:
    """Train on all segments for ``max_epochs`` passes, or to ``max_steps``; returns the number of the last step.

    Every segment once per epoch, in an order that depends on the seed and the epoch alone. ``on_step(step, metrics,
    state)`` is called after each optimizer step, from 1; ``state`` is JSON for a checkpoint, and passed back here it
    makes the run go on behind that step.
    """
    digest = digest_of(segment.ids.tobytes() + segment.action_mask.tobytes() for segment in segments)
    cursor = PromptCursor(len(segments), seed=config.seed, shuffle=True, num_episodes=config.max_epochs, digest=digest)
    step = 0
    if state is not None:
        cursor.load(state["cursor"])
        step = int(state["step"])
    total = num_sft_steps(len(segments), config)
    while step < total:
        began = time.monotonic()
        picked = [item[1] for _ in range(config.batch_size) if (item := cursor.next()) is not None]
        rows = [TrainRow.of_segment(segments[i], n) for n, i in enumerate(picked)]
        metrics = group.update([rows], max_tokens=config.max_tokens_per_gpu, micro_batch_size=config.micro_batch_size)
        step += 1
        seconds = time.monotonic() - began
        metrics["timing/step"] = seconds
        metrics["throughput/tokens_per_second"] = sum(row.length for row in rows) / seconds
        on_step(step, metrics, {"step": step, "cursor": cursor.state()})
    return step
