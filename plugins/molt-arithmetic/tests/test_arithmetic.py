"""The arithmetic environment and its data."""

import asyncio
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from molt_arithmetic.data import make_problems, split_problems, to_conversation, write_jsonl
from molt_arithmetic.env import Arithmetic, is_correct

from molt_core import Action, EnvContext

ROW = {"question": "3+4=", "answer": "7"}


def play(tries, *replies):
    """The messages of reset and the results of the replies."""

    async def run():
        env = Arithmetic(Arithmetic.Config(tries=tries))
        ctx = EnvContext(row=ROW, rollout_id="r", seed=0)
        first = await env.reset(ROW, ctx)
        return first, [await env.step(Action(text, (), "stop"), ctx) for text in replies]

    return asyncio.run(run())


def test_the_question_is_one_user_message():
    assert play(1)[0] == [{"role": "user", "content": "3+4="}]


@pytest.mark.parametrize(("reply", "reward"), [("7", 1.0), ("8", 0.0), ("", 0.0)])
def test_a_single_try_ends_the_rollout(reply, reward):
    (result,) = play(1, reply)[1]
    assert (result.reward, result.terminated) == (reward, True)
    assert result.info == {"correct": reward, "tries": 1.0}


def test_later_tries_earn_less():
    wrong, right = play(2, "8", "7")[1]
    assert wrong.observation == [{"role": "user", "content": "Not yet. Try again."}]
    assert not wrong.terminated
    assert (right.reward, right.terminated) == (0.5, True)
    assert right.info == {"correct": 1.0, "tries": 2.0}


def test_the_last_wrong_try_earns_nothing():
    *_, last = play(3, "1", "2", "3")[1]
    assert (last.reward, last.terminated, last.info["tries"]) == (0.0, True, 3.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        (" 7\n", 7),
        ("3+4=7", "7"),
        ("First 5, then 7.", "7"),
        ("It is 007", "7"),
        ("7.0", "7"),
        ("5-8=-3", "-3"),
        ("1,234", "1234"),
        ("0", "-0"),
        ("blue", "blue"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_right_replies(text, answer):
    assert is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "7"),
        ("seven", "7"),
        ("7 or 8", "7"),
        ("17", "7"),
        ("7.5", "5"),
        ("-7", "7"),
        ("8-7", "-7"),
        ("70", "7"),
        ("9" * 5000, "7"),
    ],
)
def test_wrong_replies(text, answer):
    assert not is_correct(text, answer)


def test_a_minus_between_numbers_is_not_a_sign():
    assert is_correct("8-7", "7")


@given(st.integers(0, 100), st.integers(0, 2**32), st.sampled_from(["+", "-", "*"]))
def test_problems_are_right_and_different_and_follow_the_seed(n, seed, operation):
    problems = make_problems(n, seed=seed, operations=operation)
    assert problems == make_problems(n, seed=seed, operations=operation)
    assert len({p["question"] for p in problems}) == n
    for problem in problems:
        assert problem["answer"] == str(eval(problem["question"].rstrip("=")))


def test_another_seed_gives_another_order():
    assert make_problems(50, seed=0) != make_problems(50, seed=1)


def test_many_digits_cost_nothing():
    (problem,) = make_problems(1, seed=0, digits=9)
    assert int(problem["answer"]) < 2 * 10**9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"n": 101}, "only 100 different"),
        ({"n": 1, "operations": "+%"}, "operations"),
        ({"n": 1, "operations": ""}, "op"),
        ({"n": 1, "digits": 10}, "digits must be 1 to 9"),
    ],
)
def test_impossible_data_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        make_problems(seed=0, **arguments)


def test_no_question_is_both_trained_and_held_out():
    problems = make_problems(100, seed=0)
    split = split_problems([*problems, *problems], held_out=20)
    trained = {p["question"] for p in split.train}
    held_out = {p["question"] for p in split.held_out}
    assert (len(trained), len(held_out), trained & held_out) == (80, 20, set())
    assert split.conversations == [to_conversation(p) for p in split.train]


def test_holding_out_everything_is_refused():
    with pytest.raises(ValueError, match="hold out 3 of 3"):
        split_problems(make_problems(3, seed=0), held_out=3)


def test_a_conversation_is_question_and_answer():
    assert to_conversation(ROW)["messages"] == [
        {"role": "user", "content": "3+4="},
        {"role": "assistant", "content": "7"},
    ]


def test_rows_are_written_as_json_lines(tmp_path):
    path = write_jsonl(tmp_path / "new" / "rows.jsonl", [ROW, ROW])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [ROW, ROW]


def test_the_plugin_module_and_the_data_are_light():
    code = (
        "import sys, molt_arithmetic.plugin, molt_arithmetic.data; print(*{'torch', 'ray', 'vllm'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
