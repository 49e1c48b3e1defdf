"""One question of a reasoning-gym task, scored by the task."""

import re

from pydantic import BaseModel
from reasoning_gym import get_score_answer_fn

from molt_core import Env, Result

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class ReasoningGym(Env):
    """Ask the question once; the reward is the task's own score of the reply, between 0 and 1."""

    columns = ("question", "answer", "metadata")

    class Config(BaseModel):
        instruction: str = "Reply with the answer only."
        number: bool = True
        """Score the last number of the reply; otherwise its last line that is not empty."""

    async def reset(self, row, ctx):
        return [{"role": "user", "content": f"{row['question']}\n{self.config.instruction}"}]

    async def step(self, action, ctx):
        score = get_score_answer_fn(ctx.row["metadata"]["source_dataset"])
        answer = self.answer(action.text)
        reward = float(score(answer, dict(ctx.row))) if answer else 0.0
        return Result(reward=reward, terminated=True, info={"answered": float(bool(answer))})

    def answer(self, text: str) -> str:
        """What the reply is taken to answer; empty if nothing."""
        if self.config.number:
            return next(iter(reversed(_NUMBER.findall(text))), "")
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
