"""Importance correction between the sampling and the training policy."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core import ConfigError
from molt_core.algorithms.correction import check_correction, correct, gate

NAN, INF = float("nan"), float("inf")
BAND = (0.5, 2.0)
# Ratios 4 and 1/4 in the first row, 1 and 1.5 in the second.
OLD = torch.log(torch.tensor([[4.0, 0.25, 1.0], [1.0, 1.5, 1.0]])) - 2.0
ROLLOUT = torch.full((2, 3), -2.0)
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
WAYS = [("off", "mask"), ("token", "mask"), ("token", "clip"), ("token", "trunc"), ("seq", "mask"), ("geo", "mask")]


@pytest.mark.parametrize(
    ("level", "mode", "weights", "filtered"),
    [
        ("token", "mask", [[0, 0, 0], [1, 1.5, 0]], [[1, 1, 0], [0, 0, 0]]),
        ("token", "clip", [[2, 0.5, 0], [1, 1.5, 0]], [[1, 1, 0], [0, 0, 0]]),
        ("token", "trunc", [[2, 0.25, 0], [1, 1.5, 0]], [[1, 0, 0], [0, 0, 0]]),
        # The rows' products are 1 and 1.5, their geometric means 1 and 1.2247: both in the band.
        ("seq", "mask", [[4, 0.25, 0], [1, 1.5, 0]], [0, 0]),
        ("geo", "mask", [[4, 0.25, 0], [1, 1.5, 0]], [0, 0]),
    ],
)
def test_weights_and_filtered_share_of_each_scheme(level, mode, weights, filtered):
    got, metrics = correct(OLD, ROLLOUT, MASK, level, mode, BAND)
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float32))
    torch.testing.assert_close(
        torch.where(MASK if metrics["is_filter_ratio"].dim() == 2 else MASK.any(-1), metrics["is_filter_ratio"], 0.0),
        torch.tensor(filtered, dtype=torch.float32),
    )


def test_sequence_levels_drop_whole_rows_by_product_and_by_geometric_mean():
    old = torch.log(torch.tensor([[1.3, 1.3, 1.3], [3.0, 1.0, 1.0]])) - 2.0
    mask = torch.ones(2, 3).bool()
    # Products 2.197 and 3, geometric means 1.3 and 1.442.
    by_product, metrics = correct(old, ROLLOUT, mask, "seq", "mask", (0.5, 2.5))
    assert metrics["is_filter_ratio"].tolist() == [0, 1]
    torch.testing.assert_close(by_product, torch.tensor([[1.3] * 3, [0.0] * 3]))
    by_mean, metrics = correct(old, ROLLOUT, mask, "geo", "mask", (1.4, 1.5))
    assert metrics["is_filter_ratio"].tolist() == [1, 0]
    torch.testing.assert_close(by_mean, torch.tensor([[0.0] * 3, [3.0, 1.0, 1.0]]))


def test_the_geometric_mean_is_over_the_action_tokens_alone():
    # sqrt(4 * 4) = 4 over two tokens; over the padded width it would be 16 ** (1 / 3) = 2.52.
    old = torch.log(torch.tensor([[4.0, 4.0, 1.0]])) - 2.0
    mask = torch.tensor([[1, 1, 0]]).bool()
    weights, metrics = correct(old, ROLLOUT[:1], mask, "geo", "mask", (0.5, 3.0))
    assert metrics["is_filter_ratio"].tolist() == [1]
    assert weights.tolist() == [[0.0] * 3]


# Behaviour 1/4 in both rows. Divergences of the current 1/2: binary KL 0.130812, total variation 0.25; of the current
# 1/4: 0. Means over the action tokens of the rows: half of that, and all of it.
GATED_OLD = torch.log(torch.tensor([[0.5, 0.25, 0.9], [0.5, 0.5, 0.9]]))
GATED_ROLLOUT = torch.log(torch.full((2, 3), 0.25))


@pytest.mark.parametrize(
    ("gating", "high", "admitted", "divergence"),
    [
        ("binary_kl", 0.1, [1, 0], [0.065406, 0.130812]),
        ("binary_kl", 0.05, [0, 0], [0.065406, 0.130812]),
        ("tv", 0.2, [1, 0], [0.125, 0.25]),
        ("tv", 0.3, [1, 1], [0.125, 0.25]),
    ],
)
@pytest.mark.parametrize("level", ["token", "seq", "geo"])
def test_a_gate_admits_rows_and_leaves_the_weights_of_their_tokens(level, gating, high, admitted, divergence):
    weights, metrics = correct(GATED_OLD, GATED_ROLLOUT, MASK, level, "mask", (0.0, high), gating)
    ratios = torch.tensor([[2.0, 1.0, 0.0], [2.0, 2.0, 0.0]])  # 0.5 / 0.25, 0.25 / 0.25, off the mask
    torch.testing.assert_close(weights, ratios * torch.tensor(admitted)[:, None])
    assert metrics["is_filter_ratio"].tolist() == [1 - a for a in admitted]
    assert metrics["gate_divergence"].tolist() == pytest.approx(divergence, abs=1e-5)


def test_a_gate_looks_at_the_current_policy_and_weights_at_the_old_one():
    same = GATED_ROLLOUT.clone()
    weights, metrics = correct(
        GATED_OLD, GATED_ROLLOUT, MASK, "token", "mask", (0.0, 0.01), "tv", logprobs=same.requires_grad_()
    )
    assert metrics["is_filter_ratio"].tolist() == [0, 0]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 0.0], [2.0, 2.0, 0.0]]))
    assert not weights.requires_grad


def test_level_off_ignores_the_engine_and_reports_nothing():
    weights, metrics = correct(OLD, None, MASK, "off")
    assert weights.tolist() == MASK.float().tolist()
    assert metrics == {}


def test_weights_carry_no_gradient():
    assert not correct(OLD.clone().requires_grad_(), ROLLOUT, MASK, "token", "trunc", BAND)[0].requires_grad


def test_the_reported_kl_is_behaviour_minus_policy():
    _, metrics = correct(torch.tensor([[-1.5]]), torch.tensor([[-1.6]]), torch.tensor([[True]]), "token")
    assert metrics["vllm_kl"].item() == pytest.approx(-0.1)


def test_an_unchanged_policy_has_ratio_one_only_after_temperature():
    logits = torch.tensor([2.0, 1.0, 0.0])
    sampled_from = (logits / 0.5).log_softmax(-1)[None, :1]
    raw = logits.log_softmax(-1)[None, :1]
    one = torch.tensor([[True]])
    assert sampled_from.item() == pytest.approx(-0.142932, abs=1e-5)
    assert correct(sampled_from, sampled_from, one, "token", "trunc", BAND)[0].item() == 1.0
    assert correct(sampled_from, raw, one, "token", "trunc", BAND)[0].item() == pytest.approx(1.3030, abs=1e-4)


@pytest.mark.parametrize(("level", "mode", "gating"), [*((*way, "ratio") for way in WAYS), ("seq", "mask", "tv")])
@given(
    st.lists(st.sampled_from([NAN, INF, -INF, 0.0, -1.0, -1e30, 1e30]), min_size=4, max_size=4),
    st.lists(st.sampled_from([NAN, INF, -INF, 0.0, -2.0, -1e30]), min_size=4, max_size=4),
)
def test_weights_are_finite_for_any_input(level, mode, gating, old, behaviour):
    mask = torch.tensor([[True, True], [False, True]])
    weights, metrics = correct(
        torch.tensor(old).view(2, 2), torch.tensor(behaviour).view(2, 2), mask, level, mode, BAND, gating
    )
    assert weights.isfinite().all()
    assert weights[1, 0] == 0
    assert all(value.isfinite().all() for value in metrics.values())


GATES = [("token", "mask", "binary_kl"), ("token", "mask", "tv")]
ALL_WAYS = [*((*way, "ratio") for way in WAYS), *GATES]


@pytest.mark.parametrize(("level", "mode", "gating"), ALL_WAYS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 123.0])
def test_a_masked_token_of_any_value_changes_nothing(level, mode, gating, value):
    extra, outside = torch.full((2, 1), value), torch.zeros(2, 1).bool()
    old, rollout, mask = (
        torch.cat([OLD, extra], 1), torch.cat([ROLLOUT, -extra], 1), torch.cat([MASK, outside], 1)
    )  # fmt: skip
    wider, _ = correct(old, rollout, mask, level, mode, BAND, gating)
    assert wider[:, :3].tolist() == correct(OLD, ROLLOUT, MASK, level, mode, BAND, gating)[0].tolist()


def test_a_token_without_a_ratio_is_dropped_and_counted():
    weights, metrics = correct(
        torch.tensor([[NAN, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool(), "token"
    )
    assert weights.tolist() == [[0.0, 1.0]]
    assert metrics["is_nonfinite_ratio"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("level", "mode", "threshold", "gating", "says"),
    [
        ("seq", "clip", BAND, "ratio", "mask"),
        ("geo", "trunc", BAND, "ratio", "mask"),
        ("token", "mask", (2.0, 0.5), "ratio", "LOW < HIGH"),
        ("token", "mask", (1.0, 1.0), "ratio", "LOW < HIGH"),
        ("token", "mask", (0.5, NAN), "ratio", "LOW < HIGH"),
        ("tokens", "mask", BAND, "ratio", "token"),
        ("token", "drop", BAND, "ratio", "trunc"),
        ("token", "trunc", BAND, "tv", "'trunc' to 'mask'"),
        ("token", "mask", BAND, "kl", "binary_kl"),
    ],
)
def test_impossible_corrections_are_refused(level, mode, threshold, gating, says):
    with pytest.raises(ConfigError, match=says):
        check_correction(level, mode, threshold, gating)
    with pytest.raises(ConfigError, match=says):
        correct(OLD, ROLLOUT, MASK, level, mode, threshold, gating)


@pytest.mark.parametrize(("level", "mode"), WAYS)
def test_possible_corrections_are_accepted(level, mode):
    assert check_correction(level, mode, BAND) is None
    assert mode != "mask" or check_correction(level, mode, BAND, "binary_kl") is None


def test_the_check_is_light_enough_for_launch():
    code = "import sys, molt_core.algorithms.correction; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_binary_kl_and_total_variation_of_one_token():
    p, q = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    one = torch.tensor([[True]])
    # 1/4 ln(1/2) + 3/4 ln(3/2) = -0.173287 + 0.304099
    _, metrics = gate(p, q, one, "binary_kl", 0.2)
    assert metrics["gate_divergence"].item() == pytest.approx(0.130812, abs=1e-6)
    _, metrics = gate(p, q, one, "tv", 0.2)
    assert metrics["gate_divergence"].item() == pytest.approx(0.25)


def test_probabilities_of_zero_and_one_are_clamped():
    p, q = torch.tensor([[-INF]]), torch.tensor([[0.0]])
    _, metrics = gate(p, q, torch.tensor([[True]]), "binary_kl", 1.0)
    # q = 1 - 1e-6, p = 1e-6: (1 - 2e-6) ln((1 - 1e-6) / 1e-6) = 13.81548
    assert metrics["gate_divergence"].item() == pytest.approx((1 - 2e-6) * math.log(999999), abs=1e-4)


@pytest.mark.parametrize("kind", ["binary_kl", "tv"])
def test_a_sequence_is_admitted_by_the_mean_over_its_own_tokens(kind):
    same, far = math.log(0.5), math.log(0.999)
    policy = torch.tensor([[same, same, NAN], [same, far, far], [NAN, same, same], [NAN, NAN, NAN]])
    rollout = torch.full((4, 3), same)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    admitted, metrics = gate(policy, rollout, mask, kind, 0.1)
    assert admitted.tolist() == [True, False, False, True]
    assert metrics["gate_rejected"].tolist() == [0, 1, 1, 0]


def test_a_mean_equal_to_the_threshold_is_admitted():
    p, q = torch.tensor([[0.0]]), torch.tensor([[0.0]])
    assert gate(p, q, torch.tensor([[True]]), "tv", 0.0)[0].item() is True
