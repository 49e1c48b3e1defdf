"""KL estimators and controllers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algorithms.aggregate import Totals, aggregate
from molt_core.algorithms.kl import AdaptiveKl, FixedKl, token_kl

POLICY, REFERENCE = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
BOTH = torch.ones(1, 2).bool()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])],
)
def test_each_estimator_gives_the_value_of_its_formula(estimator, expected):
    torch.testing.assert_close(
        token_kl(POLICY, REFERENCE, BOTH, estimator), torch.tensor([expected]), atol=1e-5, rtol=0
    )


def test_k3_as_a_penalty_pulls_the_policy_to_the_reference():
    policy = POLICY.clone().requires_grad_()
    kl = token_kl(policy, REFERENCE, BOTH, "k3")
    (0.1 * aggregate(kl, BOTH, "token-mean", Totals(2, 1))).backward()
    assert 0.1 * kl.mean().item() == pytest.approx(0.0412406, abs=1e-6)
    # A descent step lowers the first log-prob, which is above the reference, and raises the second.
    torch.testing.assert_close(policy.grad, 0.05 * torch.tensor([[0.393469, -1.718282]]), atol=1e-6, rtol=0)


@given(
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([-101.0, -1e6, -1e38, -float("inf"), float("inf"), float("nan"), 0.0, -1.0]),
    st.sampled_from([-101.0, -1e6, -float("inf"), float("nan"), 0.0, -1.0]),
)
def test_value_and_gradient_are_finite_for_any_input(estimator, policy, reference):
    policy = torch.tensor([[policy]], requires_grad=True)
    kl = token_kl(policy, torch.tensor([[reference]]), torch.ones(1, 1).bool(), estimator)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert policy.grad.isfinite().all()
    assert estimator == "k1" or kl.item() >= 0


def test_far_below_the_reference_k3_still_pulls_upwards():
    policy = torch.tensor([[-101.0]], requires_grad=True)
    token_kl(policy, torch.tensor([[-1.0]]), torch.ones(1, 1).bool(), "k3").sum().backward()
    assert policy.grad.item() < 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 50.0])
def test_masked_tokens_give_zero_and_no_gradient(estimator, value):
    policy = torch.tensor([[-1.0, value]], requires_grad=True)
    kl = token_kl(policy, torch.tensor([[-1.5, -value]]), torch.tensor([[True, False]]), estimator)
    kl.sum().backward()
    assert kl[0, 1] == 0
    assert policy.grad[0, 1] == 0


def test_two_impossible_tokens_have_no_divergence():
    impossible = torch.tensor([[-float("inf")]])
    assert token_kl(impossible, impossible, torch.ones(1, 1).bool(), "k3").item() == 0


@pytest.mark.parametrize(
    ("measured", "samples", "expected"),
    [
        (1.1, 1000, 1.1),  # 10 % above the target
        (0.0, 1000, 0.8),  # clipped below
        (1.0, 1000, 1.0),
        (9.0, 1000, 1.2),  # clipped above
        (9.0, 100, 1.02),  # a tenth of the horizon
        (0.0, 9000, 0.8),  # never more than the full effect, however short the horizon
        (float("nan"), 1000, 1.0),
        (float("inf"), 1000, 1.0),
    ],
)
def test_the_adaptive_coefficient_follows_the_measured_kl(measured, samples, expected):
    controller = AdaptiveKl(1.0, target=1.0, horizon=1000)
    controller.update(measured, samples)
    assert controller.value == pytest.approx(expected)


def test_the_fixed_coefficient_never_changes():
    controller = FixedKl(0.3)
    controller.update(100.0, 1000)
    assert controller.value == 0.3
