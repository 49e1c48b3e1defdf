"""Advantage estimators against numbers derived by hand, and what must change nothing."""

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from molt_estimators.groups import DrGrpo, FlashReinforce, Grpo, ReinforceBaseline, Rloo
from molt_estimators.tokens import Gae, OnPolicyDistill, Reinforce

from molt_core import Batch

NAN = float("nan")
GROUP_ESTIMATORS = [DrGrpo, Grpo, Rloo, ReinforceBaseline]


def make(cls, **options):
    return cls(cls.Config(**options))


def batch(rewards, groups, rows=None, mask=None, **more):
    rows = list(range(len(rewards))) if rows is None else rows
    mask = torch.ones(len(rows), 2).bool() if mask is None else torch.tensor(mask).bool()
    return Batch(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        groups=torch.tensor(groups, dtype=torch.int64),
        rollout_of_row=torch.tensor(rows, dtype=torch.int64),
        action_mask=mask,
        truncated=torch.zeros(len(rewards)).bool(),
        **more,
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (make(ReinforceBaseline, no_whiten=True), [0.75, -0.25, -0.25, -0.25]),
        (make(DrGrpo), [0.75, -0.25, -0.25, -0.25]),
        (make(Grpo, eps=1e-9), [1.5, -0.5, -0.5, -0.5]),  # sample deviation 0.5
        (make(Rloo), [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_success_in_four(estimator, expected):
    got = estimator.advantages(batch([1.0, 0.0, 0.0, 0.0], [0] * 4))
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize(
    ("estimator", "alone", "pair"),
    [
        (make(Rloo), 0.7, [1.0, -1.0]),
        (make(DrGrpo), 0.0, [0.5, -0.5]),
        (make(ReinforceBaseline, no_whiten=True), 0.0, [0.5, -0.5]),
        (make(ReinforceBaseline), 0.0, [1.0, -1.0]),
        (make(Grpo), 0.0, [0.707107, -0.707107]),
    ],
)
def test_a_group_of_one_follows_the_documented_rule_and_changes_no_other(estimator, alone, pair):
    got = estimator.advantages(batch([0.7, 1.0, 0.0], [0, 1, 1]))
    torch.testing.assert_close(got, torch.tensor([alone, *pair]), atol=1e-4, rtol=0)
    without = estimator.advantages(batch([1.0, 0.0], [0, 0]))
    assert got[1:].tolist() == without.tolist()


@pytest.mark.parametrize("cls", GROUP_ESTIMATORS)
def test_a_batch_of_groups_of_one_is_warned_about_once(cls, caplog):
    estimator = make(cls)
    with caplog.at_level(logging.WARNING, logger="molt"):
        for _ in range(2):
            assert estimator.advantages(batch([0.7, 0.2], [0, 1])).isfinite().all()
    assert len(caplog.records) == 1
    assert "nothing to compare" in caplog.text


@pytest.mark.parametrize("cls", GROUP_ESTIMATORS)
def test_group_estimators_ask_for_two_rollouts_per_prompt(cls):
    assert cls.needs.groups
    assert cls.needs.min_samples == 2


@pytest.mark.parametrize("cls", [*GROUP_ESTIMATORS, FlashReinforce])
@pytest.mark.parametrize("count", [2, 3, 7, 8, 1000])
def test_equal_rewards_give_exactly_zero(cls, count):
    assert make(cls).advantages(batch([0.35] * count, [0] * count)).tolist() == [0.0] * count


@pytest.mark.parametrize("cls", GROUP_ESTIMATORS)
def test_an_equal_group_beside_another_gives_exactly_zero(cls):
    # Rollouts of one and two tokens, so that the mean over the tokens of the other group is not 0.
    mask = [[1, 1], [1, 1], [1, 0], [1, 0], [1, 1]]
    got = make(cls).advantages(batch([0.35, 1.0, 0.35, 0.0, 0.35], [0, 1, 0, 1, 0], mask=mask))
    assert got[[0, 2, 4]].tolist() == [0.0] * 3


def test_an_equal_group_changes_no_whitening():
    mask = [[1, 1], [1, 0], [1, 1]]
    got = make(ReinforceBaseline).advantages(batch([1.0, 0.0, 0.35], [0, 0, 1], mask=mask))
    more = make(ReinforceBaseline).advantages(batch([1.0, 0.0, 0.35, 0.35], [0, 0, 1, 1], mask=[*mask, [1, 1]]))
    without = make(ReinforceBaseline).advantages(batch([1.0, 0.0], [0, 0], mask=mask[:2]))
    assert got[:2].tolist() == more[:2].tolist() == without.tolist()


@pytest.mark.parametrize("cls", [*GROUP_ESTIMATORS, FlashReinforce])
def test_a_rollout_without_a_score_gets_zero_and_changes_no_other(cls):
    estimator = make(cls)
    got = estimator.advantages(batch([1.0, NAN, 0.0, 0.25, NAN, NAN], [0, 0, 0, 0, 1, 1]))
    without = estimator.advantages(batch([1.0, 0.0, 0.25], [0, 0, 0]))
    assert got[[0, 2, 3]].tolist() == without.tolist()
    assert got[[1, 4, 5]].tolist() == [0.0] * 3


@pytest.mark.parametrize("cls", [*GROUP_ESTIMATORS, FlashReinforce, Reinforce, Gae, OnPolicyDistill])
def test_exactly_those_that_whiten_say_so(cls):
    assert cls.needs.whitens == ("no_whiten" in cls.Config.model_fields)


def test_whitening_counts_action_tokens():
    # Deviations +0.5 on 3 tokens and -0.5 on 1: mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875.
    mask = [[1, 1, 1], [1, 0, 0]]
    got = make(ReinforceBaseline).advantages(batch([1.0, 0.0], [0, 0], mask=mask))
    torch.testing.assert_close(got, torch.tensor([0.25, -0.75]) / 0.1875**0.5)


def test_a_rollout_of_several_rows_counts_once():
    got = make(DrGrpo).advantages(batch([1.0, 0.0], [0, 0], rows=[0, 1, 1, 1]))
    assert got.tolist() == [0.5, -0.5]


def test_flash_reinforce_compares_prompts_with_each_other():
    got = make(FlashReinforce).advantages(batch([1.0, 0.0, 0.5], [0, 1, 2]))
    assert got.tolist() == [0.5, -0.5, 0.0]
    assert not FlashReinforce.needs.groups


@settings(deadline=None)
@given(st.data(), st.sampled_from([*GROUP_ESTIMATORS, FlashReinforce]))
def test_the_order_of_rollouts_and_the_numbers_of_groups_change_nothing(data, cls):
    count = data.draw(st.integers(1, 8))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.35, 1.0, -2.5, NAN]), min_size=count, max_size=count))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    renamed = data.draw(st.permutations(range(4)))
    mask = [[1, i % 2] for i in range(count)]
    estimator = make(cls)
    got = estimator.advantages(batch(rewards, groups, mask=mask))
    moved = estimator.advantages(
        batch([rewards[i] for i in order], [renamed[groups[i]] for i in order], mask=[mask[i] for i in order])
    )
    torch.testing.assert_close(moved, got[list(order)], atol=1e-5, rtol=1e-5)
    assert got.isfinite().all()


