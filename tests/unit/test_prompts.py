"""The order of prompts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.data.prompts import PromptCursor
from molt_core.errors import ConfigError

cursors = st.fixed_dictionaries(
    {
        "num_rows": st.integers(1, 20),
        "seed": st.integers(-(2**70), 2**70),
        "shuffle": st.booleans(),
        "num_episodes": st.integers(1, 4),
    }
)


def drain(cursor: PromptCursor) -> list[tuple[int, int]]:
    return list(iter(cursor.next, None))


@given(cursors)
def test_every_row_comes_once_per_episode(options):
    items = drain(PromptCursor(**options))
    n, episodes = options["num_rows"], options["num_episodes"]
    assert [episode for episode, _ in items] == [e for e in range(episodes) for _ in range(n)]
    for e in range(episodes):
        assert sorted(row for episode, row in items if episode == e) == list(range(n))


@given(cursors, st.data())
def test_a_loaded_cursor_goes_on_where_the_saved_one_was(options, data):
    whole = drain(PromptCursor(**options))
    done = data.draw(st.integers(0, len(whole)))
    first, second = PromptCursor(**options), PromptCursor(**options)
    taken = [first.next() for _ in range(done)]
    second.load(json.loads(json.dumps(first.state())))
    assert taken + drain(second) == whole
    assert second.next() is None


def test_without_shuffle_rows_come_in_order():
    cursor = PromptCursor(3, seed=1, shuffle=False, num_episodes=2)
    assert drain(cursor) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_order_depends_on_seed_and_episode():
    def order(seed):
        return drain(PromptCursor(50, seed=seed, shuffle=True, num_episodes=2))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(-1)
    rows = [row for _, row in order(1)]
    assert rows[:50] != rows[50:]


def test_more_episodes_on_resume_go_on_after_the_last_one():
    short = PromptCursor(2, seed=0, shuffle=True, num_episodes=1)
    drain(short)
    longer = PromptCursor(2, seed=0, shuffle=True, num_episodes=2)
    longer.load(short.state())
    assert [episode for episode, _ in drain(longer)] == [1, 1]


@pytest.mark.parametrize("change", [{"num_rows": 4}, {"seed": 1}, {"shuffle": False}, {"digest": "other rows"}])
def test_a_state_of_other_data_is_refused(change):
    options = {"num_rows": 3, "seed": 0, "shuffle": True, "num_episodes": 1}
    cursor = PromptCursor(**{**options, **change})
    with pytest.raises(ConfigError, match=f"prompts have {next(iter(change))} "):
        cursor.load(PromptCursor(**options).state())
