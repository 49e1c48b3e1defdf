"""Exceptions whose messages are for users, and the nearest matches in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting, file or plugin is wrong; the message is one sentence that says what to change.

    Raised before anything expensive starts. The command line prints it and exits with code 2.
    """


class RunError(RuntimeError):
    """A run cannot go on; the message says why. The command line prints it and exits with code 1."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`, did you mean X?` for the choice nearest to ``word``, or an empty string if none is near.

    Dotted names are near, too, when their last parts are, or when ``word`` is nearly the beginning of one.
    """
    scored = sorted((-_likeness(word, choice), choice) for choice in set(choices))
    return f", did you mean {scored[0][1]}?" if scored and scored[0][0] <= -0.65 else ""


def _likeness(word: str, choice: str) -> float:
    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()

    tails = [text.rsplit(".", 1)[-1].lstrip("-") for text in (word, choice)]
    return max(ratio(word, choice), 0.95 * ratio(*tails), 0.9 * ratio(word, choice[: len(word) + 1]))
