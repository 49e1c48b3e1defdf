"""Token rewards, discounted sums and generalised advantage estimation, vectorised over rows.

A recurrence y_t = x_t + c y_{t+1} is solved block by block: inside a block as one product with the triangular matrix
of the powers of c, and between blocks as a carry, so that a row of L tokens takes L / 64 steps. All in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64
_CHUNK_ROWS = 64


def token_rewards(rewards: Tensor, mask: Tensor, token_kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """The reward on each row's last action token, minus kl_coef times the KL on every action token, (S, L) float32.

    ``rewards``: (S,), one per row; ``mask``: (S, L) bool; ``token_kl``: (S, L). Rows without action get no reward.
    """
    out = torch.zeros(mask.shape, dtype=torch.float32)
    if token_kl is not None and kl_coef:
        out = torch.where(mask, -kl_coef * token_kl, 0.0)
    rows = mask.any(dim=-1).nonzero().squeeze(-1)
    if not len(rows):
        return out
    # A byte per token is enough to find the last true entry, and keeps the temporary small.
    last = mask.shape[1] - 1 - mask[rows].flip(-1).to(torch.uint8).argmax(dim=-1)
    out[rows, last] += rewards[rows].float()
    return out


def discounted_sum(x: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} along the last axis, y after the end being 0. ``x``: (S, L); result float64."""
    if discount == 1:
        return x.double().flip(-1).cumsum(-1).flip(-1)
    rows, length = x.shape
    blocks = -(-length // _BLOCK)
    padded = torch.zeros(rows, blocks * _BLOCK, dtype=torch.float64)
    padded[:, :length] = x
    index = torch.arange(_BLOCK)
    distance = index[:, None] - index[None, :]
    powers = torch.where(distance >= 0, float(discount) ** distance.clamp(min=0).double(), 0.0)
    y = (padded.view(rows * blocks, _BLOCK) @ powers).view(rows, blocks, _BLOCK)
    to_next_block = float(discount) ** (_BLOCK - index).double()
    for block in range(blocks - 2, -1, -1):
        y[:, block].addcmul_(to_next_block, y[:, block + 1, :1])
    return y.view(rows, blocks * _BLOCK)[:, :length]


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the action tokens of each row: advantages and returns, (S, L) float32.

    With t+1 the next *action* token of the row: δ_t = r_t + gamma V_{t+1} - V_t,  A_t = δ_t + gamma lam A_{t+1},
    return_t = A_t + V_t. Prompt, tool output and padding are skipped: they carry no error and no discount, and what
    ``rewards`` and ``values`` hold there is never read. Both results are 0 off the mask.

    ``rewards``, ``values``: (S, L); ``mask``: (S, L) bool; ``bootstrap``: (S,), the value after the row's last action
    where the episode went on (it was cut), 0 where it ended; all 0 if None. Source: arXiv 1506.02438.
    """
    advantages, returns = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for start in range(0, len(mask), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        m = mask[rows]
        counts = m.sum(dim=-1)
        width = int(counts.max())
        if not width:
            continue
        dense = torch.arange(width) < counts[:, None]
        r = _spread(_pick(rewards[rows], m), dense)
        v = _spread(_pick(values[rows], m), dense)
        after = torch.cat([v[:, 1:], v.new_zeros(len(v), 1)], dim=-1)
        if bootstrap is not None:
            acting = counts > 0
            after[acting, counts[acting] - 1] = bootstrap[rows][acting].double()
        # All three are 0 after the last action, and so is the error there.
        a = discounted_sum(r.add_(after, alpha=gamma).sub_(v), gamma * lam)
        advantages[rows].masked_scatter_(m, _pick(a, dense).float())
        returns[rows].masked_scatter_(m, _pick(v.add_(a), dense).float())
    return advantages, returns


def _pick(x: Tensor, mask: Tensor) -> Tensor:
    """The entries of x where the mask is true, (N,). NumPy does this several times as fast as masked_select."""
    return torch.from_numpy(x.numpy()[mask.numpy()])


def _spread(x: Tensor, mask: Tensor) -> Tensor:
    """The opposite: x (N,) where the mask is true, in order, and 0 elsewhere; float64."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter_(mask, x.double())
