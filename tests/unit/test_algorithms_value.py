"""The loss of the critic against numbers derived by hand."""

from __future__ import annotations

import math

import pytest
import torch

from molt_core.algorithms.value import value_loss


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


EVERY = torch.ones(1, 3).bool()


def test_without_clipping_it_is_half_the_squared_error():
    loss, metrics = value_loss(row(1.0, 0.0, -2.0), row(9.0, 9.0, 9.0), row(0.0, 0.0, 1.0), EVERY)
    assert loss.tolist() == [[0.5, 0.0, 4.5]]
    assert metrics == {}


def test_moving_beyond_the_clip_towards_the_return_gains_nothing():
    # v_old 0, R 1, clip 0.2. v 0.1: 0.5 * 0.81. v 0.5: the clipped 0.2 is worse, 0.5 * 0.64, and has no gradient.
    # v -0.5: the clipped -0.2 is better, so the plain error 0.5 * 2.25 counts, with its gradient v - R.
    values = row(0.1, 0.5, -0.5).requires_grad_()
    loss, metrics = value_loss(values, row(0.0, 0.0, 0.0), row(1.0, 1.0, 1.0), EVERY, 0.2)
    torch.testing.assert_close(loss, row(0.405, 0.32, 1.125))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, row(-0.9, 0.0, -1.5))
    assert metrics["clip_ratio"].tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_masked_token_of_any_value_has_no_loss_and_no_gradient(value, clip):
    values = row(1.0, value, 1.0).requires_grad_()
    mask = torch.tensor([[True, False, True]])
    loss, _ = value_loss(values, row(1.0, value, 1.0), row(0.0, value, 0.0), mask, clip)
    loss.sum().backward()
    assert loss.tolist() == [[0.5, 0.0, 0.5]]
    assert values.grad.tolist() == [[1.0, 0.0, 1.0]]
