"""Estimators that give one advantage per rollout, by comparing the rewards of a batch or of a group.

r is the reward; n, mean and std are the size, mean and sample standard deviation of the rollout's group, over its
scored rollouts only. A rollout without a score gets 0 and influences no other. Nor does a group of one: there is
nothing to compare it with, so its advantage is 0 (in ``rloo``, whose baseline is then empty, its reward).
A group of equal rewards gives exactly 0.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from pydantic import BaseModel, Field, PositiveFloat
from torch import Tensor

from molt_core import Batch, Estimator, Needs
from molt_core.algorithms.masked import whiten

logger = logging.getLogger("molt")


class _GroupEstimator(Estimator):
    """Compares the rollouts of one prompt; warns once when a whole batch has nothing to compare."""

    needs = Needs(groups=True, min_samples=2)
    _warned = False

    def advantages(self, batch: Batch) -> Tensor:
        """One advantage per rollout, (R,) float32."""
        if len(batch.rewards) and not self._warned and bool((batch.group_size() <= 1).all()):
            self._warned = True
            logger.warning(
                "no group of this batch has two scored rollouts, so %s has nothing to compare; "
                "raise rollout.n_samples_per_prompt or look for failing rollouts",
                type(self).__name__,
            )
        return torch.where(batch.scored, self._compare(batch), 0.0)

    def _compare(self, batch: Batch) -> Tensor:
        raise NotImplementedError


class DrGrpo(_GroupEstimator):
    """r - mean. For an unbiased loss pair it with the aggregation seq-mean-token-sum. Source: arXiv 2503.20783."""

    def _compare(self, batch: Batch) -> Tensor:
        return batch.rewards - batch.group_mean()


class Grpo(_GroupEstimator):
    """(r - mean) / (std + eps). Source: arXiv 2402.03300."""

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of grpo."""

        eps: PositiveFloat = Field(1e-6, description="Added to the standard deviation.")

    def _compare(self, batch: Batch) -> Tensor:
        return (batch.rewards - batch.group_mean()) / (batch.group_std() + self.config.eps)


class Rloo(_GroupEstimator):
    """r minus the mean reward of the other rollouts of the group. Source: arXiv 2402.14740.

    A group of one has no others: the baseline is 0 and its advantage is its reward.
    """

    def _compare(self, batch: Batch) -> Tensor:
        return batch.rewards - batch.leave_one_out()


class ReinforceBaseline(_GroupEstimator):
    """r - mean, whitened over the action tokens of the batch. Source: arXiv 2501.03262.

    Whitening: A' = (A - μ) / σ with mean and population standard deviation over all action tokens of groups whose
    rewards differ; the other groups have nothing to compare and keep their 0. ``no_whiten`` leaves r - mean as it is.
    """

    needs = Needs(groups=True, min_samples=2, whitens=True)

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of reinforce_baseline."""

        no_whiten: bool = Field(False, description="Leave the advantages as they are.")

    def _compare(self, batch: Batch) -> Tensor:
        advantages = batch.rewards - batch.group_mean()
        if self.config.no_whiten:
            return advantages
        low, high = batch.group_range()
        return whiten(advantages, torch.where(batch.scored & (low < high), batch.num_actions(), 0))


class FlashReinforce(Estimator):
    """r minus the mean reward of the batch, for one rollout per prompt and one optimizer step per batch.

    No group is needed, so every prompt is sampled once and a batch covers as many prompts as it has rollouts.
    A batch of equal rewards gives exactly 0. Made for token weights with a sequence gate
    (``is_correction_gating binary_kl``) and the aggregation seq-mean-token-mean.
    """

    needs = Needs(max_samples=1, single_step=True)

    def advantages(self, batch: Batch) -> Tensor:
        """One advantage per rollout, (R,) float32."""
        as_one_group = replace(batch, groups=torch.zeros_like(batch.groups))
        return torch.where(batch.scored, batch.rewards - as_one_group.group_mean(), 0.0)
