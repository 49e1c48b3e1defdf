"""From token losses to one number per optimizer step.

All micro-batches of all ranks of one optimizer step (a *window*) share one denominator, counted before the window
starts. Each micro-batch contributes a share; the shares are added up and never divided by the number of micro-batches
or ranks, so that the value and its gradient do not depend on how the window was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from molt_core.algorithms.masked import masked_mean, masked_sum

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean-token-mean")


@dataclass(frozen=True, slots=True)
class Totals:
    """What one window holds over all its micro-batches and ranks.

    ``tokens``: action tokens; ``sequences``: rows with at least one action token; ``prompts``: prompts (groups) with at
    least one such row.
    """

    tokens: int
    sequences: int
    prompts: int = 0


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    totals: Totals,
    *,
    row_weights: Tensor | None = None,
    norm: float | None = None,
) -> Tensor:
    """This micro-batch's share of the window's loss, a scalar; the sum of all shares is the loss.

    ``loss``: (B, L), one value per token; ``mask``: (B, L) bool. With l the loss, m the mask, b a row, t a token:

    - token-mean: Σ_bt m l / tokens. Source: arXiv 2503.14476.
    - seq-mean-token-mean: Σ_b (Σ_t m l / Σ_t m) / sequences. Source: arXiv 2402.03300. A sequence is a row, so that a
      rollout whose history was rewritten counts once per segment here.
    - seq-mean-token-sum: Σ_bt m l / (sequences * norm). ``norm``: a constant, usually the token limit of a response;
      1 if None. Source: arXiv 2503.20783.
    - prompt-mean-token-mean: Σ_b w_b Σ_t m l / prompts. ``row_weights`` w: (B,), one over the action tokens of the
      row's prompt in the window: the token mean over a prompt's rollouts, then the mean over prompts, so that every
      prompt counts once however much it kept. Source: arXiv 2510.13786.

    An empty window gives 0, with a graph behind it, so that every rank can run its backward pass.
    """
    assert mask.dtype == torch.bool, "the mask must be boolean"
    assert loss.shape == mask.shape, f"loss {tuple(loss.shape)} and mask {tuple(mask.shape)} differ"
    if mode == "token-mean":
        return masked_sum(loss, mask) / max(totals.tokens, 1)
    if mode == "seq-mean-token-sum":
        return masked_sum(loss, mask) / (max(totals.sequences, 1) * (1.0 if norm is None else norm))
    if mode == "seq-mean-token-mean":
        return masked_mean(loss, mask, dim=-1).sum() / max(totals.sequences, 1)
    assert mode == "prompt-mean-token-mean", f"unknown aggregation {mode!r}"
    assert row_weights is not None, "prompt-mean-token-mean needs row_weights"
    return (masked_sum(loss, mask, dim=-1) * row_weights).sum() / max(totals.prompts, 1)
