"""What the KL section of a configuration comes to, for an estimator with certain needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from molt_core.config.checks import EstimatorNeeds
    from molt_core.config.rl import RLConfig

logger = logging.getLogger("molt")


@dataclass(frozen=True, slots=True)
class KlPlan:
    """``use``: the KL is a term of the loss, a reward of the estimator, or off. ``coef``: where it starts.

    ``model``: checkpoint of the reference model; None where none is needed.
    """

    use: Literal["off", "loss", "reward"]
    coef: float
    estimator: str
    model: str | None

    @classmethod
    def of(cls, config: RLConfig, needs: EstimatorNeeds) -> KlPlan:
        """An estimator that needs a reference gets the KL as a reward (k1), with a coefficient of 1 unless given."""
        kl = config.algo.kl
        coef = kl.init_coef or (1.0 if needs.reference else 0.0)
        as_loss = not needs.reference if kl.use_loss is None else kl.use_loss
        has_model = coef > 0 and kl.ref == "reference"
        return cls(
            use="off" if coef == 0 else "loss" if as_loss else "reward",
            coef=coef,
            estimator=kl.estimator or ("k3" if as_loss else "k1"),
            model=(config.ref.model_name_or_path or config.actor.model_name_or_path) if has_model else None,
        )


def kl_problems(config: RLConfig, needs: EstimatorNeeds) -> Iterator[str]:
    """What cannot work, or would have no effect; one sentence each, with what to change."""
    kl, plan, name = config.algo.kl, KlPlan.of(config, needs), config.algo.advantage.estimator
    if needs.reference:
        if config.ref.model_name_or_path in (None, config.actor.model_name_or_path):
            yield f"estimator {name} needs a teacher: set --ref.model_name_or_path to another model"
        if plan.use == "loss":
            yield f"estimator {name} takes the KL as its reward: leave --algo.kl.use_loss out"
        if kl.ref == "rollout":
            yield f"estimator {name} needs a reference model: set --algo.kl.ref reference"
        if kl.target is not None:
            yield (
                f"--algo.kl.target would steer the scale of all that estimator {name} learns from: leave it out, and "
                "set --algo.kl.init_coef"
            )
        if plan.estimator != "k1":
            yield (
                f"estimator {name} needs the signed difference of log-probs: leave --algo.kl.estimator out, or set k1"
            )
    elif plan.use == "reward" and not needs.token_kl:
        yield (
            f"estimator {name} cannot use a KL as a reward, so it would have no effect: set --algo.kl.use_loss, or "
            "choose an estimator that takes a token-level KL"
        )
    elif plan.use == "reward" and kl.ref == "rollout":
        yield (
            "a KL to the rollout policy is no reward, since that policy is the one that is trained: "
            "set --algo.kl.use_loss, or --algo.kl.ref reference"
        )
    if kl.target is not None and plan.use == "loss" and plan.estimator == "k1":
        yield "--algo.kl.target needs a KL term with a gradient towards the reference: set --algo.kl.estimator k2 or k3"


def advise_on_kl(plan: KlPlan) -> None:
    """Log what works and is hardly ever meant."""
    if plan.use == "loss" and plan.estimator == "k1":
        logger.warning("the gradient of k1 as a loss is 0 on average; k2 or k3 pull towards the reference")
    if plan.use == "reward" and plan.estimator != "k1":
        logger.warning("%s as a reward is a biased penalty of every difference; k1 is the unbiased KL", plan.estimator)
