"""Prompts that are too long, and the room that a context leaves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from molt_core.errors import ConfigError

logger = logging.getLogger("molt")


@dataclass
class OverflowReport:
    """Counts of what ``fit_prompt`` did; the first of each kind is also logged."""

    num_dropped: int = 0
    num_truncated: int = 0

    def metrics(self) -> dict[str, float]:
        """The counts, for the metrics."""
        return {"prompts_dropped": float(self.num_dropped), "prompts_truncated": float(self.num_truncated)}


def fit_prompt(
    ids: Sequence[int], limit: int, mode: str, *, row: int | None = None, report: OverflowReport | None = None
) -> list[int] | None:
    """``ids`` if there are at most ``limit``, otherwise as ``mode`` says.

    "drop": None. "truncate_left": the last ``limit`` ids. "error": ``ConfigError`` that names ``row``, the prompt's
    index in the dataset.
    """
    assert limit > 0
    assert mode in ("drop", "truncate_left", "error")
    if len(ids) <= limit:
        return list(ids)
    of_row = "" if row is None else f" of row {row}"
    if mode == "error":
        raise ConfigError(
            f"the prompt{of_row} has {len(ids)} > {limit} tokens, shorten it, raise the limit, or set data.overflow"
        )
    report = report or OverflowReport()
    if mode == "drop":
        report.num_dropped += 1
        if report.num_dropped == 1:
            logger.warning("dropped the prompt%s: %d > %d tokens; more are only counted", of_row, len(ids), limit)
        return None
    report.num_truncated += 1
    if report.num_truncated == 1:
        logger.warning("cut the prompt%s on the left: %d > %d tokens; more are only counted", of_row, len(ids), limit)
    return list(ids[-limit:])


def grant_new_tokens(context: int, used: int, max_new_tokens: int | None = None) -> int:
    """How many tokens may be sampled behind ``used`` tokens in a context of ``context`` tokens; 0 if it is full.

    At most ``max_new_tokens``, if given.
    """
    room = max(context - used, 0)
    return room if max_new_tokens is None else min(room, max_new_tokens)
