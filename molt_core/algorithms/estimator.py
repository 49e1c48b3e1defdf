"""Advantage estimators: a pure function over tensors, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from molt_core.component import Component

if TYPE_CHECKING:
    from torch import Tensor

    from molt_core.contract import Batch


@dataclass(frozen=True, slots=True)
class Needs:
    """What an estimator declares; launch checks and data flow follow from it, never from its name.

    ``groups``: it compares rollouts of one prompt. ``min_samples``, ``max_samples``: fewest and most rollouts per
    prompt. ``single_step``: it is for one optimizer step per batch. ``token_kl``: it can
    use a token-level KL. ``reference``: it needs a reference model. ``values``: it needs a critic.
    ``reward``: rewards matter to it. ``whitens``: unless told not to, it gives advantages of mean 0 and variance 1.
    """

    groups: bool = False
    min_samples: int = 1
    token_kl: bool = False
    reference: bool = False
    values: bool = False
    max_samples: int | None = None
    single_step: bool = False
    reward: bool = True
    whitens: bool = False

    @property
    def fewest(self) -> int:
        """Fewest scored rollouts per prompt that it can work with; to compare takes two."""
        return max(self.min_samples, 2 if self.groups else 1)


class Estimator(Component):
    """Turns the rewards of a batch into advantages."""

    kind: ClassVar[str] = "estimator"
    needs: ClassVar[Needs] = Needs()

    def advantages(self, batch: Batch) -> Tensor:
        """Advantages, (R,) one per rollout or (S, L) one per token.

        Rollouts without a score (NaN reward) get 0 or NaN; the caller excludes them from the loss either way.
        """
        raise NotImplementedError

    def advantages_and_returns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """For estimators that need values: also the critic's targets. (S, L) float32 each, 0 off the mask."""
        raise NotImplementedError
