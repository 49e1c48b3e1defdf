"""Metrics of a step, by hand-made rollouts."""

import math

import pytest

from molt_core.contract import RolloutStatus, Segment, Turn
from molt_core.metrics import excluded_metrics, info_metrics, length_metrics, staleness_metrics
from molt_core.rollout.tasks import RolloutSummary, SegmentInfo


def summary(versions=((0, 0),), status=RolloutStatus.COMPLETED, info=None) -> RolloutSummary:
    """One segment per tuple of versions, one sampled token per version."""
    segments = [Segment.from_turns([Turn([1], [2] * len(v), [-1.0] * len(v), list(v))]) for v in versions]
    reward = 1.0 if status.is_scored else math.nan
    infos = tuple(SegmentInfo.of(segment) for segment in segments)
    return RolloutSummary("r", "g", reward, status, info or {}, 1, infos, None, 0.0)


def test_staleness_is_per_token_and_its_maximum_is_that_of_the_oldest_token():
    # Trained at version 5: tokens of versions 5, 5, 4, 2 are 0, 0, 1, 3 updates behind; their mean is 1.
    values = staleness_metrics([summary([(5, 5)]), summary([(4, 2)])], version=5)
    assert values == {"staleness/max": 3, "staleness/mean": 1.0}


def test_lengths_count_sampled_tokens_of_all_segments_of_a_rollout():
    values = length_metrics([summary([(0, 0), (0, 0, 0)]), summary([(0,)], RolloutStatus.TRUNCATED)], "rollout")
    assert values["rollout/response_length_mean"] == 3.0
    assert values["rollout/truncated_rate"] == 0.5


def test_info_is_averaged_over_those_who_report_it():
    values = info_metrics([summary(info={"a": 1.0, "b": 4.0}), summary(info={"a": 0.0})], "eval")
    assert values == {"eval/info/a": 0.5, "eval/info/b": 4.0}


def test_every_reason_of_exclusion_is_reported_whether_it_occurred_or_not():
    values = excluded_metrics({"env_error": 2, "invalid_reward": 1})
    assert values["rollout/excluded/env_error"] == 2
    assert values["rollout/excluded/env_timeout"] == 0
    assert values["rollout/excluded/total"] == 3
    assert values.keys() == excluded_metrics({}).keys()


@pytest.mark.parametrize("status", list(RolloutStatus))
def test_a_status_is_scored_or_has_its_own_counter(status):
    assert status.is_scored != (f"rollout/excluded/{status}" in excluded_metrics({}))
