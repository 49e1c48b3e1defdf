"""Event loops in threads for users' code, so that a call that blocks for ever costs one thread and not the run."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

MAX_THREADS = 32
"""Threads per process; with more rollouts at once, some share one."""


class CallTimeoutError(Exception):
    """A call did not end within its limit. (An environment's own TimeoutError is another matter.)"""


class LoopThread:
    """An event loop in a daemon thread. ``unresponsive`` from a failed call until the loop runs again, if it does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.leases = 0
        self.unresponsive = False
        self.shared: dict[Any, Any] = {}
        """Objects that live on this loop, see `Lease.shared`."""
        threading.Thread(target=self.loop.run_forever, name="molt-env", daemon=True).start()

    def probe(self) -> None:
        """Mark it until the loop gets to run: never, while a call blocks it."""
        self.unresponsive = True
        self.loop.call_soon_threadsafe(setattr, self, "unresponsive", False)


class LoopThreads:
    """Grows up to MAX_THREADS loops that respond; a blocked one is left behind and comes back when it is free."""

    def __init__(self) -> None:
        self._threads: list[LoopThread] = []

    def lease(self) -> Lease:
        return Lease(self)

    def pick(self) -> LoopThread:
        """The responsive thread with the fewest leases, or a new one while there may be more."""
        responsive = [thread for thread in self._threads if not thread.unresponsive]
        best = min(responsive, key=lambda thread: thread.leases, default=None)
        if best is None or (best.leases and len(responsive) < MAX_THREADS):
            best = LoopThread()
            self._threads.append(best)
        return best

    def close(self) -> None:
        for thread in self._threads:
            thread.loop.call_soon_threadsafe(thread.loop.stop)


class Lease:
    """One rollout's place on a loop: all its calls run there, unless another rollout blocks it. A context manager."""

    def __init__(self, threads: LoopThreads) -> None:
        self._threads = threads

    def __enter__(self) -> Lease:
        self._thread = self._threads.pick()
        self._thread.leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.leases -= 1

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """The loop's own object for ``key``, made when it is first asked for."""
        if key not in self._thread.shared:
            self._thread.shared[key] = make()
        return self._thread.shared[key]

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """The result of ``function(*args)``, awaited on the loop if it is a coroutine.

        Raises what the function raises, and CallTimeoutError after ``timeout`` seconds, even if the function blocks.
        """
        if self._thread.unresponsive:
            self._thread.leases -= 1
            self.__enter__()
        call = asyncio.run_coroutine_threadsafe(_run(function, args), self._thread.loop)
        try:
            done, _ = await asyncio.wait([asyncio.wrap_future(call)], timeout=timeout)
        finally:
            if not call.done():
                call.cancel()
                self._thread.probe()
        if not done:
            raise CallTimeoutError(f"no answer within {timeout:g} seconds")
        if call.cancelled():
            raise RuntimeError("the call cancelled itself")
        return call.result()


async def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        result = function(*args)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        # Either would end the loop, and with it other rollouts.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
