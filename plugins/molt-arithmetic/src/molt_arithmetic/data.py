"""Makes arithmetic problems and conversations, the same for the same seed. Needs the standard library alone."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Split(NamedTuple):
    """Problems to train on, problems held out, and the training problems as SFT conversations."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]
    conversations: list[dict[str, Any]]


def make_problems(n: int, *, seed: int, digits: int = 1, operations: str = "+") -> list[dict[str, str]]:
    """n different problems ``{"question": "3+4=", "answer": "7"}``, in an order drawn from the seed.

    ``digits``: most digits of an operand, 1 to 9; ``operations``: any of "+", "-", "*". Raises ValueError when one of
    them is not, or when there are fewer than n different problems.
    """
    if not 1 <= digits <= 9:
        raise ValueError(f"digits must be 1 to 9, got {digits}")
    unknown = sorted(set(operations) - _OPERATIONS.keys())
    if unknown or not operations:
        raise ValueError(f"operations must be some of {' '.join(_OPERATIONS)}, got {operations!r}")
    kinds = sorted(set(operations))
    per_kind = 10 ** (2 * digits)
    if n > per_kind * len(kinds):
        raise ValueError(
            f"there are only {per_kind * len(kinds)} different problems of {digits} digit(s) with "
            f"{' '.join(kinds)}, not {n}; raise digits or lower n"
        )
    # range is sampled without being built, so many digits cost nothing.
    drawn = random.Random(seed).sample(range(per_kind * len(kinds)), n)
    return [_problem(kinds[number // per_kind], *divmod(number % per_kind, 10**digits)) for number in drawn]


def _problem(operation: str, a: int, b: int) -> dict[str, str]:
    return {"question": f"{a}{operation}{b}=", "answer": str(_OPERATIONS[operation](a, b))}


def to_conversation(problem: Mapping[str, str]) -> dict[str, Any]:
    """The problem with its answer, as ``{"messages": [user, assistant]}``."""
    return {
        "messages": [
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": problem["answer"]},
        ]
    }


def split_problems(problems: Sequence[Mapping[str, str]], *, held_out: int) -> Split:
    """The last ``held_out`` different questions held out, the others to train on: no question is in both.

    Raises ValueError when nothing would be left to train on.
    """
    distinct = list({problem["question"]: dict(problem) for problem in problems}.values())
    if not 0 <= held_out < len(distinct):
        raise ValueError(f"cannot hold out {held_out} of {len(distinct)} different problems")
    cut = len(distinct) - held_out
    return Split(distinct[:cut], distinct[cut:], [to_conversation(problem) for problem in distinct[:cut]])


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line, making the folder if needed; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
