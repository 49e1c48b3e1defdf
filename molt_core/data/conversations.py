"""Conversations for supervised training, from rows to token sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from molt_core.contract import Segment
from molt_core.data.rows import read_rows
from molt_core.errors import ConfigError

if TYPE_CHECKING:
    from molt_core.chat.template import ChatTemplate

logger = logging.getLogger("molt")


@dataclass(frozen=True)
class Conversations:
    """Token sequences to train on, and how many rows were dropped or cut to get them.

    In each segment ``action_mask`` marks the supervised tokens; they were not sampled, so their log-probs and versions
    are 0.
    """

    segments: tuple[Segment, ...]
    num_dropped: int
    """Rows without a supervised token within the limit."""
    num_cut: int
    """Rows that are trained in part."""


def read_conversations(
    path: str | Path,
    template: ChatTemplate,
    *,
    max_len: int,
    messages_key: str = "messages",
    max_samples: int | None = None,
    last_turn_only: bool = False,
) -> Conversations:
    """The conversations of a JSONL file: ``messages_key`` has the messages, ``tools`` (optional) function schemas.

    Sequences are cut on the right at ``max_len`` tokens. Rows without a supervised token are dropped and reported
    once. ``ConfigError``, with the line, for a row that is no conversation, and when no row is left.
    """
    encoded = []
    for number, row in enumerate(read_rows(path, max_samples=max_samples, columns=[messages_key]), 1):
        messages = row[messages_key]
        try:
            if not isinstance(messages, list) or not messages:
                raise ConfigError(f"column {messages_key!r} must be a list of messages")
            encoded.append(template.supervised(messages, last_turn_only, row.get("tools")))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    try:
        return cut_conversations(encoded, max_len)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def cut_conversations(encoded: Iterable[tuple[Sequence[int], Sequence[bool]]], max_len: int) -> Conversations:
    """Segments of (ids, supervised mask) pairs, cut on the right at ``max_len`` tokens; see ``Conversations``."""
    segments: list[Segment] = []
    num_dropped = num_cut = 0
    for ids, mask in encoded:
        kept = np.asarray(mask[:max_len], np.bool_)
        if not kept.any():
            num_dropped += 1
            continue
        num_cut += len(ids) > max_len
        versions = np.where(kept, 0, -1).astype(np.int32)
        segments.append(Segment(np.asarray(ids[:max_len], np.int32), kept, np.zeros(len(kept), np.float32), versions))
    total = num_dropped + len(segments)
    if not segments:
        raise ConfigError(
            f"none of the {total} conversations has an assistant token within the first {max_len}, "
            "raise data.max_len or give conversations with assistant messages"
        )
    if num_dropped or num_cut:
        logger.warning(
            "of %d conversations, %d have no assistant token within %d tokens and are dropped; %d are cut on the right",
            total,
            num_dropped,
            max_len,
            num_cut,
        )
    return Conversations(tuple(segments), num_dropped, num_cut)