def test_reinforce_puts_the_reward_to_go_on_every_action():
    one_token = [[1], [1]]
    got = make(Reinforce).advantages(batch([2.0, -1.0], [0, 1], mask=one_token))
    torch.testing.assert_close(got, torch.tensor([[1.0], [-1.0]]))


@pytest.mark.parametrize(
    ("gamma", "expected"),
    # r = [-0.1, 0, 1 - 0.2]: the gap between the actions is discounted too.
    [(1.0, [[0.7, 0.0, 0.8, 0.0]]), (0.5, [[0.1, 0.0, 0.8, 0.0]])],
)
def test_reinforce_takes_the_kl_off_token_by_token(gamma, expected):
    got = make(Reinforce, gamma=gamma, no_whiten=True).advantages(
        batch([1.0], [0], mask=[[1, 0, 1, 0]], token_kl=torch.tensor([[1.0, NAN, 2.0, NAN]]), kl_coef=0.1)
    )
    torch.testing.assert_close(got, torch.tensor(expected))


def test_gae_advantages_are_whitened_and_returns_are_not():
    # Without discount A = r - V on every token: -1 and 1 on two tokens each.
    rows = batch([1.0, 1.0], [0, 1], values=torch.tensor([[2.0, 2.0], [0.0, 0.0]]))
    advantages, returns = make(Gae).advantages_and_returns(rows)
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    torch.testing.assert_close(returns, torch.ones(2, 2))
    torch.testing.assert_close(make(Gae).advantages(rows), advantages)


