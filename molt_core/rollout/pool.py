"""Which engine serves a rollout, and which runner a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from molt_core.rollout.engine import Completion, EngineRequest

T = TypeVar("T")


class GeneratesTokens(Protocol):
    """An engine, local, remote or scripted."""

    async def generate(self, request: EngineRequest) -> Completion: ...


class LeastLoaded(Generic[T]):
    """Hands out the item that the fewest hold; the first of equals, counted from ``start``."""

    def __init__(self, items: Sequence[T], start: int = 0) -> None:
        assert items
        self._items = [items[(start + i) % len(items)] for i in range(len(items))]
        self._holders = [0] * len(items)

    @contextmanager
    def hold(self) -> Iterator[T]:
        index = self._holders.index(min(self._holders))
        self._holders[index] += 1
        try:
            yield self._items[index]
        finally:
            self._holders[index] -= 1


class EnginePool:
    """Engines for rollouts. A rollout stays on one engine, where the KV cache of its earlier turns is."""

    def __init__(self, engines: Sequence[GeneratesTokens], start: int = 0) -> None:
        """``start``: the engine that is asked first; give each runner another one, for they do not see each other."""
        self._balance = LeastLoaded(engines, start)

    @contextmanager
    def engine(self) -> Iterator[GeneratesTokens]:
        """The engine of one rollout, for as long as the rollout lasts."""
        with self._balance.hold() as engine:
            yield engine
