"""The order of prompts, and where a run is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from molt_core.errors import ConfigError


class PromptCursor:
    """Hands out row indices: every row once per episode, for ``num_episodes`` episodes.

    The order of an episode depends on ``seed``, its number and ``num_rows`` only, so a cursor that loads the state of
    another one goes on exactly where that one was.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, num_episodes: int, digest: str = "") -> None:
        """``digest``: of the rows' content (:func:`digest_of`), by which another cursor knows them again."""
        assert num_rows > 0
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._identity = {"num_rows": num_rows, "seed": seed, "shuffle": shuffle, "digest": digest}
        self._num_episodes = num_episodes
        self._episode = 0
        self._position = 0
        self._order = self._make_order()

    def next(self) -> tuple[int, int] | None:
        """The next (episode, row index), both from 0; None after the last episode."""
        if self._episode >= self._num_episodes:
            return None
        item = self._episode, int(self._order[self._position])
        self._position += 1
        if self._position == len(self._order):
            self._episode, self._position = self._episode + 1, 0
            self._order = self._make_order()
        return item

    def state(self) -> dict[str, Any]:
        """Where the cursor is, for JSON."""
        return {**self._identity, "episode": self._episode, "position": self._position}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state()`` was taken; ``ConfigError`` if it is of other rows, another seed or another order."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise ConfigError(
                    f"the checkpoint's prompts have {key} {state.get(key)}, this run has {value}: "
                    "resume with the same data and seed, or start a new run"
                )
        self._episode, self._position = int(state["episode"]), int(state["position"])
        self._order = self._make_order()

    def _make_order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([abs(self._seed), int(self._seed < 0), self._episode]).permutation(self._num_rows)


def digest_of(rows: Iterable[bytes]) -> str:
    """A short digest of rows of bytes, in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(len(row).to_bytes(8, "big") + row)
    return digest.hexdigest()
