"""One micro-batch's share of loss and metrics: the sum over any cut of a window is the loss of the window."""

from __future__ import annotations

import math

import pytest
import torch

from molt_core.algorithms.aggregate import MODES, Totals
from molt_core.contract import Segment, Turn
from molt_core.plugins import PluginSpec
from molt_core.training.group import merge
from molt_core.training.objective import Known, MetricSums, Objective, Tally, add_mismatch
from molt_core.training.packing import MicroBatch, collate
from molt_core.training.rows import ObjectiveSpec


def batch_of(rows: list[tuple[list[float], float, float]]) -> MicroBatch:
    """Rows of (behaviour log-probs of the actions, advantage, weight), each after one prompt token."""
    segments = [Segment.from_turns([Turn([1], [2] * len(lp), lp, [0] * len(lp))]) for lp, _, _ in rows]
    return collate(segments, [a for _, a, _ in rows], [w for _, _, w in rows], 0)


def logprobs_of(batch: MicroBatch, value: float) -> torch.Tensor:
    return torch.full(batch.mask.shape, value, requires_grad=True)


def run(spec: ObjectiveSpec, batch: MicroBatch, logprobs: torch.Tensor, totals: Totals) -> tuple[torch.Tensor, Tally]:
    tally = Tally()
    entropy = torch.ones_like(logprobs)
    return Objective(spec, PluginSpec()).loss(batch, logprobs, entropy, Known(logprobs.detach()), totals, tally), tally


def test_supervised_is_the_token_mean_of_the_negative_log_likelihood():
    batch = batch_of([([0.0, 0.0, 0.0], 0.0, 1.0), ([0.0], 0.0, 1.0)])
    loss, _ = run(ObjectiveSpec(), batch, logprobs_of(batch, -2.0), Totals(4, 2, 2))
    assert loss.item() == pytest.approx(2.0)


def test_a_policy_loss_is_weighted_by_the_correction():
    # One token, old = current, so the ratio is 1 and the loss -A x weight; the weight is exp(-1 - (-1.5)) = e^0.5.
    batch = batch_of([([-1.5], 3.0, 1.0)])
    spec = ObjectiveSpec(loss="ppo", is_level="token", is_mode="trunc", is_threshold=(0.5, 5.0))
    loss, tally = run(spec, batch, logprobs_of(batch, -1.0), Totals(1, 1, 1))
    assert loss.item() == pytest.approx(-3.0 * math.exp(0.5), rel=1e-6)
    assert tally.result().sums["train/is_filter_ratio"] == 0


def test_a_token_that_the_correction_drops_has_no_gradient_and_still_counts():
    batch = batch_of([([-1.0, -9.0], 1.0, 1.0)])
    logprobs = logprobs_of(batch, -1.0)
    spec = ObjectiveSpec(loss="ppo", is_level="token", is_mode="mask", is_threshold=(0.5, 2.0))
    loss, tally = run(spec, batch, logprobs, Totals(2, 1, 1))
    loss.backward()
    assert logprobs.grad.tolist() == [[-0.5, 0.0]]
    assert tally.result().sums["train/is_filter_ratio"] == 1


def test_the_entropy_bonus_lowers_the_loss():
    batch = batch_of([([-1.0, -1.0], 1.0, 1.0)])
    plain, _ = run(ObjectiveSpec(loss="ppo"), batch, logprobs_of(batch, -1.0), Totals(2, 1, 1))
    bonus, _ = run(ObjectiveSpec(loss="ppo", entropy_coef=0.25), batch, logprobs_of(batch, -1.0), Totals(2, 1, 1))
    assert (plain - bonus).item() == pytest.approx(0.25)  # the entropy is 1 on every token


@pytest.mark.parametrize(
    ("estimator", "mean", "slopes"),
    # d = log-prob - reference = [0.5, -1]; the advantages are 0, so nothing but the KL is left.
    [("k1", -0.25, [1.0, 1.0]), ("k2", 0.3125, [0.5, -1.0]), ("k3", 0.412406, [0.393469, -1.718282])],
)
@pytest.mark.parametrize("ref", ["reference", "rollout"])
def test_the_kl_is_added_to_the_loss_as_a_token_mean(estimator, mean, slopes, ref):
    batch = batch_of([([-1.5, -1.0], 0.0, 1.0)])  # for "rollout" the log-probs of sampling are the reference
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0]]) if ref == "reference" else None
    objective = Objective(ObjectiveSpec(loss="ppo", kl=estimator, kl_ref=ref), PluginSpec())
    assert objective.needs_reference == (ref == "reference")
    tally = Tally()
    loss = objective.loss(batch, logprobs, None, Known(logprobs.detach(), reference), Totals(2, 1, 1), tally, 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * mean, abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx([0.1 * slope / 2 for slope in slopes], abs=1e-6)
    assert merge([tally.result()])["train/kl"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("far", [-101.0, -1e30, -math.inf, math.nan])
def test_a_kl_to_a_far_reference_is_finite_and_a_masked_token_has_none(far):
    batch = batch_of([([-1.0], 0.0, 1.0), ([-1.0, -1.0], 0.0, 1.0)])
    logprobs = torch.tensor([[-101.0, math.nan], [-1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, math.nan], [far, -1.0]])
    objective = Objective(ObjectiveSpec(loss="ppo", kl="k3"), PluginSpec())
    known = Known(torch.full((2, 2), -1.0), reference)
    loss = objective.loss(batch, logprobs, None, known, Totals(3, 2, 2), Tally(), 1.0)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 0] < 0  # pulled up, towards the reference
    assert logprobs.grad[0, 1] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_shares_of_micro_batches_add_up_to_the_loss_of_the_window(mode):
    rows = [([-1.0, -1.2, -0.8], 1.5, 0.5), ([-2.0], -1.0, 0.5), ([-0.5, -0.6], 0.5, 1.0)]
    spec, totals = ObjectiveSpec(loss="ppo", agg_mode=mode, is_level="token"), Totals(6, 3, 2)
    losses = []
    for cut in ([rows], [[r] for r in rows], [rows[:1], rows[1:], []]):
        shares = []
        for part in cut:
            batch = batch_of(part)
            shares.append(run(spec, batch, logprobs_of(batch, -1.1), totals)[0])
        losses.append(sum(share.item() for share in shares))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert losses[0] != 0


def test_mismatch_is_the_distance_to_the_engine_s_log_probs():
    batch = batch_of([([-1.0, -1.5], 0.0, 1.0)])
    tally = Tally()
    add_mismatch(tally, torch.full(batch.mask.shape, -1.0), batch)
    merged = merge([tally.result()])
    assert merged["mismatch/abs_max"] == pytest.approx(0.5)
    assert merged["mismatch/k3"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert merged["mismatch/ratio_mean"] == pytest.approx((1 + math.exp(0.5)) / 2)


def test_metrics_of_the_ranks_are_averaged_by_their_counts():
    first = MetricSums({"a": 6.0, "events": 1.0, "never": 0.0}, {"a": 3.0, "never": 0.0}, {"m": 2.0})
    second = MetricSums({"a": 2.0, "events": 2.0, "only": 4.0}, {"a": 1.0, "only": 2.0}, {"m": 5.0})
    assert merge([first, second]) == {"a": 2.0, "events": 3.0, "only": 2.0, "m": 5.0}
