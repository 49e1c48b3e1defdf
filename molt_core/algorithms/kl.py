"""KL to a reference policy: estimators per token, and controllers of its coefficient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_DIFFERENCE = 1e4
_MAX_EXPONENT = 10.0


def token_kl(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per sampled token, (B, L); 0 off the mask.

    ``logprobs``, ``reference``: (B, L), of the sampled tokens; ``mask``: (B, L) bool. With d = logprobs - reference:

    - k1: d. Unbiased, may be negative; its gradient alone has mean 0, so it is for rewards.
    - k2: d² / 2.
    - k3: exp(-d) + d - 1, never negative. Where -d > 10 the exponential goes on as its tangent, so that value and
      gradient stay finite and keep pulling towards the reference.

    d is clamped to ±1e4; where it is NaN (two log-probs of -inf) the term is 0. The term is a penalty: add it to a
    loss, subtract it from a reward. Source: J. Schulman, "Approximating KL Divergence", 2020.
    """
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, reference, 0.0)
    d = torch.where(difference.isnan(), 0.0, difference).clamp(-_MAX_DIFFERENCE, _MAX_DIFFERENCE)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    assert estimator == "k3", f"unknown KL estimator {estimator!r}"
    bounded = (-d).clamp(max=_MAX_EXPONENT)
    return bounded.exp() * (1 + (-d - bounded)) + d - 1


class FixedKl:
    """A coefficient that never changes."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, measured: float, samples: int) -> None:
        """Do nothing."""


class AdaptiveKl:
    """A coefficient that steers the measured KL to a target. Source: arXiv 1909.08593, section 2.2.

    value *= 1 + clip(measured / target - 1, ±0.2) * min(samples / horizon, 1), so that it stays positive. ``target``:
    KL per token in nats, ``horizon``: rollouts over which a correction takes full effect. ``value`` is the whole state:
    checkpoint it.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        assert target > 0, "the KL target must be positive"
        assert horizon > 0, "the KL horizon must be positive"
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, measured: float, samples: int) -> None:
        """Take in the KL of one step over ``samples`` rollouts; one that is not finite changes nothing."""
        if not math.isfinite(measured):
            return
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(samples / self.horizon, 1.0)
