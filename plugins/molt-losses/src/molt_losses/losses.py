"""Policy losses per token. d = log π - log π_old of a sampled token, clamped to ±30; ratio = exp(d); A the advantage.

A token whose log-ratio or advantage is not a number takes no part: loss and gradient 0, counted in
``nonfinite_ratio``. Every loss reports ``policy_kl``, the mean of -d, an estimate of KL(π_old || π).
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, Field, PositiveFloat
from torch import Tensor

from molt_core import Loss, LossInputs
from molt_core.algorithms.correction import MAX_LOG_RATIO, log_ratio
from molt_core.algorithms.masked import masked_mean

Metrics = dict[str, Tensor]


def _prepare(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor, Metrics]:
    """Log-ratio and advantage, both 0 where a token takes no part; the tokens that do; and the common metrics."""
    d, exists = log_ratio(inputs.logprobs.float(), inputs.old_logprobs.float(), inputs.mask)
    used = exists & inputs.advantages.isfinite()
    advantages = torch.where(used, inputs.advantages.float(), 0.0)
    metrics = {"policy_kl": -d.detach(), "nonfinite_ratio": (inputs.mask & ~used).float()}
    return torch.where(used, d, 0.0), advantages, used, metrics


def _clipped(ratio: Tensor, advantages: Tensor, band: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """min(ratio A, clip(ratio, 1 - LOW, 1 + HIGH) A), and where the clipped term is the smaller one."""
    low, high = band
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return torch.minimum(unclipped, clipped), (clipped < unclipped).detach().float()


class Ppo(Loss):
    """-min(ratio A, clip(ratio, 1 - LOW, 1 + HIGH) A). Sources: arXiv 1707.06347; 2503.14476 (LOW and HIGH apart).

    With ``dual_clip`` c, for A < 0: -max(min(...), c A), which bounds the loss of a token that became much likelier
    although it was bad (arXiv 1912.09729). Metrics: ``policy_clip_ratio``, share of tokens where the clipped term is
    the smaller one; ``dual_clip_ratio``, share of tokens bounded by c.
    """

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of ppo."""

        eps_clip_low_high: tuple[PositiveFloat, PositiveFloat] = Field(
            (0.2, 0.2), description="LOW HIGH: the ratio is clipped to [1 - LOW, 1 + HIGH]."
        )
        dual_clip: float | None = Field(None, gt=1, description="Bound on the ratio of tokens with negative advantage.")

    def token_loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The loss per token, (B, L) float32, and metrics."""
        d, advantages, _, metrics = _prepare(inputs)
        objective, metrics["policy_clip_ratio"] = _clipped(d.exp(), advantages, self.config.eps_clip_low_high)
        if self.config.dual_clip is not None:
            floor = self.config.dual_clip * advantages
            bounded = (advantages < 0) & (objective < floor)
            objective = torch.where(bounded, floor, objective)
            metrics["dual_clip_ratio"] = bounded.float()
        return -objective, metrics


class Gspo(Loss):
    """-min(s A, clip(s, 1 - LOW, 1 + HIGH) A) with the sequence ratio s = exp(mean_t d). Source: arXiv 2507.18071.

    s is the same for all action tokens of a row; its gradient reaches token t through
    s_t = s * exp(log π_t - stop_gradient(log π_t)). The mean is over action tokens alone. As published, sequences count
    equally: aggregation seq-mean-token-mean; with token-mean a sequence counts by its length. Metrics:
    ``policy_clip_ratio``; ``policy_ratio``, the mean of s over rows, (B,).
    """

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of gspo."""

        eps_clip_low_high: tuple[PositiveFloat, PositiveFloat] = Field(
            (3e-4, 4e-4), description="LOW HIGH: the sequence ratio is clipped to [1 - LOW, 1 + HIGH]."
        )

    def token_loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The loss per token, (B, L) float32, and metrics."""
        d, advantages, used, metrics = _prepare(inputs)
        log_s = masked_mean(d.detach(), used, dim=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = (d - d.detach() + log_s[:, None]).exp()
        objective, metrics["policy_clip_ratio"] = _clipped(ratio, advantages, self.config.eps_clip_low_high)
        metrics["policy_ratio"] = log_s.exp()
        return -objective, metrics


class Cispo(Loss):
    """-stop_gradient(min(ratio, HIGH)) A log π. Source: arXiv 2506.13585.

    Every token keeps its gradient; only its weight is bounded. Metric: ``policy_clip_ratio``, share with
    ratio > HIGH.
    """

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of cispo."""

        eps_clip_low_high: tuple[Annotated[float, Field(ge=0, le=0)], Annotated[float, Field(ge=1)]] = Field(
            (0.0, 5.0),
            description="LOW HIGH: HIGH is the largest weight itself; LOW is 0, since there is no lower bound.",
        )

    def token_loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The loss per token, (B, L) float32, and metrics."""
        d, advantages, used, metrics = _prepare(inputs)
        ceiling = self.config.eps_clip_low_high[1]
        ratio = d.detach().exp()
        metrics["policy_clip_ratio"] = (ratio > ceiling).float()
        return -ratio.clamp(max=ceiling) * advantages * _log_probs(inputs, used), metrics


class Reinforce(Loss):
    """-A log π: the plain policy gradient, without a ratio. Source: Williams, 1992.

    One optimizer step per batch: the importance correction makes up for the policy that sampled, and nothing for the
    steps of the same batch before.
    """

    single_step = True

    def token_loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The loss per token, (B, L) float32, and metrics."""
        _, advantages, used, metrics = _prepare(inputs)
        return -advantages * _log_probs(inputs, used), metrics


def _log_probs(inputs: LossInputs, used: Tensor) -> Tensor:
    """log π where it takes part and is finite, else 0 and without gradient."""
    return torch.where(used & inputs.logprobs.isfinite(), inputs.logprobs.float(), 0.0)
