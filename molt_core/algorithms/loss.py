"""Policy losses: a pure function from log-probs and advantages to a loss per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from molt_core.component import Component

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Everything on the next-token axis, (B, L). ``mask``: bool, true on sampled tokens.

    ``logprobs`` carries the gradient; ``old_logprobs`` is the policy before this batch's updates; all are log-probs
    of the sampling distribution (after temperature). Values off the mask may be anything, NaN included.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


class Loss(Component):
    """A policy-gradient loss. Aggregation, importance correction, KL and entropy terms are added by the core.

    ``single_step``: it makes no use of the old log-probs, so it is for one optimizer step per batch.
    """

    kind: ClassVar[str] = "loss"
    single_step: ClassVar[bool] = False

    def token_loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss per token, (B, L) float32, and metrics: (B, L) is averaged over the mask, (B,) over the rows."""
        raise NotImplementedError
