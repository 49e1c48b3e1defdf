"""The arithmetic environment."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, Field, PositiveInt

from molt_core import Env, Result

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)


class Arithmetic(Env):
    """One question per row; the last number of the reply counts. Reward 1.0, less on each further try.

    Columns: ``question``, and ``answer`` as text or integer. With ``tries`` n the k-th try earns (n - k + 1) / n.
    Metrics: ``correct`` (0 or 1), ``tries`` (used).
    """

    columns = ("question", "answer")

    class Config(BaseModel, extra="forbid", frozen=True):
        """Options of arithmetic."""

        tries: PositiveInt = Field(1, description="Attempts per question.")

    async def reset(self, row, ctx):
        """The question, as one user message."""
        self.left = self.config.tries
        return [{"role": "user", "content": row["question"]}]

    async def step(self, action, ctx):
        """End on the right answer or after the last try; otherwise ask again."""
        self.left -= 1
        correct = is_correct(action.text, ctx.row["answer"])
        if correct or not self.left:
            reward = float(correct) * (self.left + 1) / self.config.tries
            info = {"correct": float(correct), "tries": float(self.config.tries - self.left)}
            return Result(reward=reward, terminated=True, info=info)
        return Result(observation=[{"role": "user", "content": "Not yet. Try again."}])


def is_correct(text: str, answer: Any) -> bool:
    """Whether the text is the answer, or the last number in it is."""
    wanted = str(answer).strip()
    if text.strip() == wanted:
        return True
    numbers = _NUMBER.findall(_THOUSANDS.sub("", text))
    return bool(numbers) and _plain(numbers[-1]) == _plain(wanted)


def _plain(number: str) -> str:
    """A number as text without leading zeros, trailing decimal zeros and a negative zero: of any length."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, _, decimals = digits.partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    plain = f"{whole}.{decimals}" if decimals else whole
    return plain if plain == "0" else sign + plain
