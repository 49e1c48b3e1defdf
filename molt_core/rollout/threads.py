"""Event loops in threads for users' code, so that a call that blocks for ever costs one thread and not the run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("molt")

FEW_THREADS = 4  # per process, while the code that runs on them does not block: every switch of threads costs
MAX_THREADS = 32  # that respond; with more rollouts at once, some share one
MAX_BLOCKED_THREADS = 96  # beyond MAX_THREADS, in place of blocked ones
GRACE = 1.0  # seconds in which a loop must begin a call, else the call goes to another loop
SHORT_GRACE = 0.1  # the same while there may be more threads


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
    """FEW_THREADS loops, up to MAX_THREADS once a call had to wait; a blocked one is left and comes back when free."""

    def __init__(self) -> None:
        self._threads: list[LoopThread] = []
        self._limit = min(FEW_THREADS, MAX_THREADS)
        self._warned = False

    @property
    def grace(self) -> float:
        """Seconds in which a loop must begin a call."""
        return GRACE if self._limit == MAX_THREADS else SHORT_GRACE

    def not_begun(self, grace: float) -> None:
        """Note that a call was not begun within ``grace``: what runs before it blocks its loop."""
        self._limit = min(2 * self._limit, MAX_THREADS)
        if grace >= GRACE and not self._warned:
            self._warned = True
            logger.warning("an environment or reward blocks its event loop: others move to new ones")

    def pick(self) -> LoopThread:
        """The responsive thread with the fewest leases, or a new one while there may be more."""
        best = min(self._threads, key=lambda thread: (thread.unresponsive, thread.leases), default=None)
        responsive = sum(not thread.unresponsive for thread in self._threads)
        has_room = responsive < self._limit and len(self._threads) < MAX_THREADS + MAX_BLOCKED_THREADS
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
            call, grace = _Call(self._thread.loop, function, args), self._threads.grace
            try:
                if await call.ends_within(timeout, grace):
                    return call.outcome.result()
            finally:
                if not call.outcome.done():
                    call.abandon()
                    self._thread.probe()
            self._threads.not_begun(grace)
            self.__exit__()
            self.__enter__()
        raise BlockedLoopsError("environments or rewards block all event loops; put what blocks into asyncio.to_thread")


class _Call:
    """A call handed to another loop: begun there or withdrawn here, never both."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._loop, self._function, self._args = loop, function, args
        self._caller = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._caller.create_future()
        self._ticket = [True]  # whoever pops it decides; a pop is atomic
        self._begun: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._sent = time.monotonic()
        loop.call_soon_threadsafe(self._begin)

    async def ends_within(self, timeout: float, grace: float) -> bool:
        """True when it ended within ``timeout`` seconds of its beginning, False when it did not begin within ``grace``.

        CallTimeoutError when it began and did not end.
        """
        left = min(timeout, grace)
        while True:
            await asyncio.wait([self.outcome], timeout=left)
            if self.outcome.done():
                return True
            begun = self._begun
            left = (self._sent + grace if begun is None else begun + timeout) - time.monotonic()
            if left <= 0 and begun is not None:
                raise CallTimeoutError(f"no answer within {timeout:g} seconds")
            if left <= 0 and self._claim():
                return False
            left = max(left, 0.001)

    def abandon(self) -> None:
        """Nobody waits any more: cancel it, or keep it from beginning."""
        self.outcome.cancel()
        self._loop.call_soon_threadsafe(self._stop)

    def _claim(self) -> bool:
        """Whether the caller of this decides, once per call: to begin it, or that it does not begin."""
        try:
            return self._ticket.pop()
        except IndexError:
            return False

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    def _stop(self) -> None:
        self._claim()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        if not self._claim():
            return
        self._begun = time.monotonic()
        value: Any = None
        error: BaseException | None = None
        try:
            result = self._function(*self._args)
            value = await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            error = RuntimeError("the call cancelled itself")
        except (SystemExit, KeyboardInterrupt, StopIteration) as stop:
            # None of them may pass through a loop or its futures.
            error = RuntimeError(f"{type(stop).__name__}: {stop}")
        except BaseException as failure:
            error = failure
        # From within, and not by a callback of the task: that would wait for a neighbour that blocks next.
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._caller.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(value) if error is None else self.outcome.set_exception(error)
