"""Calls to Ray actors from asyncio: cancellation travels along, a dead actor is an error at once, causes stay typed."""

from __future__ import annotations

import asyncio
from typing import Any

from molt_core.errors import ConfigError, RunError


class ActorDiedError(RunError):
    """A process of the run is gone; the run has to stop."""


class EngineDiedError(ActorDiedError):
    """An engine cannot answer any more."""


class RunnerDiedError(ActorDiedError):
    """A runner process is gone."""


class WeightsIncompleteError(RunError):
    """After a refit some parameter still has its old value, or some tensor that was sent has no place."""


async def call_actor(actor: Any, method: str, *args: Any, died: type[ActorDiedError]) -> Any:
    """The result of an actor's method; ``died`` is raised when the actor is gone, whatever the reason."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        ref = getattr(actor, method).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref, recursive=False)
            raise
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError | ActorDiedError | WeightsIncompleteError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise died(f"a process of the run died: {error}") from error
