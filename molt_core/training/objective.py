"""What one micro-batch adds to the loss and to the metrics of its optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from molt_core.algorithms.aggregate import Totals, aggregate
from molt_core.algorithms.correction import correct, log_ratio
from molt_core.algorithms.kl import token_kl
from molt_core.algorithms.loss import Loss, LossInputs
from molt_core.algorithms.masked import masked_sum
from molt_core.plugins import PluginSpec, load_plugins
from molt_core.training.packing import MicroBatch
from molt_core.training.rows import ObjectiveSpec


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Local sums, counts and maxima; the mean over all ranks is Σ sums / Σ counts, events have no counts."""

    sums: dict[str, float]
    counts: dict[str, float]
    maxima: dict[str, float]


class Tally:
    """Adds metrics up on the device, so that the host waits once per update and not once per metric."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def add_event(self, name: str, count: float) -> None:
        """A metric that is the sum itself."""
        self._sums[name] = self._sums.get(name, 0.0) + count

    def add_masked(self, metrics: Mapping[str, Tensor], mask: Tensor) -> None:
        """(B, L) metrics count once per action token, (B,) metrics once per row that has one."""
        rows = mask.any(-1)
        for name, value in metrics.items():
            where = mask if value.dim() == 2 else rows
            self.add(name, masked_sum(value.detach().double(), where), where.sum())

    def add_max(self, name: str, value: Tensor) -> None:
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def result(self) -> MetricSums:
        """Everything as numbers."""
        return MetricSums(
            *({k: float(v) for k, v in part.items()} for part in (self._sums, self._counts, self._maxima))
        )


@dataclass(frozen=True, slots=True)
class Known:
    """Log-probs (B, T-1) without a graph: ``old`` before the update, ``reference`` of the reference model."""

    old: Tensor
    reference: Tensor | None = None


class Objective:
    """The loss of an ObjectiveSpec, with the window's denominators."""

    def __init__(self, spec: ObjectiveSpec, plugins: PluginSpec) -> None:
        self.spec = spec
        self._loss: Loss | None = None
        if spec.loss is not None:
            self._loss = load_plugins(plugins).create("loss", spec.loss, dict(spec.loss_args))

    @property
    def is_supervised(self) -> bool:
        return self._loss is None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss takes log-probs of a reference model."""
        return self.spec.kl is not None and self.spec.kl_ref == "reference"

    def loss(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor | None,
        known: Known,
        totals: Totals,
        tally: Tally,
        kl_coef: float = 0.0,
    ) -> Tensor:
        """This micro-batch's share of the window's loss, a scalar with a graph.

        Policy: aggregate(token loss x correction weight) + kl_coef * token mean of the KL - entropy_coef * token mean
        of the entropy. Supervised: token mean of -logprobs.
        """
        if self._loss is None:
            return aggregate(-logprobs, batch.mask, "token-mean", totals)
        spec = self.spec
        weights, corrections = correct(
            *(known.old, batch.behaviour, batch.mask, spec.is_level, spec.is_mode, spec.is_threshold, spec.is_gating),
            logprobs=logprobs.detach(),
        )
        inputs = LossInputs(logprobs, known.old, batch.advantages, batch.mask)
        token_loss, metrics = self._loss.token_loss(inputs)
        corrected = torch.where(weights == 0, 0.0, token_loss * weights)
        total = aggregate(corrected, batch.mask, spec.agg_mode, totals, row_weights=batch.weights, norm=spec.agg_norm)
        tally.add_masked({f"train/{k}": v for k, v in {**metrics, **corrections}.items()}, batch.mask)
        if spec.kl is not None:
            reference = known.reference if self.needs_reference else batch.behaviour
            assert reference is not None, "the KL needs log-probs of the reference"
            kl = token_kl(logprobs, reference, batch.mask, spec.kl)
            tally.add_masked({"train/kl": kl}, batch.mask)
            total = total + kl_coef * aggregate(kl, batch.mask, "token-mean", totals)
        if entropy is not None:
            tally.add_masked({"train/entropy": entropy}, batch.mask)
            if spec.entropy_coef:
                total = total - spec.entropy_coef * aggregate(entropy, batch.mask, "token-mean", totals)
        return total


def add_mismatch(tally: Tally, old: Tensor, batch: MicroBatch) -> None:
    """How far the trainer's log-probs are from the engine's on the same tokens, before any update.

    With x = clamp(log π_trainer - log π_engine, ±30): ``abs_max`` is max |x|; ``k3`` the mean of exp(x) - 1 - x, an
    estimate of KL(engine || trainer); ``ratio_mean`` the mean of exp(x), which is 1 in expectation without a mismatch;
    ``ratio_max`` its maximum; ``exact_share`` the share of tokens whose two float32 log-probs are the same bit for bit.
    """
    x, _ = log_ratio(old, batch.behaviour, batch.mask)
    x = x.double()
    ratio = x.exp()
    exact = (old == batch.behaviour).double()
    tally.add_masked(
        {"mismatch/k3": ratio - 1 - x, "mismatch/ratio_mean": ratio, "mismatch/exact_share": exact}, batch.mask
    )
    tally.add_max("mismatch/abs_max", x.abs().max())
    tally.add_max("mismatch/ratio_max", torch.where(batch.mask, ratio, 0.0).max())
