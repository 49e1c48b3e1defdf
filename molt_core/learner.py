"""What is learned from one batch: what the estimator needs to know, advantages, optimizer steps, the KL coefficient."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from molt_core.algorithms.kl import AdaptiveKl, FixedKl
from molt_core.algorithms.masked import VARIANCE_FLOOR, moments
from molt_core.batches import pad_tokens, split_windows, with_advantages
from molt_core.config.kl import KlPlan
from molt_core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from molt_core.algorithms.estimator import Estimator
    from molt_core.batches import RolloutBatch
    from molt_core.config import RLConfig
    from molt_core.contract import Batch
    from molt_core.training.group import TrainGroup
    from molt_core.training.rows import TrainRow

logger = logging.getLogger("molt")

_FILTERED, _ALL = "train/is_filter_ratio", 0.999


class Learner:
    """Updates the models from batches of rollouts, as the estimator's needs ask for it."""

    def __init__(self, config: RLConfig, estimator: Estimator, trainer: TrainGroup) -> None:
        self.config, self.estimator, self.trainer = config, estimator, trainer
        self.kl = KlPlan.of(config, estimator.needs)
        target, horizon = config.algo.kl.target, config.algo.kl.horizon
        self.kl_coef = FixedKl(self.kl.coef) if target is None else AdaptiveKl(self.kl.coef, target, horizon)

    def version(self, step: int) -> int:
        """The policy version after ``step`` steps: how many of them trained the policy."""
        return max(step - self.config.actor.freezing_steps, 0)

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """All optimizer steps of one batch, after ``step`` others; returns its metrics."""
        rows = batch.train_rows()
        seen, metrics = self._measure(batch, rows)
        if self.estimator.needs.values:
            advantages, returns = self.estimator.advantages_and_returns(seen)
            metrics |= self._train_critic(seen, rows, self._finite(returns, "returns"))
        else:
            advantages = self.estimator.advantages(seen)
        advantages = self._finite(advantages, "advantages")
        trains_policy = self.version(step + 1) > self.version(step)
        if trains_policy:
            metrics |= self._train_policy(with_advantages(rows, advantages))
            if self.config.algo.advantage.is_correction_mode == "mask" and metrics.get(_FILTERED, 0.0) > _ALL:
                logger.warning(
                    "the correction masked %.1f %% of step %d, which hardly trained anything: widen "
                    "--algo.advantage.is_correction_threshold",
                    *(100 * metrics[_FILTERED], step + 1),
                )
        if self.kl.use != "off":
            metrics["train/kl_coef"] = self.kl_coef.value
            if trains_policy and "train/kl" in metrics:
                self.kl_coef.update(metrics["train/kl"], len(batch.rollouts))
        return metrics

    def state(self) -> dict[str, Any]:
        """For JSON: what a resumed run needs besides the trainer's own state."""
        return {"kl_coef": self.kl_coef.value}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. A fixed coefficient is the configuration's; so is one where the run had no KL before."""
        stored = float(state["kl_coef"])
        if isinstance(self.kl_coef, AdaptiveKl) and stored > 0:
            self.kl_coef.value = stored

    def _measure(self, batch: RolloutBatch, rows: Sequence[TrainRow]) -> tuple[Batch, dict[str, float]]:
        """What the estimator sees, with what only the models know; and metrics of it."""
        seen = batch.for_estimator(self.config.reward)
        limit = self.config.train.max_tokens_per_gpu
        metrics: dict[str, float] = {}
        if self.kl.use == "reward":
            kl = pad_tokens(self.trainer.token_kl(rows, self.kl.estimator, max_tokens=limit), seen.action_mask)
            metrics["train/kl"] = moments(kl, seen.action_mask)[0]
            seen = replace(seen, token_kl=kl, kl_coef=self.kl_coef.value)
        if self.estimator.needs.values:
            states = self.trainer.values(rows, max_tokens=limit)
            values = pad_tokens([row[:-1] for row in states], seen.action_mask)
            last = torch.tensor([float(row[-1]) for row in states])
            seen = replace(seen, values=values, bootstrap=torch.where(batch.cut_rows(), last, 0.0))
        return seen, metrics

    def _train_policy(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        train = self.config.train
        windows = split_windows(rows, num_windows(self.config)) * train.max_epochs
        return self.trainer.update(
            windows,
            max_tokens=train.max_tokens_per_gpu,
            micro_batch_size=train.micro_batch_size,
            recompute_old=len(windows) > 1,
            kl_coef=self.kl_coef.value,
        )

    def _train_critic(self, seen: Batch, rows: Sequence[TrainRow], returns: Tensor) -> dict[str, float]:
        """``critic/explained_variance``: 1 - Var(R - V) / Var(R) over the action tokens, before the update."""
        assert seen.values is not None
        train = self.config.train
        windows = split_windows(with_advantages(rows, returns), num_windows(self.config))
        trained = self.trainer.update_critic(
            windows * critic_epochs(self.config),
            max_tokens=train.max_tokens_per_gpu,
            micro_batch_size=train.micro_batch_size,
        )
        error, unexplained = moments(returns - seen.values, seen.action_mask)
        mean, variance = moments(returns, seen.action_mask)
        return trained | {
            "critic/explained_variance": 1 - unexplained / max(variance, VARIANCE_FLOOR),
            "critic/value_mean": mean - error,
            "critic/return_mean": mean,
        }

    def _finite(self, values: Tensor, name: str) -> Tensor:
        # The extremes take no temporary of the size of the batch; NaN is both of them.
        if values.numel() and not torch.stack(values.aminmax()).isfinite().all():
            raise RunError(f"estimator {type(self.estimator).__name__} returned {name} that are not finite")
        return values


def critic_epochs(config: RLConfig) -> int:
    """Passes of the critic over one step's rollouts."""
    return config.critic.max_epochs or config.train.max_epochs


def num_windows(config: RLConfig) -> int:
    """Optimizer steps per pass over one step's rollouts."""
    rollouts = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return rollouts // (config.train.batch_size or rollouts)