def test_gae_skips_tool_output():
    rows = batch([1.0], [0], mask=[[1, 0, 0, 1]], values=torch.tensor([[0.2, NAN, 99.0, 0.5]]))
    got = make(Gae, gamma=0.5, lam=0.5, no_whiten=True).advantages(rows)
    torch.testing.assert_close(got, torch.tensor([[0.175, 0.0, 0.0, 0.5]]))


@pytest.mark.parametrize(("lam", "expected"), [(0.5, [0.25, 1.0, -0.25, -1.0]), (1.0, [0.5, 1.0, -0.5, -1.0])])
def test_gae_goes_on_behind_a_cut_and_stops_at_an_end(lam, expected):
    # Two episodes of two actions; r 1 at the end only, so the rewards of 1 before it come as a KL of -1 with β 1.
    # Episode 1 is cut at a state of value 4: δ = [1 + 0.5*2 - 2, 1 + 0.5*4 - 2] = [0, 1]. Episode 2 ends: [0, -1].
    rows = batch(
        [1.0, 1.0],
        [0, 1],
        values=torch.full((2, 2), 2.0),
        bootstrap=torch.tensor([4.0, 0.0]),
        token_kl=torch.tensor([[-1.0, 0.0], [-1.0, 0.0]]),
        kl_coef=1.0,
    )
    got = make(Gae, gamma=0.5, lam=lam, no_whiten=True).advantages(rows)
    torch.testing.assert_close(got, torch.tensor(expected).view(2, 2))


def test_distillation_ignores_the_reward():
    kl = torch.tensor([[0.5, NAN], [-2.0, 1.0]])
    mask = [[1, 0], [1, 1]]
    got = make(OnPolicyDistill).advantages(batch([9.0, 0.0], [0, 1], mask=mask, token_kl=kl, kl_coef=2.0))
    assert got.tolist() == [[-1.0, 0.0], [4.0, -2.0]]
    assert OnPolicyDistill.needs.reference


TOKEN_ESTIMATORS = [
    make(Reinforce),
    make(Reinforce, gamma=0.9),
    make(Gae, gamma=0.9, lam=0.9),
    make(OnPolicyDistill),
]
TOKEN_BATCH = batch(
    [1.0, 0.5, 0.25],
    [0, 1, 2],
    rows=[0, 0, 1, 2],
    mask=[[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0]],
    token_kl=torch.tensor([[0.1, 0.2, 0.3]]).repeat(4, 1),
    values=torch.tensor([[0.1, 0.5, 0.3]]).repeat(4, 1),
    kl_coef=0.1,
)


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("value", [NAN, float("inf"), 1e30])
def test_a_masked_token_of_any_value_changes_nothing(estimator, value):
    def widen(x, fill):
        return torch.cat([torch.where(TOKEN_BATCH.action_mask, x, fill), torch.full((4, 1), fill)], dim=1)

    wider = replace(
        TOKEN_BATCH,
        action_mask=torch.cat([TOKEN_BATCH.action_mask, torch.zeros(4, 1).bool()], dim=1),
        token_kl=widen(TOKEN_BATCH.token_kl, value),
        values=widen(TOKEN_BATCH.values, value),
    )
    got = estimator.advantages(wider)
    torch.testing.assert_close(got[:, :3], estimator.advantages(TOKEN_BATCH))
    assert got[~wider.action_mask].tolist() == [0.0] * int((~wider.action_mask).sum())


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS, ids=lambda e: type(e).__name__)
def test_rows_of_a_rollout_without_a_score_change_nothing(estimator):
    unscored = replace(TOKEN_BATCH, rewards=torch.tensor([1.0, 0.5, NAN]))
    got = estimator.advantages(unscored)
    without = estimator.advantages(
        replace(
            TOKEN_BATCH,
            rollout_of_row=TOKEN_BATCH.rollout_of_row[:3],
            action_mask=TOKEN_BATCH.action_mask[:3],
            token_kl=TOKEN_BATCH.token_kl[:3],
            values=TOKEN_BATCH.values[:3],
        )
    )
    torch.testing.assert_close(got[:3], without)
    assert got[3].tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS, ids=lambda e: type(e).__name__)
def test_the_order_of_rows_changes_nothing(estimator):
    order = torch.tensor([3, 1, 0, 2])
    moved = replace(
        TOKEN_BATCH,
        rollout_of_row=TOKEN_BATCH.rollout_of_row[order],
        action_mask=TOKEN_BATCH.action_mask[order],
        token_kl=TOKEN_BATCH.token_kl[order],
        values=TOKEN_BATCH.values[order],
    )
    torch.testing.assert_close(estimator.advantages(moved), estimator.advantages(TOKEN_BATCH)[order])
