import asyncio

import pytest

pytest.importorskip("molt_reasoning_gym.env", reason="`make demo-real` installs it, with reasoning-gym")

from molt_reasoning_gym.data import write_prompts
from molt_reasoning_gym.env import ReasoningGym

from molt_core import Action, EnvContext
from molt_core.data.rows import read_rows


@pytest.fixture
def row(tmp_path):
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return read_rows(write_prompts("chain_sum", tmp_path / "p.jsonl", size=1, seed=1, **options))[0]


@pytest.mark.parametrize(
    ("reply", "reward"), [("{answer}", 1.0), ("4 - 1 is {answer}.", 1.0), ("no idea", 0.0), ("", 0.0)]
)
def test_the_last_number_of_the_reply_is_scored_by_the_task(row, reply, reward):
    env, ctx = ReasoningGym(), EnvContext(row=row, rollout_id="r", seed=0)
    messages = asyncio.run(env.reset(row, ctx))
    assert row["question"] in messages[0]["content"]
    action = Action(text=reply.format(answer=row["answer"]), ids=(1,), finish_reason="stop")
    result = asyncio.run(env.step(action, ctx))
    assert (result.reward, result.terminated) == (reward, True)
