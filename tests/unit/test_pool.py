"""Which engine serves a rollout."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.rollout.actors import EngineDiedError, WeightsIncompleteError
from molt_core.rollout.engine import EngineRequest, EngineSettings
from molt_core.rollout.pool import EnginePool, LeastLoaded
from molt_core.rollout.refit import refit
from molt_core.testing.engine import ScriptedEngine, completion


@given(st.integers(1, 5), st.integers(0, 7), st.integers(1, 40))
def test_held_items_are_spread_evenly(count, start, holders):
    balance = LeastLoaded(range(count), start)
    with ExitStack() as stack:
        held = [stack.enter_context(balance.hold()) for _ in range(holders)]
    per_item = [held.count(item) for item in range(count)]
    assert max(per_item) - min(per_item) <= 1
    assert held[0] == start % count


def test_what_is_released_is_handed_out_again():
    balance = LeastLoaded(["a", "b"])
    with balance.hold() as first, balance.hold() as second:
        assert (first, second) == ("a", "b")
        with pytest.raises(KeyError), balance.hold():
            raise KeyError
    with balance.hold() as again:
        assert again == "a"


def test_a_rollout_keeps_its_engine():
    engines = [ScriptedEngine(lambda r: completion([1])) for _ in range(2)]
    pool = EnginePool(engines)

    async def scenario():
        with pool.engine() as one, pool.engine() as other:
            for _ in range(3):
                await one.generate(EngineRequest((5,), 1))
            assert other is not one

    asyncio.run(scenario())
    assert [len(engine.requests) for engine in engines] == [3, 0]


class LoggingEngine:
    """Notes what a refit does to it."""

    def __init__(self, log, name, error=None):
        self.log, self.name, self.error = log, name, error

    async def pause(self):
        self.log.append((self.name, "pause"))

    async def load_weights(self, chunk_refs, version):
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        self.log.append((self.name, "load", tuple(chunk_refs), version))

    async def resume(self):
        self.log.append((self.name, "resume"))


def test_a_refit_pauses_all_engines_before_the_first_gets_new_weights():
    log = []
    asyncio.run(refit([LoggingEngine(log, "a"), LoggingEngine(log, "b")], ["chunk"], 7))
    assert log == [
        ("a", "pause"),
        ("b", "pause"),
        ("a", "load", ("chunk",), 7),
        ("b", "load", ("chunk",), 7),
        ("a", "resume"),
        ("b", "resume"),
    ]


@pytest.mark.parametrize("error", [WeightsIncompleteError("x"), EngineDiedError("y")])
def test_a_refit_that_fails_says_so_and_resumes_all_engines(error):
    log = []
    with pytest.raises(type(error)):
        asyncio.run(refit([LoggingEngine(log, "a", error), LoggingEngine(log, "b")], [], 1))
    assert {entry for entry in log if entry[1] == "resume"} == {("a", "resume"), ("b", "resume")}


def test_engine_settings_resolve_what_the_device_decides():
    from molt_core.config.rl import VllmConfig

    def resolve(device, **options):
        settings = EngineSettings.from_config(VllmConfig(**options), model="m", device=device, max_len=64)
        return settings.dtype, settings.enforce_eager

    assert resolve("cpu") == ("float32", True)
    assert resolve("cuda") == ("bfloat16", False)
    assert resolve("cuda", dtype="float16", enforce_eager=True) == ("float16", True)
