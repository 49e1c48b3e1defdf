"""Requests to an engine in another process: sent and answered in batches, each one's ending its own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.rollout.actors import EngineDiedError
from molt_core.rollout.engine import EngineRequest
from molt_core.rollout.remote import EngineTraffic, RequestServer
from molt_core.testing.engine import ScriptedEngine, completion


class Wire:
    """Calls a server; ``calls`` are the numbers of requests begun and cancelled by each ``submit``."""

    def __init__(self, engine):
        self.server = RequestServer(engine)
        self.calls = []
        self.delay = 0.0
        self.error = None

    async def __call__(self, method, *args):
        if method == "submit":
            self.calls.append((sorted(args[1]), list(args[2])))
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        return await getattr(self.server, method)(*args)


def echo(request):
    return completion([*request.prompt_ids, 2])


def request(*ids):
    return EngineRequest(ids, 8)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_every_request_gets_its_own_answer(delays):
    """Delays in turns of the loop, before the request and of its answer."""

    async def turns(count):
        for _ in range(count):
            await asyncio.sleep(0)

    async def answer(asked):
        await turns(asked.prompt_ids[1])
        return echo(asked)

    async def ask(traffic, index, before, during):
        await turns(before)
        return await traffic.generate(request(index, during))

    async def scenario():
        traffic = EngineTraffic(Wire(ScriptedEngine(answer)))
        return await asyncio.gather(*(ask(traffic, i, *delay) for i, delay in enumerate(delays)))

    done = asyncio.run(scenario())
    assert [d.ids for d in done] == [(i, during, 2) for i, (_, during) in enumerate(delays)]


def test_requests_made_while_a_call_is_on_its_way_go_with_the_next():
    async def scenario():
        wire = Wire(ScriptedEngine(echo))
        wire.delay = 0.02
        traffic = EngineTraffic(wire)
        first = [asyncio.create_task(traffic.generate(request(i))) for i in range(2)]
        await asyncio.sleep(0.01)
        rest = [asyncio.create_task(traffic.generate(request(i))) for i in range(2, 7)]
        await asyncio.gather(*first, *rest)
        return wire.calls

    assert asyncio.run(scenario()) == [([0, 1], []), ([2, 3, 4, 5, 6], [])]


def test_a_cancelled_request_is_aborted_and_its_neighbours_are_answered():
    aborted = []

    async def answer(asked):
        try:
            await asyncio.sleep(30 if asked.prompt_ids == (0,) else 0.05)
        except asyncio.CancelledError:
            aborted.append(asked.prompt_ids)
            raise
        return echo(asked)

    async def scenario():
        wire = Wire(ScriptedEngine(answer))
        traffic = EngineTraffic(wire)
        tasks = [asyncio.create_task(traffic.generate(request(i))) for i in range(2)]
        await asyncio.sleep(0.02)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return wire.calls, results

    calls, results = asyncio.run(scenario())
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1].ids == (1, 2)
    assert calls == [([0, 1], []), ([], [0])]
    assert aborted == [(0,)]


def test_a_request_that_is_cancelled_before_it_is_sent_is_not_sent():
    async def scenario():
        wire = Wire(ScriptedEngine(echo))
        wire.delay = 0.02
        traffic = EngineTraffic(wire)
        first = asyncio.create_task(traffic.generate(request(0)))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(traffic.generate(request(1)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        return wire.calls

    assert asyncio.run(scenario()) == [([0], [])]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("too long"), ValueError, "too long"),
        (EngineDiedError("gone"), EngineDiedError, "gone"),
        (KeyError("x"), RuntimeError, "KeyError: 'x'"),
    ],
)
def test_an_error_is_that_of_its_request_alone(error, kind, message):
    def answer(asked):
        if asked.prompt_ids == (0,):
            raise error
        return echo(asked)

    async def scenario():
        traffic = EngineTraffic(Wire(ScriptedEngine(answer)))
        return await asyncio.gather(*(traffic.generate(request(i)) for i in range(2)), return_exceptions=True)

    failed, done = asyncio.run(scenario())
    assert type(failed) is kind
    assert str(failed) == message
    assert done.ids == (1, 2)


def test_all_requests_fail_when_the_engine_is_out_of_reach_and_later_ones_try_again():
    async def scenario():
        wire = Wire(ScriptedEngine(echo))
        wire.error = EngineDiedError("a process of the run died")
        traffic = EngineTraffic(wire)
        failed = await asyncio.gather(*(traffic.generate(request(i)) for i in range(3)), return_exceptions=True)
        wire.error = None
        return failed, await traffic.generate(request(3))

    failed, done = asyncio.run(scenario())
    assert [type(error) for error in failed] == [EngineDiedError] * 3
    assert done.ids == (3, 2)
