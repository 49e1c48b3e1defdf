"""Discounted sums and generalised advantage estimation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_core.algorithms.gae import discounted_sum, gae, token_rewards

NAN = float("nan")


@pytest.mark.parametrize(("lam", "expected"), [(0.5, [[0.25, 1.0], [-0.25, -1.0]]), (1.0, [[0.5, 1.0], [-0.5, -1.0]])])
def test_a_cut_episode_is_bootstrapped_once_and_an_ended_one_is_not(lam, expected):
    ones = torch.ones(2, 3)
    values = torch.tensor([[2.0, 2.0, 99.0], [2.0, 2.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    advantages, returns = gae(ones, values, mask, gamma=0.5, lam=lam, bootstrap=torch.tensor([4.0, 0.0]))
    torch.testing.assert_close(advantages[:, :2], torch.tensor(expected))
    torch.testing.assert_close(returns[:, :2], torch.tensor(expected) + 2.0)


def test_the_error_reaches_across_tool_output_without_discount():
    # Actions at 0 and 3. δ_3 = 1 - 0.5, δ_0 = 0.5 * 0.5 - 0.2; the gap's values are never read.
    rewards = torch.tensor([[0.0, NAN, 7.0, 1.0]])
    values = torch.tensor([[0.2, NAN, 99.0, 0.5]])
    mask = torch.tensor([[1, 0, 0, 1]]).bool()
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.05 + 0.25 * 0.5, 0, 0, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.375, 0, 0, 1.0]]))


def test_without_discount_the_return_is_the_reward_to_go():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    _, returns = gae(rewards, torch.tensor([[0.3, -0.7, 5.0]]), torch.ones(1, 3).bool())
    torch.testing.assert_close(returns, torch.tensor([[6.0, 5.0, 3.0]]))


def test_rows_without_action_are_zero():
    advantages, returns = gae(torch.full((2, 3), NAN), torch.full((2, 3), NAN), torch.zeros(2, 3).bool())
    assert advantages.tolist() == returns.tolist() == [[0.0] * 3] * 2


def step_by_step(rewards, values, mask, gamma, lam, bootstrap):
    """The recurrence as written, one token at a time."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        run, after = 0.0, float(bootstrap[row])
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                value = float(values[row, t])
                run = float(rewards[row, t]) + gamma * after - value + gamma * lam * run
                after = value
                out[row, t] = run
    return out.float()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 63, 64, 65, 200]),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_it_equals_the_recurrence_for_any_mask(seed, length, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, length, generator=generator)
    mask = torch.rand(3, length, generator=generator) < 0.6
    bootstrap = torch.randn(3, generator=generator)
    noisy = torch.where(mask, values, NAN)
    advantages, _ = gae(rewards, noisy, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    torch.testing.assert_close(
        advantages, step_by_step(rewards, values, mask, gamma, lam, bootstrap), atol=1e-4, rtol=1e-5
    )


def test_more_rows_than_one_chunk_give_the_same_as_each_alone():
    rewards, values = torch.randn(2, 5000, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5000, 5).bool()
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.9)
    last, _ = gae(rewards[-3:], values[-3:], mask[-3:], gamma=0.9, lam=0.9)
    torch.testing.assert_close(advantages[-3:], last)


def test_discounted_sum_by_hand():
    assert discounted_sum(torch.tensor([[1.0, 2.0, 4.0]]), 0.5).tolist() == [[3.0, 4.0, 4.0]]


def test_discounted_sum_carries_over_many_blocks():
    ones = torch.ones(1, 1000)
    assert discounted_sum(ones, 1.0)[0].tolist() == [float(n) for n in range(1000, 0, -1)]


def test_the_reward_lands_on_the_last_action_and_the_kl_on_every_action():
    rewards = torch.tensor([2.0, 3.0, NAN])
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    kl = torch.tensor([[0.5, NAN, 1.0, NAN], [0.0, 0.0, 0.0, 0.0], [NAN] * 4])
    expected = [[-0.05, 0.0, 1.9, 0.0], [0.0, 0.0, 0.0, 3.0], [0.0] * 4]
    torch.testing.assert_close(token_rewards(rewards, mask, kl, 0.1), torch.tensor(expected))
