"""Engines and runners as Ray actors, and the traffic between them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from molt_core.memory import freeze_heap
from molt_core.rollout.actors import EngineDiedError, RunnerDiedError, call_actor
from molt_core.rollout.engine import Completion, Engine, EngineRequest, EngineSettings
from molt_core.rollout.pool import GeneratesTokens
from molt_core.rollout.runner import Runner, RunnerSettings
from molt_core.rollout.tasks import GroupTask, RolloutSummary

MAX_CONCURRENT_CALLS = 1_000_000
"""Calls that one actor may hold. Engine and generator queue by themselves; a limit would hold back pause and close."""


@dataclass
class _Client:
    """Requests of one client that are sampled, and answers until it fetches them, by the client's numbers."""

    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: dict[int, Completion | Exception] = field(default_factory=dict)
    has_answers: asyncio.Event = field(default_factory=asyncio.Event)


class RequestServer:
    """An engine for clients in other processes, which send requests and fetch answers in batches.

    A call of an actor per request would cost as much as a small model takes to sample it.
    """

    def __init__(self, engine: GeneratesTokens) -> None:
        self._engine = engine
        self._clients: dict[str, _Client] = defaultdict(_Client)

    async def submit(self, client: str, requests: Mapping[int, EngineRequest], cancelled: Sequence[int]) -> None:
        """Begin requests, numbered by the client, and abort earlier ones. Returns at once."""
        state = self._clients[client]
        for number in cancelled:
            if number in state.running:
                state.running[number].cancel()
        for number, request in requests.items():
            state.running[number] = asyncio.create_task(self._run(state, number, request))

    async def answers(self, client: str) -> dict[int, Completion | Exception]:
        """The answers since the last call, by request number, once there is one. One call at a time per client."""
        state = self._clients[client]
        await state.has_answers.wait()
        state.has_answers.clear()
        answers, state.answers = state.answers, {}
        return answers

    async def _run(self, state: _Client, number: int, request: EngineRequest) -> None:
        try:
            state.answers[number] = await self._engine.generate(request)
        except Exception as error:
            state.answers[number] = _plain(error)
        finally:
            del state.running[number]
        state.has_answers.set()


class EngineActor(Engine):
    """An Engine in a Ray actor, with the methods of a RequestServer."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._server = RequestServer(self)
        freeze_heap()

    async def submit(self, client: str, requests: Mapping[int, EngineRequest], cancelled: Sequence[int]) -> None:
        await self._server.submit(client, requests, cancelled)

    async def answers(self, client: str) -> dict[int, Completion | Exception]:
        return await self._server.answers(client)


def _plain(error: Exception) -> Exception:
    """An error that any process can unpickle."""
    for kind in (EngineDiedError, ValueError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class RemoteEngine:
    """An Engine in an actor, with the same methods. Can be sent to other actors."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._traffic: EngineTraffic | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteEngine, (self.actor,)

    async def generate(self, request: EngineRequest) -> Completion:
        if self._traffic is None or self._traffic.loop is not asyncio.get_running_loop():
            self._traffic = EngineTraffic(self._call)
        return await self._traffic.generate(request)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def load_weights(self, chunk_refs: Sequence[Any], version: int) -> None:
        await self._call("load_weights", list(chunk_refs), version)

    async def version(self) -> int:
        return await self._call("version")

    async def num_unfinished(self) -> int:
        return await self._call("num_unfinished")

    async def check_health(self) -> None:
        """Also returns once a starting engine is up."""
        await self._call("check_health")

    async def shutdown(self) -> None:
        await self._call("shutdown")

    async def _call(self, method: str, *args: Any) -> Any:
        return await call_actor(self.actor, method, *args, died=EngineDiedError)


class EngineTraffic:
    """The requests of one event loop to one engine. Those made while a call is on its way go with the next call."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """``call(method, *args)`` calls a method of the engine's RequestServer."""
        self.loop = asyncio.get_running_loop()
        self._call = call
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._requests: dict[int, EngineRequest] = {}
        self._cancelled: list[int] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def generate(self, request: EngineRequest) -> Completion:
        """Sample one completion; a cancelled call aborts its request. Raises what the engine raises."""
        number = next(self._numbers)
        answer = self._waiting[number] = self.loop.create_future()
        self._requests[number] = request
        self._keep_running("send", self._send)
        self._keep_running("receive", self._receive)
        try:
            return await answer
        finally:
            del self._waiting[number]
            was_sent = self._requests.pop(number, None) is None
            if was_sent and answer.cancelled():
                self._cancelled.append(number)
                self._keep_running("send", self._send)

    def _keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = self.loop.create_task(self._fail_together(work()))

    async def _fail_together(self, work: Coroutine[Any, Any, None]) -> None:
        """When a call fails, the engine is out of reach: nothing that waits for it would be answered."""
        try:
            await work
        except Exception as error:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _send(self) -> None:
        while self._requests or self._cancelled:
            requests, self._requests = self._requests, {}
            cancelled, self._cancelled = self._cancelled, []
            await self._call("submit", self._client, requests, cancelled)

    async def _receive(self) -> None:
        while self._waiting:
            for number, answer in (await self._call("answers", self._client)).items():
                waiting = self._waiting.get(number)
                if waiting is None or waiting.done():
                    continue
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)


def start_engines(settings: EngineSettings, num_engines: int) -> list[RemoteEngine]:
    """Create the actors and return at once; ``check_health`` of each waits for it and raises what went wrong.

    An actor takes no CPU share on CPU (its threads are ``settings.cpu_threads``) and its GPUs on CUDA.
    """
    import ray

    actor_class = ray.remote(EngineActor).options(
        num_cpus=0,
        num_gpus=settings.tensor_parallel_size if settings.device == "cuda" else 0,
        max_concurrency=MAX_CONCURRENT_CALLS,
        runtime_env={"env_vars": settings.environment()},
    )
    seeds = range(settings.seed, settings.seed + num_engines)
    return [RemoteEngine(actor_class.remote(dataclasses.replace(settings, seed=seed))) for seed in seeds]


class RunnerActor:
    """A Runner in a Ray actor."""

    def __init__(self, settings: RunnerSettings, engines: Sequence[GeneratesTokens], index: int) -> None:
        self._runner = Runner.start(settings, engines, index)
        freeze_heap()

    async def run_group(self, task: GroupTask) -> list[RolloutSummary]:
        return await self._runner.run_group(task)

    async def ready(self) -> None:
        """Returns once the process is set up."""

    async def close(self) -> None:
        await self._runner.close()


class RemoteRunner:
    """The runner in an actor, with the same methods."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def run_group(self, task: GroupTask) -> list[RolloutSummary]:
        return await self._call("run_group", task)

    async def ready(self) -> None:
        await self._call("ready")

    async def close(self) -> None:
        await self._call("close")

    async def _call(self, method: str, *args: Any) -> Any:
        return await call_actor(self.actor, method, *args, died=RunnerDiedError)


def start_runners(settings: RunnerSettings, engines: Sequence[GeneratesTokens], num_runners: int) -> list[RemoteRunner]:
    """Create the actors and return at once; ``ready`` of each waits for it and raises what went wrong."""
    import ray

    actor_class = ray.remote(RunnerActor).options(num_cpus=0, max_concurrency=MAX_CONCURRENT_CALLS)
    return [RemoteRunner(actor_class.remote(settings, list(engines), index)) for index in range(num_runners)]
