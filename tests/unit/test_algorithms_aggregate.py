"""Aggregation: one denominator per window, whatever way the window is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algorithms.aggregate import MODES, Totals, aggregate

# Rows of 3, 1, 0 and 2 action tokens; the first two rows belong to one prompt, the last to another.
LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0], [99.0, 99.0, 99.0], [5.0, 99.0, 7.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1]]).bool()
TOTALS = Totals(tokens=6, sequences=3, prompts=2)
ROW_WEIGHTS = torch.tensor([1 / 4, 1 / 4, 0.0, 1 / 2])


def share(rows, mode, norm=None):
    weights = ROW_WEIGHTS[rows] if mode == "prompt-mean-token-mean" else None
    return aggregate(LOSS[rows], MASK[rows], mode, TOTALS, row_weights=weights, norm=norm)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 22 / 6),  # (1+2+3 + 4 + 5+7) / 6
        ("seq-mean-token-mean", (2 + 4 + 6) / 3),
        ("seq-mean-token-sum", (6 + 4 + 12) / 3),
        ("prompt-mean-token-mean", ((1 + 2 + 3 + 4) / 4 + (5 + 7) / 2) / 2),
    ],
)
def test_each_mode_gives_the_value_of_its_formula(mode, expected):
    assert share(slice(None), mode).item() == pytest.approx(expected)


def test_the_constant_normaliser_divides_the_token_sum():
    assert share(slice(None), "seq-mean-token-sum", norm=11.0).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("mode", MODES)
def test_the_value_does_not_depend_on_micro_batches(mode):
    whole = share(slice(None), mode)
    parts = share(slice(0, 1), mode) + share(slice(1, 3), mode) + share(slice(3, 4), mode)
    assert parts.item() == pytest.approx(whole.item())


def test_the_gradient_does_not_depend_on_micro_batches():
    whole, cut = LOSS.clone().requires_grad_(), LOSS.clone().requires_grad_()
    aggregate(whole, MASK, "token-mean", TOTALS).backward()
    for row in range(4):
        aggregate(cut[row : row + 1], MASK[row : row + 1], "token-mean", TOTALS).backward()
    torch.testing.assert_close(whole.grad, torch.where(MASK, 1 / 6, 0.0))
    torch.testing.assert_close(cut.grad, whole.grad)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_window_gives_zero_with_a_gradient(mode):
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    value = aggregate(loss, torch.zeros(2, 3).bool(), mode, Totals(0, 0, 0), row_weights=torch.ones(2))
    value.backward()
    assert value.item() == 0
    assert loss.grad.tolist() == [[0.0] * 3] * 2


@given(
    st.sampled_from(MODES),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, 1e30]),
)
def test_a_masked_token_of_any_value_changes_nothing(mode, value):
    wider = torch.cat([LOSS, torch.full((4, 1), value)], dim=1)
    mask = torch.cat([MASK, torch.zeros(4, 1).bool()], dim=1)
    assert aggregate(wider, mask, mode, TOTALS, row_weights=ROW_WEIGHTS) == aggregate(
        LOSS, MASK, mode, TOTALS, row_weights=ROW_WEIGHTS
    )
