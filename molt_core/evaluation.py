"""Held-out evaluation on the run's own engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.metrics import excluded_metrics, info_metrics, length_metrics
from molt_core.rollout.tasks import RolloutSummary, SamplingSettings

if TYPE_CHECKING:
    from molt_core.config import RLConfig
    from molt_core.rollout.generator import GroupDispatcher


class Evaluator:
    """Runs every held-out prompt once per call and reports rewards per rollout, failures apart."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], dispatcher: GroupDispatcher, config: RLConfig) -> None:
        self.rows, self.dispatcher, self.seed = rows, dispatcher, config.train.seed
        self.num_samples = config.eval.n_samples_per_prompt
        temperature = config.eval.temperature
        self.sampling = SamplingSettings(
            temperature=config.rollout.temperature if temperature is None else temperature,
            max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        )

    async def run(self) -> dict[str, float]:
        """Metrics ``eval/*``, every time of the same prompts with the same seeds.

        Mean reward, pass@1 (mean over prompts of the mean), pass@n (of the maximum), lengths.
        """
        groups = await self.dispatcher.run_all(
            self.rows, prefix="eval", num_samples=self.num_samples, sampling=self.sampling, seed=self.seed
        )
        rollouts = [r for group in groups for r in group.rollouts]
        scored = [r for r in rollouts if r.status.is_scored]
        counts: dict[str, int] = defaultdict(int)
        for rollout in rollouts:
            if not rollout.status.is_scored:
                counts[rollout.status.value] += 1
        return {
            "eval/num_rollouts": len(scored),
            **excluded_metrics(counts, "eval"),
            **(self._rewards(scored) if scored else {}),
        }

    def _rewards(self, scored: Sequence[RolloutSummary]) -> dict[str, float]:
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for rollout in scored:
            by_prompt[rollout.group_id].append(rollout.reward)
        values = {
            "eval/reward_mean": float(np.mean([r.reward for r in scored])),
            "eval/pass1": float(np.mean([np.mean(x) for x in by_prompt.values()])),
            **length_metrics(scored, "eval"),
            **info_metrics(scored, "eval"),
        }
        if self.num_samples > 1:
            values[f"eval/pass{self.num_samples}"] = float(np.mean([max(x) for x in by_prompt.values()]))
        return values
