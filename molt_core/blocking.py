"""Blocking calls from asyncio, in threads that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``function(*args, **kwargs)``, run in a daemon thread.

    Unlike with ``asyncio.to_thread``, neither the event loop nor the interpreter waits at its end for a call that was
    cancelled: a run that is interrupted while an actor is busy ends at once.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, name=f"molt-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future
