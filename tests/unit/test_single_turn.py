"""The built-in environment that only asks."""

from __future__ import annotations

import asyncio

import pytest

from molt_core import Action, EnvContext, Result
from molt_core.agents.single_turn import SingleTurn
from molt_core.plugins import load_plugins

ASK = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1="},
        {"prompt": "1+1=", "question": "2+2="},
        {"messages": [ASK], "prompt": "2+2="},
        {"messages": [ASK, {"role": "assistant", "content": "2"}]},
    ],
)
def test_the_prompt_is_the_column_that_is_there(row):
    assert asyncio.run(SingleTurn().reset(row, EnvContext(row, "0", 0))) == [ASK]
    assert len(row.get("messages", [1, 2])) in (1, 2)  # the row keeps its own messages


def test_messages_without_a_question_are_an_error():
    row = {"messages": [{"role": "assistant", "content": "2"}]}
    with pytest.raises(ValueError, match="no message before"):
        asyncio.run(SingleTurn().reset(row, EnvContext(row, "0", 0)))


def test_one_answer_ends_it_without_a_reward():
    result = asyncio.run(SingleTurn().step(Action("2", (50,), "stop"), EnvContext({}, "0", 0)))
    assert result == Result(reward=0.0, terminated=True)
    assert not SingleTurn.gives_reward


def test_it_is_offered_by_the_core():
    assert load_plugins().resolve("environment", "single-turn") is SingleTurn
