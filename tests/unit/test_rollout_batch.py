"""From groups to the estimator's batch: shaped rewards, masks, and metrics that count a rollout once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.batches import RolloutBatch
from molt_core.config.rl import RewardConfig
from molt_core.contract import RolloutStatus, Segment, Turn
from molt_core.metrics import rollout_metrics
from molt_core.rollout.generator import Group
from molt_core.rollout.tasks import RolloutSummary, SegmentInfo


def segment(num_actions: int, prompt: int = 2) -> Segment:
    return Segment.from_turns([Turn([1] * prompt, [2] * num_actions, [-1.0] * num_actions, [0] * num_actions)])


def rollout(reward, lengths=(3,), status=RolloutStatus.COMPLETED) -> RolloutSummary:
    segments = tuple(SegmentInfo.of(segment(n)) for n in lengths)
    return RolloutSummary("r", "g", reward, status, {}, 1, segments, None, 0.0)


def batch(*groups) -> RolloutBatch:
    return RolloutBatch.from_groups([Group(str(i), tuple(rollouts)) for i, rollouts in enumerate(groups)])


CUT = RolloutStatus.TRUNCATED


def test_without_options_the_estimator_sees_the_clamped_reward():
    rewards, added = batch([rollout(0.5), rollout(-11.0, status=CUT)]).shaped_rewards(RewardConfig())
    assert rewards.tolist() == [0.5, -10.0]
    assert added.tolist() == [0.0, 0.0]


def test_the_overlong_penalty_is_added_to_the_reward_by_sampled_tokens():
    # Maximum 10, buffer 4: nothing up to 6, then a quarter per token, -1 from 10 on. Segments add up: 5 + 4 = 9.
    config = RewardConfig(overlong_max=10, overlong_buffer=4)
    rollouts = batch([rollout(1.0, [6]), rollout(1.0, [7]), rollout(0.0, [5, 4]), rollout(1.0, [12], CUT)])
    rewards, added = rollouts.shaped_rewards(config)
    assert added.tolist() == [0.0, -0.25, -0.75, -1.0]
    assert rewards.tolist() == [1.0, 0.75, -0.75, 0.0]
    assert rollouts.for_estimator(config).rewards.tolist() == rewards.tolist()


def test_the_clamped_reward_of_a_cut_rollout_is_multiplied_whatever_its_sign():
    config = RewardConfig(stop_properly=0.25, clip_range=(-1, 2))
    rollouts = batch([rollout(-1.0), rollout(8.0, status=CUT), rollout(-6.0, status=CUT)])
    rewards, added = rollouts.shaped_rewards(config)
    assert rewards.tolist() == [-1.0, 0.5, -0.25]
    assert added.tolist() == [0.0, -1.5, 0.75]


def test_the_raw_reward_is_reported_with_what_shaping_added_beside_it():
    metrics = rollout_metrics(
        batch([rollout(1.0), rollout(0.5, status=CUT)], [rollout(3.0, status=CUT)]),
        RewardConfig(stop_properly=0.5, clip_range=(0, 2)),
    )
    assert metrics["rollout/reward_mean"] == pytest.approx(1.5)
    assert metrics["rollout/reward_shaping_mean"] == pytest.approx((0 - 0.25 - 1.0) / 3)
    assert metrics["rollout/reward_clipped"] == pytest.approx(1 / 3)


@given(st.lists(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=3), max_size=6))
def test_rows_are_the_segments_with_a_sampled_token_and_the_mask_is_theirs(masks):
    def segment(mask) -> Segment:
        mask, zeros = np.array([False, *mask]), np.zeros(len(mask) + 1, np.int32)
        return Segment(zeros, mask, zeros.astype(np.float32), zeros)

    segments = [[segment(mask) for mask in rollout] for rollout in masks]
    infos = [tuple(map(SegmentInfo.of, rollout)) for rollout in segments]
    made = batch([RolloutSummary("r", "g", 0.0, CUT, {}, 1, x, None, 0.0) for x in infos])
    seen, rows = made.for_estimator(RewardConfig()), made.train_rows()
    expected = [(r, s) for r, x in enumerate(segments) for s, segment in enumerate(x) if segment.action_mask.any()]
    assert made.rows == [(row.rollout, row.segment) for row in rows] == expected
    assert seen.rollout_of_row.tolist() == [r for r, _ in expected]
    assert len(seen.action_mask) == len(expected)
    for (r, s), row, found in zip(expected, rows, seen.action_mask.numpy(), strict=True):
        np.testing.assert_array_equal(found[: row.length - 1], segments[r][s].action_mask[1:])
        assert not found[row.length - 1 :].any()
    last = dict(expected)
    assert made.cut_rows().tolist() == [last[r] == s for r, s in expected]


def test_failures_are_in_no_reward_and_no_row():
    failed = rollout(np.nan, status=RolloutStatus.ENV_ERROR)
    rollouts = batch([failed, rollout(1.0)], [failed], [rollout(0.0, [2, 0, 1])])
    seen = rollouts.for_estimator(RewardConfig())
    assert seen.rewards.tolist() == [1.0, 0.0]
    assert seen.groups.tolist() == [0, 2]
    assert seen.rollout_of_row.tolist() == [0, 1, 1]
    assert seen.action_mask.sum(-1).tolist() == [3, 2, 1]
    assert seen.action_mask[1].tolist() == [False, True, True, False]
