"""What is learned from one batch: what the estimator needs to know, advantages, optimizer steps, the KL coefficient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from molt_core.algorithms.kl import AdaptiveKl, FixedKl
from molt_core.algorithms.masked import masked_mean
from molt_core.batches import pad_tokens, split_windows, with_advantages
from molt_core.config.kl import KlPlan

if TYPE_CHECKING:
    from torch import Tensor

    from molt_core.algorithms.estimator import Estimator
    from molt_core.batches import RolloutBatch
    from molt_core.config import RLConfig
    from molt_core.contract import Batch
    from molt_core.training.group import TrainGroup
    from molt_core.training.rows import TrainRow


class Learner:
    """Updates the policy from batches of rollouts, as the estimator's needs ask for it."""

    def __init__(self, config: RLConfig, estimator: Estimator, trainer: TrainGroup) -> None:
        self.config, self.estimator, self.trainer = config, estimator, trainer
        self.kl = KlPlan.of(config, estimator.needs)
        target, horizon = config.algo.kl.target, config.algo.kl.horizon
        self.kl_coef = FixedKl(self.kl.coef) if target is None else AdaptiveKl(self.kl.coef, target, horizon)

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """All optimizer steps of one batch; returns its metrics."""
        rows = batch.train_rows()
        seen, metrics = self._measure(rows, batch.for_estimator(self.config.reward))
        advantages = self._finite(self.estimator.advantages(seen))
        metrics |= self._train(with_advantages(rows, advantages))
        if self.kl.use != "off":
            metrics["train/kl_coef"] = self.kl_coef.value
            if "train/kl" in metrics:
                self.kl_coef.update(metrics["train/kl"], len(batch.rollouts))
        return metrics

    def state(self) -> dict[str, Any]:
        """For JSON: what a resumed run needs besides the trainer's own state."""
        return {"kl_coef": self.kl_coef.value}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. A fixed coefficient is the configuration's."""
        if isinstance(self.kl_coef, AdaptiveKl):
            self.kl_coef.value = float(state["kl_coef"])

    def _measure(self, rows: Sequence[TrainRow], seen: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with what only the models know, and metrics of it."""
        if self.kl.use != "reward":
            return seen, {}
        limit = self.config.train.max_tokens_per_gpu
        kl = pad_tokens(self.trainer.token_kl(rows, self.kl.estimator, max_tokens=limit), seen.action_mask)
        metrics = {"train/kl": float(masked_mean(kl.double(), seen.action_mask))}
        return replace(seen, token_kl=kl, kl_coef=self.kl_coef.value), metrics

    def _train(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        train = self.config.train
        windows = split_windows(rows, num_windows(self.config)) * train.max_epochs
        return self.trainer.update(
            windows,
            max_tokens=train.max_tokens_per_gpu,
            micro_batch_size=train.micro_batch_size,
            recompute_old=len(windows) > 1,
            kl_coef=self.kl_coef.value,
        )

    def _finite(self, values: Tensor) -> Tensor:
        if not torch.isfinite(values).all():
            raise ValueError(f"estimator {type(self.estimator).__name__} returned advantages that are not finite")
        return values


def num_windows(config: RLConfig) -> int:
    """Optimizer steps per pass over one step's rollouts."""
    rollouts = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return rollouts // (config.train.batch_size or rollouts)
