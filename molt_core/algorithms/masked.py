"""Sums, means and whitening over a mask. Values off the mask may be anything, NaN included, and get no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8
_CHUNK_ROWS = 64


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where mask is true. ``x``, ``mask`` (bool): same shape; ``dim``: axis to reduce, all of them if None."""
    return torch.where(mask, x, 0.0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ where(mask, x, 0) / max(Σ mask, 1): the mean over the mask, 0 where the mask is empty."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def moments(x: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and population variance of x over the mask, in float64; 0 and 0 where the mask is empty.

    ``x``, ``mask`` (bool): (N, ...), on the host. Chunks of rows bound the memory; merged as in Chan et al., 1979.
    """
    count, mean, squares = 0, 0.0, 0.0
    for c, m in zip(x.split(_CHUNK_ROWS), mask.split(_CHUNK_ROWS), strict=True):
        part = torch.from_numpy(c.numpy()[m.numpy()]).double()
        n = len(part)
        if not n:
            continue
        variance, part_mean = (float(value) for value in torch.var_mean(part, correction=0))
        step = part_mean - mean
        count += n
        mean += step * n / count
        squares += variance * n + step**2 * n * (count - n) / count
    return mean, squares / max(count, 1)


def whiten(x: Tensor, weights: Tensor) -> Tensor:
    """Shift and scale x to mean 0 and population variance 1 under the weights; entries of weight 0 become 0.

    μ = Σ w x / Σ w,  σ² = max(Σ w (x-μ)² / Σ w, 1e-8),  result = (x - μ) / σ. ``x``: (N, ...); ``weights``: same
    shape, a bool mask or non-negative counts. Moments are taken in float64, in chunks of rows to bound memory.
    All-zero weights give zeros.
    """
    chunks = list(zip(x.split(_CHUNK_ROWS), weights.split(_CHUNK_ROWS), strict=True))
    total = sum(float(w.sum(dtype=torch.float64)) for _, w in chunks) or 1.0
    mean = sum(float((torch.where(w > 0, c, 0.0).double() * w).sum()) for c, w in chunks) / total
    squares = sum(float((torch.where(w > 0, c - mean, 0.0).double().square() * w).sum()) for c, w in chunks)
    scale = max(squares / total, VARIANCE_FLOOR) ** 0.5
    out = torch.empty_like(x)
    for part, (c, w) in zip(out.split(_CHUNK_ROWS), chunks, strict=True):
        part.copy_(torch.where(w > 0, (c - mean) / scale, 0.0))
    return out
