"""The loss of a value model."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error per token, (B, L), 0 off the mask; and metrics.

    0.5 max((v - R)², (v_old + clamp(v - v_old, ±clip) - R)²): a value that moved by more than ``clip`` towards its
    return gains nothing by moving on. ``clip`` None: 0.5 (v - R)². Source: arXiv 1707.06347, and its PPO2 code.

    ``values`` carry the gradient; ``old``: those before the update; ``returns``: the targets; (B, L) each, anything off
    ``mask`` (bool). Metric ``clip_ratio``: whether |v - v_old| > clip, (B, L).
    """
    v, before, target = (torch.where(mask, x, 0.0).float() for x in (values, old, returns))
    error = (v - target).square()
    if clip is None:
        return 0.5 * error, {}
    moved = v - before
    bounded = (before + moved.clamp(-clip, clip) - target).square()
    return 0.5 * torch.maximum(error, bounded), {"clip_ratio": (moved.detach().abs() > clip).float()}
