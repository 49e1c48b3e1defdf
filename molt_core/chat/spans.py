"""From spans of characters to the tokens that they cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlap_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens belong to a span, (T,) bool: those whose character range [a, b) overlaps one, however little.

    ``offsets`` has the character range of each of the T tokens; ``spans`` are sorted and disjoint. A token without
    characters belongs to nothing, and characters that no token covers do not matter.
    """
    token = np.asarray(offsets, np.int64).reshape(-1, 2)
    span = np.asarray(spans, np.int64).reshape(-1, 2)
    if not len(span):
        return np.zeros(len(token), np.bool_)
    # The only candidate is the first span that ends after the token's start.
    first = np.searchsorted(span[:, 1], token[:, 0], side="right")
    begin = np.append(span[:, 0], np.iinfo(np.int64).max)[first]
    return (begin < token[:, 1]) & (token[:, 0] < token[:, 1])
