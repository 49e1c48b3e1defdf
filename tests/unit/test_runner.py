"""The runner with a scripted engine: tokens, masks, budgets, and every way a rollout can end."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core import ConfigError, Env, Result, Reward, RolloutStatus, Score
from molt_core.config.rl import EnvConfig, RewardConfig
from molt_core.contract import Segment
from molt_core.rollout import threads
from molt_core.rollout.actors import EngineDiedError
from molt_core.rollout.runner import Runner, stable_seed
from molt_core.rollout.scoring import as_number
from molt_core.rollout.tasks import GroupTask, SamplingSettings, SegmentInfo
from molt_core.rollout.threads import BlockedLoopsError, CallTimeoutError, Lease, LoopThreads
from molt_core.testing.engine import ScriptedEngine, completion
from molt_core.training.rows import fetch_rollouts

END, OTHER_END = 2, 7


class CharTemplate:
    """One id per character: its code point. An assistant turn ends with id 2; id 7 ends it too."""

    stop_token_ids = (END, OTHER_END)

    def __init__(self):
        self.tokenizer = SimpleNamespace(decode=self.action_text, encode=lambda text, add_special_tokens: encode(text))

    def prompt_ids(self, messages, tools=None):
        return [i for message in messages for i in encode(message["content"])]

    def raw_prompt_ids(self, text):
        return [1, *encode(text)]

    def next_turn_ids(self, action_ids, new_messages):
        rest = [] if action_ids[-1] in self.stop_token_ids else [END]
        return rest + self.prompt_ids(new_messages)

    def action_text(self, ids):
        return "".join(chr(i) for i in ids if i > 8)


def encode(text):
    return [ord(c) for c in text]


class Scripted(Env):
    """Starts with row["prompt"] and answers each action with the next of row["results"]."""

    async def reset(self, row, ctx):
        self.results = list(row.get("results", [Result(reward=1.0, terminated=True)]))
        return row.get("prompt", [{"role": "user", "content": "q"}])

    async def step(self, action, ctx):
        return self.results.pop(0)


def make_runner(engine, env=Scripted, *, max_len=64, overflow="drop", reward_plugin=None, reward=None, **env_options):
    engines = engine if isinstance(engine, list) else [engine]
    return Runner(
        engines=engines,
        template=CharTemplate(),
        make_env=env,
        make_reward=reward_plugin,
        env=EnvConfig(**{"name": "test", "retries": 0, **env_options}),
        reward=reward or RewardConfig(),
        max_len=max_len,
        overflow=overflow,
    )


def play(runner, num_samples=1, sampling=None, **row):
    task = GroupTask("g", row, num_samples, seed=0, sampling=sampling or SamplingSettings())
    return asyncio.run(runner.run_group(task))


def play_one(engine, env=Scripted, *, sampling=None, row=None, **options):
    return play(make_runner(engine, env, **options), sampling=sampling, **(row or {}))[0]


def say(text="a", end=END):
    return completion([*encode(text), end])


def segments_of(summary):
    (rollout,) = fetch_rollouts([summary.data])
    return rollout.segments


GO_ON = Result(observation=[{"role": "user", "content": "no"}])
STOP = Result(reward=1.0, terminated=True)


class TestTokens:
    def test_sampled_ids_logprobs_and_versions_are_kept_as_they_are_over_turns(self):
        engine = ScriptedEngine(
            [
                completion([31, 32, END], [-0.1, -0.2, -4.60517], version=3),
                completion([33, END], [-0.3, -0.4], version=4),
            ]
        )
        summary = play_one(engine, row={"prompt": [{"role": "user", "content": "AB"}], "results": [GO_ON, STOP]})
        (segment,) = segments_of(summary)
        assert segment.ids.tolist() == [65, 66, 31, 32, END, 110, 111, 33, END]
        assert segment.action_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
        np.testing.assert_allclose(segment.logprobs, [0, 0, -0.1, -0.2, -4.60517, 0, 0, -0.3, -0.4])
        assert segment.versions.tolist() == [-1, -1, 3, 3, 3, -1, -1, 4, 4]
        assert list(engine.requests[1].prompt_ids) == [65, 66, 31, 32, END, 110, 111]

    def test_a_sampled_end_token_keeps_its_own_logprob(self):
        summary = play_one(ScriptedEngine([completion([31, 32, END], [-0.1, -0.2, -4.60517])]))
        segment = segments_of(summary)[0]
        assert segment.ids.tolist()[-3:] == [31, 32, END]
        np.testing.assert_allclose(segment.logprobs[-3:], [-0.1, -0.2, -4.60517])

    def test_an_end_token_that_nobody_sampled_is_not_trained(self):
        answers = [completion([31, 32], [-0.1, -0.2]), say()]
        summary = play_one(ScriptedEngine(answers), row={"results": [GO_ON, STOP]})
        segment = segments_of(summary)[0]
        assert segment.ids.tolist()[1:4] == [31, 32, END]
        assert segment.action_mask.tolist()[1:4] == [True, True, False]

    def test_any_end_token_ends_a_turn_without_being_cut_off(self):
        summary = play_one(ScriptedEngine([completion([31, 32, OTHER_END])]))
        assert summary.status == RolloutStatus.COMPLETED
        assert segments_of(summary)[0].action_mask.tolist() == [False, True, True, True]

    def test_a_turn_cut_by_length_gets_no_end_token_and_counts_as_truncated(self):
        summary = play_one(ScriptedEngine([completion([31, 32], [-0.1, -0.2], finish_reason="length")]))
        assert summary.status == RolloutStatus.TRUNCATED
        assert summary.reward == 1.0
        assert segments_of(summary)[0].ids.tolist()[1:] == [31, 32]

    @pytest.mark.parametrize(
        ("results", "status", "terminated"),
        [
            ([STOP], RolloutStatus.COMPLETED, True),
            ([GO_ON, Result(truncated=True)], RolloutStatus.TRUNCATED, False),
            ([GO_ON, GO_ON], RolloutStatus.TRUNCATED, False),  # out of turns
        ],
    )
    def test_only_what_the_environment_ended_is_terminated(self, results, status, terminated):
        summary = play_one(ScriptedEngine([say(), say()]), row={"results": results}, max_turns=2)
        assert (summary.status, summary.terminated) == (status, terminated)

    def test_a_cut_action_that_the_environment_answered_with_the_end_is_terminated_too(self):
        summary = play_one(ScriptedEngine([completion([31, 32], [-0.1, -0.2], finish_reason="length")]))
        assert (summary.status, summary.terminated) == (RolloutStatus.TRUNCATED, True)

    def test_the_environment_sees_text_without_special_tokens_and_the_ids(self):
        seen = []

        class Watching(Scripted):
            async def step(self, action, ctx):
                seen.append((action.text, action.ids, action.finish_reason))
                return STOP

        play_one(ScriptedEngine([say("hi")]), Watching)
        assert seen == [("hi", (104, 105, END), "stop")]

    def test_a_plain_text_prompt_goes_on_as_plain_text(self):
        engine = ScriptedEngine([completion([31]), say()])
        play_one(engine, row={"prompt": "AB", "results": [Result(observation="CD"), STOP]})
        assert list(engine.requests[1].prompt_ids) == [1, 65, 66, 31, 67, 68]

    def test_a_plain_observation_in_a_chat_is_a_user_message(self):
        engine = ScriptedEngine([completion([31]), say()])
        play_one(engine, row={"results": [Result(observation="CD"), STOP]})
        assert list(engine.requests[1].prompt_ids) == [113, 31, END, 67, 68]

    @given(st.lists(st.booleans(), max_size=30))
    def test_a_segments_action_ranges_are_its_mask(self, actions):
        mask = np.array([False, *actions])
        versions = np.where(mask, np.arange(len(mask)), -1).astype(np.int32)
        info = SegmentInfo.of(Segment(np.zeros(len(mask), np.int32), mask, np.zeros(len(mask), np.float32), versions))
        rebuilt = np.zeros(len(mask), bool)
        for start, end in info.action_ranges:
            assert start < end
            rebuilt[start:end] = True
        assert rebuilt.tolist() == mask.tolist()
        acting = [i for i, m in enumerate(mask) if m]
        assert (info.length, info.num_actions, info.version_sum) == (len(mask), len(acting), sum(acting))
        assert (info.oldest_version, info.newest_version) == (min(acting, default=-1), max(acting, default=-1))


class TestBudget:
    @pytest.mark.parametrize(("length", "granted"), [(4, 8), (8, 4), (12, 0), (15, 0)])
    def test_a_later_turn_gets_what_the_context_leaves(self, length, granted):
        # Context 12, at most 8 new tokens. The first turn takes 2 ids (prompt and action), the rest is the observation.
        observation = [{"role": "user", "content": "x" * (length - 2)}]
        engine = ScriptedEngine([completion([END]), completion([31] * granted, finish_reason="length")])
        summary = play_one(
            engine,
            max_len=12,
            sampling=SamplingSettings(max_new_tokens=8),
            row={"results": [Result(reward=0.25, observation=observation), STOP]},
        )
        assert [request.max_tokens for request in engine.requests[1:]] == ([granted] if granted else [])
        assert summary.status == RolloutStatus.TRUNCATED
        assert summary.reward == (1.25 if granted else 0.25)

    def test_more_turns_than_allowed_is_truncation(self):
        summary = play_one(ScriptedEngine(lambda r: say()), row={"results": [GO_ON] * 5}, max_turns=3)
        assert (summary.status, summary.num_turns) == (RolloutStatus.TRUNCATED, 3)

    def test_a_prompt_that_is_too_long_is_excluded_without_sampling(self):
        engine = ScriptedEngine([])
        summary = play_one(engine, max_len=9, row={"prompt": [{"role": "user", "content": "x" * 9}]})
        assert summary.status == RolloutStatus.EMPTY
        assert "9 > 8" in summary.error
        assert segments_of(summary) == ()

    def test_a_prompt_that_is_too_long_is_cut_on_the_left_where_asked(self):
        engine = ScriptedEngine(lambda r: completion([END]))
        prompt = [{"role": "user", "content": "abcdefghij"}]
        summary = play_one(engine, max_len=9, overflow="truncate_left", row={"prompt": prompt})
        assert list(engine.requests[0].prompt_ids) == encode("cdefghij")
        assert summary.info == {"prompt_truncated": 1.0}

    def test_a_prompt_that_is_too_long_stops_the_run_where_asked(self):
        runner = make_runner(ScriptedEngine([]), max_len=9, overflow="error")
        task = GroupTask("g", {"prompt": "x" * 20}, 1, seed=0, row_index=2)
        with pytest.raises(ConfigError, match="row 2 has 21 > 8"):
            asyncio.run(runner.run_group(task))


class Broken(Scripted):
    """Fails in the place that row["where"] names, in the way that row["how"] is."""

    async def reset(self, row, ctx):
        if row["where"] == "reset":
            return await row["how"]()
        return await super().reset(row, ctx)

    async def step(self, action, ctx):
        if ctx.row["where"] == "step":
            return await ctx.row["how"]()
        return STOP


async def raises():
    raise OSError("sandbox did not start")


async def raises_timeout():
    raise TimeoutError


async def exits():
    raise SystemExit(1)


async def sleeps():
    await asyncio.sleep(3600)


async def blocks():
    time.sleep(3)


async def cancels_itself():
    raise asyncio.CancelledError


async def gives_none():
    return None


class TestEndings:
    @pytest.mark.parametrize("where", ["reset", "step"])
    @pytest.mark.parametrize(
        ("how", "status", "message"),
        [
            (raises, RolloutStatus.ENV_ERROR, "OSError: sandbox did not start"),
            (raises_timeout, RolloutStatus.ENV_ERROR, "TimeoutError"),
            (exits, RolloutStatus.ENV_ERROR, "SystemExit"),
            (cancels_itself, RolloutStatus.ENV_ERROR, "cancelled itself"),
            (gives_none, RolloutStatus.ENV_ERROR, "None"),
            (sleeps, RolloutStatus.ENV_TIMEOUT, r"env.turn_timeout \(0.3 s\)"),
            (blocks, RolloutStatus.ENV_TIMEOUT, r"env.turn_timeout \(0.3 s\)"),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_an_environment_that_fails_excludes_its_rollout(self, where, how, status, message):
        engine = ScriptedEngine(lambda r: say())
        summary = play_one(engine, Broken, row={"where": where, "how": how}, turn_timeout=0.3)
        assert summary.status == status
        assert re.search(message, summary.error)
        assert math.isnan(summary.reward)

    def test_a_failing_constructor_excludes_the_rollout(self):
        class Unborn(Scripted):
            def __init__(self):
                raise RuntimeError("no display")

        summary = play_one(ScriptedEngine([]), Unborn)
        assert summary.status == RolloutStatus.ENV_ERROR
        assert "no display" in summary.error

    @pytest.mark.parametrize("where", ["reset", "step"])
    def test_only_the_environment_that_blocks_its_loop_times_out(self, where, monkeypatch):
        monkeypatch.setattr(threads, "MAX_THREADS", 4)
        monkeypatch.setattr(threads, "GRACE", 0.3)
        released = threading.Event()
        begun = []

        class OneBlocks(Scripted):
            async def reset(self, row, ctx):
                begun.append(("reset", ctx.rollout_id))
                self.block("reset", ctx)
                return await super().reset(row, ctx)

            async def step(self, action, ctx):
                begun.append(("step", ctx.rollout_id))
                self.block("step", ctx)
                return STOP

            def block(self, here, ctx):
                if (here, ctx.rollout_id) == (where, "g-0"):
                    released.wait(60)

        try:
            runner = make_runner(ScriptedEngine(lambda r: say()), OneBlocks, turn_timeout=5)
            first, *others = play(runner, num_samples=64)
        finally:
            released.set()
        assert first.status == RolloutStatus.ENV_TIMEOUT
        assert {rollout.status for rollout in others} == {RolloutStatus.COMPLETED}
        assert len(set(begun)) == len(begun)  # nothing ran twice

    def test_an_answer_gets_through_although_the_next_call_on_the_loop_blocks(self, monkeypatch):
        monkeypatch.setattr(threads, "MAX_THREADS", 1)
        released = threading.Event()

        async def three_calls():
            loops = threads.LoopThreads()
            with threads.Lease(loops) as lease:
                # The first holds the loop until the other two wait for it, so that they begin in the same turn.
                calls = (time.sleep, 0.2), (lambda: "answer",), (released.wait, 60)
                results = await asyncio.gather(*(lease.call(*c, timeout=2) for c in calls), return_exceptions=True)
            released.set()
            loops.close()
            return results

        _, answer, blocked = asyncio.run(three_calls())
        assert answer == "answer"
        assert isinstance(blocked, threads.CallTimeoutError)

    @pytest.mark.parametrize("cancelled_before", [False, True])
    def test_the_end_of_a_run_waits_until_environments_are_closed(self, cancelled_before):
        closed = []

        class SlowToClose(Scripted):
            async def step(self, action, ctx):
                await asyncio.sleep(3600)

            async def close(self):
                await asyncio.sleep(0.2)
                closed.append(True)

        async def end_in_the_middle():
            runner = make_runner(ScriptedEngine(lambda r: say()), SlowToClose)
            group = asyncio.create_task(runner.run_group(GroupTask("g", {}, 3, seed=0)))
            await asyncio.sleep(0.2)
            if cancelled_before:
                group.cancel()
                await asyncio.sleep(0.05)
            await runner.close()
            await asyncio.gather(group, return_exceptions=True)

        asyncio.run(end_in_the_middle())
        assert closed == [True] * 3

    def test_a_call_that_awaits_too_long_is_closed_on_its_own_loop(self):
        loops = []

        class Slow(Scripted):
            async def reset(self, row, ctx):
                loops.append(asyncio.get_running_loop())
                await asyncio.sleep(3600)

            async def close(self):
                loops.append(asyncio.get_running_loop())

        assert play_one(ScriptedEngine([]), Slow, turn_timeout=0.2).status == RolloutStatus.ENV_TIMEOUT
        reset, close = loops
        assert close is reset

    def test_an_environment_that_blocks_its_loop_is_closed_on_another(self, monkeypatch):
        monkeypatch.setattr(threads, "GRACE", 0.3)
        released = threading.Event()
        loops = []

        class Blocks(Scripted):
            async def reset(self, row, ctx):
                loops.append(asyncio.get_running_loop())
                released.wait(60)

            async def close(self):
                loops.append(asyncio.get_running_loop())

        try:
            summary = play_one(ScriptedEngine([]), Blocks, turn_timeout=0.2)
        finally:
            released.set()
        assert summary.status == RolloutStatus.ENV_TIMEOUT
        reset, close = loops
        assert close is not reset

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1", [1.0], 1j, np.ones(2), 10**400])
    def test_a_reward_that_is_no_finite_number_excludes_the_rollout(self, value):
        summary = play_one(ScriptedEngine([say()]), row={"results": [Result(reward=value, terminated=True)]})
        assert summary.status == RolloutStatus.INVALID_REWARD

    def test_every_kind_of_number_is_a_reward(self):
        torch = pytest.importorskip("torch")
        values = [1, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)]
        assert [as_number(value) for value in values] == [1.0] * len(values)
        assert math.isnan(as_number(torch.ones(1, 1)))
        assert math.isnan(as_number(torch.ones((), device="meta")))

    def test_rewards_of_all_turns_are_added_and_info_is_kept(self):
        results = [
            Result(reward=0.5, observation="go", info={"a": 1, "b": True}),
            Result(reward=2, terminated=True, info={"a": 3, "note": "not a number"}),
        ]
        summary = play_one(ScriptedEngine(lambda r: say()), row={"results": results})
        assert summary.reward == 2.5
        assert summary.info == {"a": 3.0, "b": 1.0}

    def test_an_info_that_is_no_mapping_excludes_the_rollout(self):
        summary = play_one(ScriptedEngine([say()]), row={"results": [Result(1.0, terminated=True, info=["a"])]})
        assert summary.status == RolloutStatus.ENV_ERROR
        assert "step returned an info of type list" in summary.error

    def test_an_engine_failure_excludes_the_rollout(self):
        def refuses(request):
            raise ValueError("prompt refused")

        summary = play_one(ScriptedEngine(refuses))
        assert summary.status == RolloutStatus.ENGINE_ERROR
        assert "prompt refused" in summary.error

    def test_a_logprob_that_is_not_finite_is_an_engine_failure(self):
        summary = play_one(ScriptedEngine([completion([31], [-math.inf])]))
        assert summary.status == RolloutStatus.ENGINE_ERROR

    def test_generation_that_never_ends_is_cut_by_the_rollouts_limit(self):
        async def forever(request):
            await asyncio.sleep(3600)

        summary = play_one(ScriptedEngine(forever), rollout_timeout=0.2)
        assert summary.status == RolloutStatus.ENGINE_ERROR
        assert "env.rollout_timeout" in summary.error

    def test_the_rollouts_limit_also_ends_a_long_environment_call(self):
        summary = play_one(ScriptedEngine([]), Broken, row={"where": "reset", "how": sleeps}, rollout_timeout=0.2)
        assert summary.status == RolloutStatus.ENV_TIMEOUT
        assert "env.rollout_timeout" in summary.error

    def test_a_dead_engine_is_not_a_rollouts_failure(self):
        def died(request):
            raise EngineDiedError("gone")

        with pytest.raises(EngineDiedError, match="gone"):
            play(make_runner(ScriptedEngine(died), retries=3), num_samples=4)

    def test_without_an_observation_the_rollout_cannot_go_on(self):
        summary = play_one(ScriptedEngine([say()]), row={"results": [Result()]})
        assert summary.status == RolloutStatus.ENV_ERROR

    @pytest.mark.parametrize(("where", "how"), [("step", raises), ("reset", raises), ("step", sleeps), ("none", None)])
    def test_close_is_always_called(self, where, how):
        closed = []

        class Closing(Broken):
            async def close(self):
                closed.append(True)

        play_one(ScriptedEngine([say()]), Closing, row={"where": where, "how": how}, turn_timeout=0.2)
        assert closed == [True]

    def test_a_close_of_the_instance_alone_is_called_too(self):
        closed = []

        class Closing(Scripted):
            def __init__(self):
                self.close = lambda: closed.append(True)

        assert play_one(ScriptedEngine([say()]), Closing).status == RolloutStatus.COMPLETED
        assert closed == [True]

    @pytest.mark.parametrize("how", [raises, sleeps])
    def test_a_failing_close_does_not_change_the_rollout(self, how):
        class Stuck(Scripted):
            async def close(self):
                await how()

        summary = play_one(ScriptedEngine([say()]), Stuck, turn_timeout=0.2)
        assert (summary.status, summary.reward) == (RolloutStatus.COMPLETED, 1.0)


class TestRetries:
    def test_a_failed_rollout_is_run_again_and_its_failures_are_counted(self):
        attempts = []

        class Flaky(Scripted):
            async def reset(self, row, ctx):
                attempts.append(ctx.rollout_id)
                if len(attempts) < 3:
                    raise OSError("not yet")
                return await super().reset(row, ctx)

        summary = play_one(ScriptedEngine([say()]), Flaky, retries=2)
        assert summary.status == RolloutStatus.COMPLETED
        assert summary.failed_attempts == (RolloutStatus.ENV_ERROR, RolloutStatus.ENV_ERROR)
        assert attempts == ["g-0"] * 3

    def test_retries_end(self):
        summary = play_one(ScriptedEngine([]), Broken, row={"where": "reset", "how": raises}, retries=2)
        assert summary.status == RolloutStatus.ENV_ERROR
        assert len(summary.failed_attempts) == 2

    def test_what_the_model_caused_is_not_run_again(self):
        engine = ScriptedEngine([completion([31], finish_reason="length")])
        assert play_one(engine, retries=3).failed_attempts == ()
        assert len(engine.requests) == 1


class Judge(Reward):
    """Scores the length of the text; raises for the rollout in ``broken``."""

    broken: str = ""
    calls: ClassVar[list[str]] = []

    async def score(self, rollout, ctx):
        self.calls.append(rollout.id)
        if rollout.id == self.broken:
            raise TimeoutError("judge")
        return Score(float(rollout.text.count("a")), {"judged": 1})


class TestReward:
    def test_a_failed_scoring_is_repeated_alone_and_then_excludes_only_its_rollout(self):
        class Sandbox(Scripted):
            async def reset(self, row, ctx):
                if ctx.rollout_id == "g-1":
                    raise OSError("sandbox did not start")
                return await super().reset(row, ctx)

        class Flaky(Judge):
            broken, calls = "g-2", []

        engine = ScriptedEngine(lambda r: say("a"))
        runner = make_runner(engine, Sandbox, reward_plugin=Flaky, reward=RewardConfig(retries=1))
        rollouts = play(runner, num_samples=4)
        assert [r.status.value for r in rollouts] == ["completed", "env_error", "reward_error", "completed"]
        assert [r.reward for r in rollouts if r.status.is_scored] == [1.0, 1.0]
        assert Flaky.calls.count("g-2") == 2
        assert len(engine.requests) == 3  # g-1 never sampled, g-2 once

    def test_the_plugins_reward_replaces_the_environments(self):
        summary = play_one(ScriptedEngine([say("aaa")]), reward_plugin=Judge)
        assert (summary.reward, summary.info) == (3.0, {"judged": 1.0})

    def test_a_scoring_that_never_ends_excludes_the_rollout(self):
        class Blocks(Reward):
            async def score(self, rollout, ctx):
                time.sleep(2)

        reward = RewardConfig(retries=0, timeout=0.2)
        summary = play_one(ScriptedEngine([say()]), reward_plugin=Blocks, reward=reward)
        assert summary.status == RolloutStatus.REWARD_ERROR

    def test_a_score_that_is_no_number_excludes_the_rollout(self):
        class Nan(Reward):
            async def score(self, rollout, ctx):
                return math.nan

        assert play_one(ScriptedEngine([say()]), reward_plugin=Nan).status == RolloutStatus.INVALID_REWARD


class TestDeterminism:
    def test_sampling_seeds_depend_on_seed_group_sample_and_turn_only(self):
        def seeds():
            engine = ScriptedEngine(lambda r: say())
            play(make_runner(engine), num_samples=2, results=[GO_ON, STOP])
            return sorted(request.seed for request in engine.requests)

        assert seeds() == seeds()
        assert len(set(seeds())) == 4

    def test_another_attempt_samples_something_else(self):
        engine = ScriptedEngine(lambda r: say())
        play_one(engine, Broken, row={"where": "step", "how": raises}, retries=1)
        first, second = engine.requests
        assert first.seed != second.seed

    def test_a_seed_is_the_same_in_every_process(self):
        # blake2b of repr((42, 'a-0', 1)) in 8 bytes, without its lowest bit.
        digest = hashlib.blake2b(b"(42, 'a-0', 1)", digest_size=8).hexdigest()
        assert stable_seed(42, "a-0", 1) == int(digest, 16) // 2

    def test_rollouts_of_a_group_share_the_environments_seed_and_have_their_own_ids(self):
        contexts = []

        class Watching(Scripted):
            async def reset(self, row, ctx):
                contexts.append(ctx)
                return await super().reset(row, ctx)

        rollouts = play(make_runner(ScriptedEngine(lambda r: say()), Watching), num_samples=3)
        assert [r.id for r in rollouts] == ["g-0", "g-1", "g-2"]
        assert {ctx.rollout_id for ctx in contexts} == {"g-0", "g-1", "g-2"}
        assert len({ctx.seed for ctx in contexts}) == 1

    def test_a_rollout_stays_on_one_engine(self):
        # Each engine says a letter of its own, so a prompt tells which engines answered its rollout before.
        letters = "XYZ"
        engines = [ScriptedEngine(lambda r, letter=letter: say(letter)) for letter in letters]
        play(make_runner(engines), num_samples=6, results=[GO_ON, GO_ON, STOP])
        assert sum(len(engine.requests) for engine in engines) == 18
        for letter, engine in zip(letters, engines, strict=True):
            others = {ord(other) for other in letters if other != letter}
            assert not any(others & set(request.prompt_ids) for request in engine.requests)


def test_a_thread_that_was_blocked_serves_again_when_it_is_free(monkeypatch):
    monkeypatch.setattr(threads, "GRACE", 0.2)
    released = threading.Event()

    async def scenario():
        pool = LoopThreads()
        with Lease(pool) as lease:
            with pytest.raises(CallTimeoutError, match="no answer"):
                await lease.call(released.wait, 60, timeout=0.1)
            blocked = lease._thread
            assert blocked.unresponsive
            assert pool.pick() is not blocked
            assert await lease.call(asyncio.get_running_loop, timeout=1) is not blocked.loop
            released.set()
            while blocked.unresponsive:
                await asyncio.sleep(0.05)
        assert pool.pick() is blocked

    try:
        asyncio.run(asyncio.wait_for(scenario(), 10))
    finally:
        released.set()


def test_calls_share_few_threads_until_they_block_and_then_run_side_by_side():
    meeting = threading.Barrier(16)

    async def call(pool, function, *args):
        with Lease(pool) as lease:
            return await lease.call(function, *args, timeout=20)

    async def scenario():
        pool = LoopThreads()
        loops = await asyncio.gather(*(call(pool, asyncio.get_running_loop) for _ in range(64)))
        assert len(set(loops)) == threads.FEW_THREADS
        # Each blocks its thread until all 16 are there.
        assert sorted(await asyncio.gather(*(call(pool, meeting.wait, 20) for _ in range(16)))) == list(range(16))
        pool.close()

    asyncio.run(scenario())


def test_blocked_threads_are_bounded_and_the_error_says_what_blocks(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 1)
    monkeypatch.setattr(threads, "MAX_BLOCKED_THREADS", 2)
    monkeypatch.setattr(threads, "GRACE", 0.05)
    released = threading.Event()
    ran = []

    async def blocks(pool):
        with Lease(pool) as lease, pytest.raises(CallTimeoutError):
            await lease.call(released.wait, 60, timeout=0.1)

    async def scenario():
        pool = LoopThreads()
        for _ in range(3):
            await blocks(pool)
        with Lease(pool) as lease:
            with pytest.raises(BlockedLoopsError, match="block"):
                await lease.call(ran.append, "withdrawn", timeout=0.1)
            assert len(pool._threads) == 3
            released.set()
            await lease.call(ran.append, "ran", timeout=10)

    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        released.set()
    assert ran == ["ran"]
