"""Sums, means and whitening over a mask. Values off the mask may be anything, NaN included, and get no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where mask is true. ``x``, ``mask`` (bool): same shape; ``dim``: axis to reduce, all of them if None."""
    return torch.where(mask, x, 0.0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ where(mask, x, 0) / max(Σ mask, 1): the mean over the mask, 0 where the mask is empty."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def whiten(x: Tensor, weights: Tensor) -> Tensor:
    """Shift and scale x to mean 0 and population variance 1 under the weights; entries of weight 0 become 0.

    μ = Σ w x / Σ w,  σ² = max(Σ w (x-μ)² / Σ w, 1e-8),  result = (x - μ) / σ. ``x``: any shape; ``weights``: same
    shape, a bool mask or non-negative counts. The moments are accumulated in float64. All-zero weights give zeros.
    """
    kept = weights > 0
    total = weights.sum(dtype=torch.float64).clamp(min=1)
    weights = weights.to(x.dtype)
    x = torch.where(kept, x, 0.0)
    mean = (x * weights).sum(dtype=torch.float64) / total
    centred = torch.where(kept, x - mean.to(x.dtype), 0.0)
    variance = (centred.square() * weights).sum(dtype=torch.float64) / total
    return centred / variance.clamp(min=VARIANCE_FLOOR).sqrt().to(x.dtype)
