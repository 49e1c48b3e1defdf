"""Micro-batches: every row once, equal counts on all ranks, within the budget; and their padded tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.contract import Rollout, RolloutStatus, Segment, Turn
from molt_core.training.packing import collate, partition, plan_window
from molt_core.training.rows import TrainRow, resolve_segments

LENGTHS = st.lists(st.integers(2, 200), max_size=40)


def segment(prompt: list[int], action: list[int]) -> Segment:
    return Segment.from_turns([Turn(prompt, action, [-0.5] * len(action), [3] * len(action))])


@given(LENGTHS, st.integers(1, 5), st.integers(1, 400))
def test_a_partition_holds_every_row_once_and_as_many_micro_batches_on_every_rank(lengths, ranks, budget):
    plan = partition(lengths, ranks, max_tokens=budget)
    assert sorted(i for rank in plan for chunk in rank for i in chunk) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan) == ranks
    assert len(plan[0]) >= 1


@given(LENGTHS, st.integers(1, 5), st.integers(1, 400))
def test_padded_tokens_stay_within_the_budget_unless_a_row_is_longer_than_it(lengths, ranks, budget):
    for chunk in (chunk for rank in partition(lengths, ranks, max_tokens=budget) for chunk in rank):
        assert len(chunk) <= 1 or len(chunk) * max(lengths[i] for i in chunk) <= budget


@given(LENGTHS, st.integers(1, 5), st.integers(1, 7))
def test_a_fixed_micro_batch_size_is_the_most_rows_that_a_micro_batch_has(lengths, ranks, size):
    plan = partition(lengths, ranks, max_tokens=1, micro_batch_size=size)
    assert all(len(chunk) <= size for rank in plan for chunk in rank)


@given(st.lists(st.integers(2, 200), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 400))
def test_empty_micro_batches_appear_only_where_no_row_is_left_to_split_off(lengths, ranks, budget):
    chunks = [chunk for rank in partition(lengths, ranks, max_tokens=budget) for chunk in rank]
    if [] in chunks:
        assert all(len(chunk) <= 1 for chunk in chunks)
        assert chunks.count([]) < ranks


def test_rows_of_like_length_share_a_micro_batch():
    # 9 + 9 padded tokens fit into 18, 4 x 4 as well; the larger one runs first.
    assert partition([4, 9, 4, 4, 9, 4], 1, max_tokens=18) == [[[1, 4], [0, 2, 3, 5]]]


def test_what_fits_into_one_micro_batch_is_split_evenly_over_the_ranks():
    assert partition([5, 5, 5, 5], 2, max_tokens=1000) == [[[0, 1]], [[2, 3]]]


def test_without_rows_every_rank_has_one_empty_micro_batch():
    assert partition([], 2, max_tokens=10) == [[[]], [[]]]


def test_a_window_counts_its_tokens_sequences_and_prompts_once_for_all_ranks():
    rows = [TrainRow(segment([1], [2] * n), 0, 1 + n, n, group=g) for n, g in [(3, 0), (2, 0), (4, 7)]]
    plans = plan_window(rows, 2, max_tokens=100)
    assert {(p.tokens, p.sequences, p.prompts) for p in plans} == {(9, 3, 2)}
    weights = {item.row.num_actions: item.weight for p in plans for chunk in p.micro_batches for item in chunk}
    assert weights == {3: 1 / 5, 2: 1 / 5, 4: 1 / 4}


def test_rows_without_an_action_token_are_not_trained():
    empty = TrainRow(segment([1, 2, 3], []), 0, 3, 0, group=1)
    plans = plan_window([empty, TrainRow(segment([1], [2]), 0, 2, 1)], 1, max_tokens=100)
    assert (plans[0].tokens, plans[0].sequences, plans[0].prompts) == (1, 1, 1)
    assert [len(chunk) for chunk in plans[0].micro_batches] == [1]


def test_rows_are_padded_on_the_right_and_positions_count_the_attended_tokens():
    batch = collate([segment([1, 2, 3], [9, 10, 11, 12]), segment([4, 5], [13, 14])], [2.0, -1.0], [1.0, 0.5], 0)
    assert batch.ids.tolist() == [[1, 2, 3, 9, 10, 11, 12], [4, 5, 13, 14, 0, 0, 0]]
    assert batch.attention.tolist() == [[1] * 7, [1, 1, 1, 1, 0, 0, 0]]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert batch.positions[1, :4].tolist() == [0, 1, 2, 3]
    assert batch.mask.tolist() == [[False] * 2 + [True] * 4, [False, True, True, False, False, False]]
    # The mask's entries 2..5 of row 0 predict the tokens 3..6, and the grid is 7 wide.
    assert batch.index.tolist() == [2, 3, 4, 5, 7 + 1, 7 + 2]
    assert batch.targets.tolist() == [9, 10, 11, 12, 13, 14]
    assert batch.advantages[batch.mask].tolist() == [2.0] * 4 + [-1.0] * 2
    assert batch.behaviour[batch.mask].tolist() == [-0.5] * 6


def test_token_advantages_are_taken_as_they_are():
    batch = collate([segment([1], [2, 3])], [np.array([0.25, -4.0], np.float32)], [1.0], 0)
    assert batch.advantages.tolist() == [[0.25, -4.0]]


def test_an_empty_micro_batch_can_be_run_and_trains_nothing():
    batch = collate([], [], [], 0)
    assert batch.ids.shape == (1, 2)
    assert not batch.mask.any()
    assert batch.index.numel() == 0


def test_rows_point_at_a_segment_or_into_a_rollout():
    first, second = segment([1], [2]), segment([3, 4], [5, 6])
    rollout = Rollout("r", "g", {}, (first, second), 1.0, RolloutStatus.COMPLETED)
    rows = [TrainRow(rollout, 1, 4, 2), TrainRow(first, 0, 2, 1)]
    assert resolve_segments(rows) == [second, first]


def test_a_row_that_disagrees_with_its_segment_is_refused():
    with pytest.raises(AssertionError, match="length 3"):
        resolve_segments([TrainRow(segment([1], [2]), 0, 3, 1)])
