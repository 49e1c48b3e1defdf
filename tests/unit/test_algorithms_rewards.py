"""Masked statistics and the shaping of rewards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core import Batch
from molt_core.algorithms.masked import masked_mean, masked_sum, moments, whiten
from molt_core.algorithms.rewards import clip_rewards, overlong_penalty, stop_properly

NAN, INF = float("nan"), float("inf")


def test_masked_sum_and_mean_by_hand():
    x = torch.tensor([[1.0, 3.0, NAN], [INF, NAN, 1.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    assert masked_sum(x, mask).item() == 4
    assert masked_mean(x, mask, dim=-1).tolist() == [2.0, 0.0]


def test_moments_are_those_of_the_masked_values_over_all_chunks():
    # Rows make chunks of 64. 300 rows of 1 and 3 with mean 2 and variance 1, then 300 of 5: half of the values each.
    x = torch.tensor([[1.0, 3.0, NAN]] * 300 + [[5.0, INF, 5.0]] * 300)
    mask = torch.tensor([[1, 1, 0]] * 300 + [[1, 0, 1]] * 300).bool()
    # Mean (2 + 5) / 2 = 3.5; variance: (1 + 0) / 2 within, 1.5 squared between.
    assert moments(x, mask) == pytest.approx((3.5, 2.75), abs=1e-12)
    assert moments(x, torch.zeros_like(mask)) == (0.0, 0.0)


def test_moments_of_equal_values_far_from_zero_have_no_variance():
    mean, variance = moments(torch.full((600, 3), 1e6), torch.ones(600, 3).bool())
    assert (mean, variance) == (1e6, 0.0)


def test_whitening_uses_the_masked_mean_and_population_deviation():
    x = torch.tensor([[1.0, 3.0], [NAN, 8.0]])
    mask = torch.tensor([[1, 1], [0, 1]]).bool()
    # mean 4, deviations -3 -1 4, variance 26/3
    expected = torch.tensor([[-3.0, -1.0], [0.0, 4.0]]) / (26 / 3) ** 0.5
    torch.testing.assert_close(whiten(x, mask), expected)


def test_whitening_by_counts_equals_whitening_of_repeated_values():
    repeated = whiten(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.ones(4).bool())
    counted = whiten(torch.tensor([1.0, 5.0, NAN]), torch.tensor([3, 1, 0]))
    torch.testing.assert_close(counted, torch.cat([repeated[[0, 3]], torch.zeros(1)]))


@pytest.mark.parametrize("mask", [torch.zeros(2, 2).bool(), torch.ones(2, 2).bool()])
def test_whitening_nothing_or_a_constant_gives_zeros(mask):
    assert whiten(torch.full((2, 2), 0.35), mask).abs().max() < 1e-3


def test_clipping_says_what_it_changed_and_keeps_missing_scores():
    clipped, changed = clip_rewards(torch.tensor([-20.0, 0.5, 10.0, 11.0, NAN]), -10, 10)
    assert clipped[:4].tolist() == [-10.0, 0.5, 10.0, 10.0]
    assert clipped[4].isnan()
    assert changed.tolist() == [True, False, False, True, False]


def test_the_overlong_penalty_is_linear_in_the_buffer():
    lengths = torch.tensor([0, 80, 85, 90, 100, 500])
    torch.testing.assert_close(
        overlong_penalty(lengths, max_length=100, buffer=20), torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    )


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(0.25, [1.0, -2.0, 0.25, -0.5, 0.0]), (0.0, [1.0, -2.0, 0.0, 0.0, 0.0]), (1.0, [1.0, -2.0, 1.0, -2.0, 0.0])],
)
def test_the_reward_of_a_truncated_rollout_is_multiplied_whatever_its_sign(factor, expected):
    rewards = torch.tensor([1.0, -2.0, 1.0, -2.0, 0.0, NAN])
    shaped = stop_properly(rewards, torch.tensor([False, False, True, True, True, True]), factor)
    assert shaped[:5].tolist() == expected
    assert shaped[5].isnan()


def batch(rewards, groups):
    count = len(rewards)
    return Batch(
        torch.tensor(rewards), torch.tensor(groups), torch.arange(count), torch.ones(count, 1).bool(),
        torch.zeros(count).bool(),
    )  # fmt: skip


def test_leave_one_out_is_the_mean_of_the_others():
    others = batch([1.0, 0.0, 5.0, NAN, 7.0], [0, 0, 0, 0, 1]).leave_one_out()
    assert others[[0, 1, 2, 4]].tolist() == [2.5, 3.0, 0.5, 0.0]


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_equal_rewards_have_exactly_themselves_as_mean_and_no_spread(reward, count):
    group = batch([reward] * count, [0] * count)
    assert group.group_mean().tolist() == [pytest.approx(reward, abs=0)] * count
    assert group.group_std().tolist() == [0.0] * count


def test_action_tokens_are_counted_per_rollout_over_its_rows():
    rows = Batch(
        rewards=torch.tensor([1.0, 2.0]),
        groups=torch.tensor([0, 0]),
        rollout_of_row=torch.tensor([0, 1, 0]),
        action_mask=torch.tensor([[1, 0], [1, 1], [1, 1]]).bool(),
        truncated=torch.zeros(2).bool(),
    )
    assert rows.num_actions().tolist() == [3, 2]
