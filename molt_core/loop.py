"""The loop: generate, estimate, train, refit, report. Everything else in the package serves this page."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from molt_core import metrics as m
from molt_core.batches import RolloutBatch
from molt_core.blocking import run_blocking

if TYPE_CHECKING:
    from molt_core.config import RLConfig
    from molt_core.evaluation import Evaluator
    from molt_core.learner import Learner
    from molt_core.rollout.generator import GeneratedBatch, Generator
    from molt_core.rollout.refit import Refitter
    from molt_core.run import RunRecorder
    from molt_core.training.group import TrainGroup

logger = logging.getLogger("molt")


@dataclass(frozen=True)
class Parts:
    """What the loop drives. The trainer and the engines are Ray actors behind these objects."""

    generator: Generator
    trainer: TrainGroup
    refitter: Refitter
    learner: Learner
    evaluator: Evaluator | None
    recorder: RunRecorder


async def train(config: RLConfig, parts: Parts, step: int, total_steps: int) -> None:
    """Run from ``step`` to ``total_steps``, or to the end of the prompts.

    The policy version is the number of steps that trained the policy; each of them ends with a refit of all engines.
    """
    version = parts.learner.version(step)
    if parts.evaluator and config.eval.at_start and step == 0:
        parts.recorder.log_eval(step, await parts.evaluator.run())

    first_step, saved = step, 0.0
    while step < total_steps:
        timer = Timer({"checkpoint": saved})
        with timer("wait_rollouts"):
            generated = await parts.generator.next_batch()
        if generated is None:
            logger.info("the prompts are used up after %d steps", step)
            break

        batch = RolloutBatch.from_groups(generated.groups)
        with timer("train"):
            trained = await run_blocking(parts.learner.update, batch, step)
        values = _metrics(config, generated, batch, trained, version)
        step += 1
        with timer("refit"):
            if parts.learner.version(step) > version:
                version = parts.learner.version(step)
                await parts.refitter.refit(version)
        parts.generator.policy_updated(version)

        # Logged first: a run that is killed while it saves logs this step again.
        parts.recorder.log_step(step, values | timer.metrics(batch), batch)
        saved = await _save(parts, step) if parts.recorder.wants_checkpoint(step) else 0.0
        if parts.evaluator and config.eval.steps > 0 and step % config.eval.steps == 0:
            parts.recorder.log_eval(step, await parts.evaluator.run())

    if step > first_step and parts.recorder.wants_last_checkpoint(step):
        await _save(parts, step)
    if parts.evaluator and config.eval.at_end and not (config.eval.steps > 0 and step % config.eval.steps == 0):
        parts.recorder.log_eval(step, await parts.evaluator.run())


async def _save(parts: Parts, step: int) -> float:
    """A checkpoint that goes on right behind ``step``; returns the seconds it took."""
    began = time.monotonic()
    state = {"step": step, "generator": parts.generator.state(), "learner": parts.learner.state()}
    await run_blocking(parts.recorder.save, step, parts.trainer, state)
    return time.monotonic() - began


def _metrics(
    config: RLConfig,
    generated: GeneratedBatch,
    batch: RolloutBatch,
    trained: Mapping[str, float],
    version: int,
) -> dict[str, float]:
    return {
        "policy_version": version,
        **m.rollout_metrics(batch, config.reward),
        **m.excluded_metrics(generated.excluded),
        **{f"rollout/{key}": value for key, value in generated.stats.items()},
        **m.staleness_metrics(batch.rollouts, version),
        **trained,
    }


@dataclass
class Timer:
    """Wall time of the phases of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def __call__(self, phase: str):
        start = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """``timing/*`` in seconds (the checkpoint is that of the step before), and the throughput.

        Throughput counts sampled tokens that were trained, per second of the whole step.
        """
        total = time.monotonic() - self.began
        sampled = sum(r.num_actions for r in batch.rollouts)
        return {
            **{f"timing/{phase}": value for phase, value in self.seconds.items()},
            "timing/step": total,
            "throughput/tokens_per_second": sampled / total,
        }
