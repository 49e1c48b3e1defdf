"""Event loops in threads for users' code, so that a call that blocks for ever costs one thread and not the run."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger("molt")

MAX_THREADS = 32  # per process that respond; with more rollouts at once, some share one
MAX_BLOCKED_THREADS = 96  # beyond MAX_THREADS, in place of blocked ones
GRACE = 1.0  # seconds in which a loop must begin a call, else the call goes to another loop


class CallTimeoutError(Exception):
    """A call did not end within its limit. (An environment's own TimeoutError is another matter.)"""


class BlockedLoopsError(Exception):
    """No loop began a call, because the code that runs on them blocks them."""


class LoopThread:
    """An event loop in a daemon thread. ``unresponsive`` from a failed call until the loop runs again, if it does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.leases = 0
        self.unresponsive = False
        self.shared: dict[Any, Any] = {}  # objects that live on this loop, see Lease.shared
        threading.Thread(target=self.loop.run_forever, name="molt-env", daemon=True).start()

    def probe(self) -> None:
        """Mark it until the loop gets to run: never, while a call blocks it."""
        self.unresponsive = True
        self.loop.call_soon_threadsafe(setattr, self, "unresponsive", False)


class LoopThreads:
    """Up to MAX_THREADS loops that respond; a blocked one is left behind and comes back when it is free."""

    def __init__(self) -> None:
        self._threads: list[LoopThread] = []
        self.warned = False

    def pick(self) -> LoopThread:
        """The responsive thread with the fewest leases, or a new one while there may be more."""
        best = min(self._threads, key=lambda thread: (thread.unresponsive, thread.leases), default=None)
        responsive = sum(not thread.unresponsive for thread in self._threads)
        has_room = responsive < MAX_THREADS and len(self._threads) < MAX_THREADS + MAX_BLOCKED_THREADS
        if best is None or (has_room and (best.unresponsive or best.leases)):
            best = LoopThread()
            self._threads.append(best)
        return best

    def close(self) -> None:
        for thread in self._threads:
            thread.loop.call_soon_threadsafe(thread.loop.stop)


class Lease:
    """One rollout's place on a loop: all its calls run there, unless somebody blocks it. A context manager."""

    def __init__(self, threads: LoopThreads) -> None:
        self._threads = threads

    def __enter__(self) -> Lease:
        self._thread = self._threads.pick()
        self._thread.leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.leases -= 1

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """The loop's own object for ``key``, made when it is first asked for. Call it on the loop."""
        if key not in self._thread.shared:
            self._thread.shared[key] = make()
        return self._thread.shared[key]

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """The result of ``function(*args)``, awaited on the loop if it is a coroutine. It runs at most once.

        Raises what the function raises; CallTimeoutError ``timeout`` seconds after a loop began it, even if it or a
        neighbour blocks; BlockedLoopsError if none begins it within ``timeout`` or ten GRACEs, the longer of them.
        """
        give_up = time.monotonic() + max(timeout, 10 * GRACE)
        while time.monotonic() < give_up:
            # Either the loop begins the call or we withdraw it: the future's own lock decides.
            begun: Future[None] = Future()
            outcome: Future[Any] = Future()
            task = asyncio.run_coroutine_threadsafe(_run(begun, outcome, function, args), self._thread.loop)
            try:
                await asyncio.wait([asyncio.wrap_future(begun)], timeout=GRACE)
                if not begun.cancel():
                    done, _ = await asyncio.wait([future := asyncio.wrap_future(outcome)], timeout=timeout)
                    if not done:
                        raise CallTimeoutError(f"no answer within {timeout:g} seconds")
                    return future.result()
            finally:
                if outcome.cancel():
                    begun.cancel()
                    task.cancel()
                    self._thread.probe()
            if not self._threads.warned:
                self._threads.warned = True
                logger.warning("an environment or reward blocks its event loop: others move to new ones")
            self.__exit__()
            self.__enter__()
        raise BlockedLoopsError("environments or rewards block all event loops; put what blocks into asyncio.to_thread")


async def _run(begun: Future[None], outcome: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call ``function``, and say so from within: a task's own callbacks would wait for a neighbour that blocks next."""
    if not begun.set_running_or_notify_cancel():
        return
    begun.set_result(None)
    value: Any = None
    error: BaseException | None = None
    try:
        result = function(*args)
        value = await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:
        error = RuntimeError("the call cancelled itself")
    except (SystemExit, KeyboardInterrupt, StopIteration) as stop:
        # None of them may pass through a loop or its futures.
        error = RuntimeError(f"{type(stop).__name__}: {stop}")
    except BaseException as failure:
        error = failure
    if outcome.set_running_or_notify_cancel():
        outcome.set_result(value) if error is None else outcome.set_exception(error)
