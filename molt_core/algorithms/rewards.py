"""Shaping of rewards before the estimator. A reward of NaN (no score) stays NaN everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_rewards(rewards: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Rewards clamped to [low, high], (R,), and which of them were changed, (R,) bool, for the metrics."""
    return rewards.clamp(low, high), (rewards < low) | (rewards > high)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft penalty on length, (R,) float32 in [-1, 0], to be added to the reward.

    0 up to max_length - buffer, then (max_length - buffer - length) / buffer down to -1 at max_length, -1 beyond.
    ``lengths``: (R,), sampled tokens; ``max_length``, ``buffer``: tokens, 0 < buffer <= max_length.
    Source: arXiv 2503.14476, equation 13.
    """
    assert 0 < buffer <= max_length, "the buffer must be positive and fit into the maximum length"
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def stop_properly(rewards: Tensor, truncated: Tensor, factor: float) -> Tensor:
    """Rewards where that of a rollout which did not stop by itself is multiplied by ``factor``, (R,).

    ``rewards``: (R,); ``truncated``: (R,) bool; ``factor``: in [0, 1], 1 changes nothing, 0 leaves no reward. Negative
    rewards are multiplied too and so become milder: the factor is a punishment only where rewards are at least 0.
    """
    assert 0 <= factor <= 1, "the factor must lie in [0, 1]"
    return torch.where(truncated, rewards * factor, rewards)
