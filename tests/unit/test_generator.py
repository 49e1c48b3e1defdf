"""The generator: which prompts are run, which groups make a batch, and what stops a run."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molt_core import ConfigError, RolloutStatus
from molt_core.config import RLConfig
from molt_core.data.prompts import PromptCursor
from molt_core.rollout.actors import RunnerDiedError
from molt_core.rollout.generator import GenerationError, Generator, GeneratorSettings, Group, GroupDispatcher
from molt_core.rollout.tasks import RolloutSummary, SamplingSettings, SegmentInfo

STEPS = st.lists(st.integers(0, 12), min_size=1, max_size=7)


def summary(task, sample, *, reward=1.0, version=0, status=RolloutStatus.COMPLETED, info=None, error="", failed=()):
    segment = SegmentInfo(4, 2, version, version, 2 * version, ((2, 4),))
    return RolloutSummary(
        id=f"{task.group_id}-{sample}",
        group_id=task.group_id,
        reward=reward if status.is_scored else math.nan,
        status=status,
        info=info or {},
        num_turns=1,
        segments=(segment,) if status.is_scored else (),
        data=None,
        seconds=0.0,
        error=error,
        failed_attempts=failed,
    )


class World:
    """A runner whose groups take the given numbers of event-loop turns, with the policy version at their start."""

    def __init__(self, delays=(0,), answer=None):
        self.delays = itertools.cycle(delays)
        self.answer = answer or (lambda task, version: [summary(task, k, version=version) for k in range(2)])
        self.version = 0
        self.in_flight = self.most_in_flight = 0
        self.started = []

    async def run_group(self, task):
        version = self.version
        self.started.append((task.group_id, version))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for _ in range(next(self.delays)):
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        return self.answer(task, version)


def make_generator(world, num_rows, *, cursor=None, episodes=1, version=0, shuffle=False, **options):
    defaults = {"batch_size": 4, "num_samples": 2, "max_in_flight": 4, "max_ahead": 0, "max_staleness": 0, "seed": 0}
    return Generator(
        [{"n": i} for i in range(num_rows)],
        cursor or PromptCursor(num_rows, seed=1, shuffle=shuffle, num_episodes=episodes),
        GroupDispatcher([world]),
        GeneratorSettings(**{**defaults, **options}),
        version=version,
    )


async def run(generator, world, max_batches=10_000, training=()):
    """Drive the generator as the loop does; returns the batches with the version that each was trained at."""
    turns = itertools.cycle(training or (0,))
    batches = []
    async with generator:
        while len(batches) < max_batches and (batch := await generator.next_batch()) is not None:
            batches.append((world.version, batch))
            for _ in range(next(turns)):
                await asyncio.sleep(0)
            world.version += 1
            generator.policy_updated(world.version)
    return batches


def drive(generator, world, **options):
    return asyncio.run(asyncio.wait_for(run(generator, world, **options), 30))


def prompts(batches):
    return [group.id for _, batch in batches for group in batch.groups]


class TestPrompts:
    @pytest.mark.parametrize(
        ("num_rows", "in_flight", "batch_size", "sizes"),
        [
            (100, 8, 8, [8] * 12 + [4]),
            (97, 8, 8, [8] * 12 + [1]),
            (96, 8, 8, [8] * 12),
            (33, 32, 32, [32, 1]),
            (10, 3, 3, [3, 3, 3, 1]),
            (1000, 16, 8, [8] * 125),
            (2, 8, 8, [2]),
        ],
    )
    @pytest.mark.parametrize("ahead", [0, 1])
    def test_every_size_ends_with_each_prompt_once(self, num_rows, in_flight, batch_size, sizes, ahead):
        world = World([3, 0, 1])
        options = {"max_in_flight": in_flight, "batch_size": batch_size, "max_ahead": ahead, "max_staleness": ahead}
        batches = drive(make_generator(world, num_rows, **options), world)
        assert [len(batch.groups) for _, batch in batches] == sizes
        assert sorted(prompts(batches)) == sorted(f"0-{i}" for i in range(num_rows))

    @settings(deadline=None, max_examples=80)
    @given(
        num_rows=st.integers(1, 40),
        episodes=st.integers(1, 3),
        batch_size=st.integers(1, 9),
        extra=st.integers(0, 9),
        ahead=st.integers(0, 3),
        slack=st.integers(0, 2),
        delays=STEPS,
        training=STEPS,
    )
    @example(num_rows=2, episodes=3, batch_size=1, extra=3, ahead=3, slack=0, delays=[0, 3], training=[0])
    def test_each_prompt_once_per_episode_and_nothing_too_old(
        self, num_rows, episodes, batch_size, extra, ahead, slack, delays, training
    ):
        world = World(delays)
        options = {
            "batch_size": batch_size,
            "max_in_flight": batch_size + extra,
            "max_ahead": ahead,
            "max_staleness": ahead + slack,
        }
        batches = drive(
            make_generator(world, num_rows, episodes=episodes, shuffle=True, **options), world, training=training
        )
        assert sorted(prompts(batches)) == sorted(f"{e}-{i}" for e in range(episodes) for i in range(num_rows))
        assert all(len(batch.groups) == batch_size for _, batch in batches[:-1])
        assert all(version - group.oldest_version <= ahead + slack for version, b in batches for group in b.groups)
        assert world.most_in_flight <= batch_size + extra
        assert len(world.started) == num_rows * episodes  # nothing was thrown away

    @settings(deadline=None, max_examples=60)
    @given(
        num_rows=st.integers(1, 30),
        batch_size=st.integers(1, 6),
        ahead=st.integers(0, 2),
        stop_after=st.integers(0, 6),
        delays=STEPS,
        training=STEPS,
    )
    def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
        self, num_rows, batch_size, ahead, stop_after, delays, training
    ):
        options = {
            "batch_size": batch_size,
            "max_in_flight": batch_size + 2,
            "max_ahead": ahead,
            "max_staleness": ahead,
        }
        world = World(delays)
        first = make_generator(world, num_rows, episodes=2, **options)
        before = drive(first, world, max_batches=stop_after, training=training)
        state = json.loads(json.dumps(first.state()))

        resumed = make_generator(world, num_rows, episodes=2, version=world.version, **options)
        resumed.load(state)
        after = drive(resumed, world, training=training)
        everything = sorted(f"{e}-{i}" for e in range(2) for i in range(num_rows))
        assert sorted(prompts(before) + prompts(after)) == everything

    def test_what_was_under_way_is_run_first_after_a_resume(self):
        world = World([0, 0, 0, 0, 50])
        options = {"batch_size": 2, "max_in_flight": 6, "max_ahead": 1, "max_staleness": 2}
        first = make_generator(world, 20, **options)
        assert prompts(drive(first, world, max_batches=2)) == ["0-0", "0-1", "0-2", "0-3"]
        world.started.clear()
        resumed = make_generator(world, 20, version=2, **options)
        resumed.load(first.state())
        drive(resumed, world, max_batches=1)
        assert world.started[0] == ("0-4", 2)

    @given(delays=STEPS)
    @settings(deadline=None, max_examples=30)
    def test_synchronous_batches_are_the_prompts_in_order_and_nothing_crosses_a_refit(self, delays):
        world = World(delays)

        async def scenario():
            order = []
            async with make_generator(world, 11, batch_size=4, max_in_flight=3) as generator:
                while (batch := await generator.next_batch()) is not None:
                    assert world.in_flight == 0
                    order.append([group.id for group in batch.groups])
                    assert {r.oldest_version for g in batch.groups for r in g.rollouts} == {world.version}
                    world.version += 1
                    generator.policy_updated(world.version)
            return order

        expected = [[f"0-{i}" for i in part] for part in (range(4), range(4, 8), range(8, 11))]
        assert asyncio.run(scenario()) == expected

    def test_a_batch_may_be_asked_for_before_the_last_one_is_trained(self):
        world = World()

        async def scenario():
            async with make_generator(world, 30, max_in_flight=40, max_ahead=1, max_staleness=1) as generator:
                await generator.next_batch()
                await generator.next_batch()
                third = asyncio.create_task(generator.next_batch())
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not third.done()
                assert len(world.started) == 8  # two batches, until the first is trained
                world.version = 1
                generator.policy_updated(1)
                batch = await third
                assert [group.oldest_version for group in batch.groups] == [1] * 4

        asyncio.run(asyncio.wait_for(scenario(), 10))


class TestStaleness:
    def test_a_slow_group_is_waited_for_when_the_next_batch_could_not_take_it(self):
        world = World([30, *[0] * 100])
        options = {"max_in_flight": 8, "max_ahead": 1, "max_staleness": 1}
        batches = drive(make_generator(world, 12, **options), world)
        assert "0-0" in [group.id for group in batches[1][1].groups]
        assert all(version - group.oldest_version <= 1 for version, batch in batches for group in batch.groups)

    def test_with_slack_a_batch_goes_without_its_slowest_group(self):
        world = World([6, *[0] * 100])
        options = {"max_in_flight": 8, "max_ahead": 1, "max_staleness": 3}
        batches = drive(make_generator(world, 12, **options), world, training=[2])
        assert "0-0" not in [group.id for group in batches[0][1].groups]
        assert sum(batch.stats["stale_groups"] for _, batch in batches) == 0

    def test_a_group_that_is_too_old_is_not_trained_and_its_prompt_is_run_again(self):
        # One group claims tokens of a policy one update older than the bound.
        def answer(task, version):
            seen[task.group_id] += 1
            lag = 2 if task.group_id == "0-5" and seen[task.group_id] == 1 else 0
            return [summary(task, k, version=version - lag) for k in range(2)]

        seen = Counter()
        world = World(answer=answer)
        world.version = 5
        batches = drive(make_generator(world, 8, version=5, max_ahead=1, max_staleness=1), world)
        assert sorted(prompts(batches)) == sorted(f"0-{i}" for i in range(8))
        assert seen["0-5"] == 2
        assert sum(batch.stats["stale_groups"] for _, batch in batches) == 1
        assert all(version - group.oldest_version <= 1 for version, batch in batches for group in batch.groups)

    def test_batches_handed_out_and_not_yet_trained_count_towards_staleness(self):
        def answer(task, version):
            seen[task.group_id] += 1
            lag = 1 if task.group_id == "0-5" and seen["0-5"] == 1 else 0
            return [summary(task, 0, version=version - lag)]

        seen = Counter()
        world = World(answer=answer)
        world.version = 5

        async def scenario():
            async with make_generator(world, 8, version=5, max_ahead=1, max_staleness=1) as generator:
                await generator.next_batch()
                batch = await generator.next_batch()  # will be trained at version 6
                assert [group.oldest_version for group in batch.groups] == [5] * 4
                assert batch.stats["stale_groups"] == 1

        asyncio.run(asyncio.wait_for(scenario(), 10))

    @pytest.mark.parametrize(
        ("options", "ahead", "staleness"),
        [
            ({}, 1, 1),
            ({"async_queue_size": 3}, 3, 3),
            ({"async_queue_size": 3, "max_staleness": 1}, 1, 1),
            ({"max_staleness": 4}, 1, 4),
            ({"force_sync_mode": True}, 0, 0),
        ],
    )
    def test_configuration(self, options, ahead, staleness):
        settings = GeneratorSettings.from_config(RLConfig(train=options))
        assert (settings.max_ahead, settings.max_staleness) == (ahead, staleness)
        assert settings.max_in_flight == settings.batch_size == 8


def scores(values, **infos):
    """An answer whose rollouts have these rewards and infos."""

    def answer(task, version):
        return [
            summary(task, k, reward=value, version=version, info={key: infos[key][k] for key in infos})
            for k, value in enumerate(values)
        ]

    return answer


G1 = scores([0.5, 0.5, 0.5, 0.5])
G2 = scores([0, 0, 1, 1], acc=[0, 0, 1, 1])
G3 = scores([0.1, 0.0, 0.05, 0.1], acc=[0, 0, 0, 0])
G4 = scores([0.9, 1.0, 0.95, 1.0], acc=[1, 1, 1, 1])
G5 = scores([0.30000000000000004, 0.3, 0.3, 0.3])


class TestFilter:
    @pytest.mark.parametrize(
        ("metric", "answers", "kept"),
        [
            ("reward", [G1, G2, G3, G4, G5], ["0-1", "0-2", "0-3"]),
            ("acc", [G2, G3, G4], ["0-0"]),
        ],
    )
    def test_groups_whose_metric_does_not_vary_are_dropped(self, metric, answers, kept):
        world = World(answer=lambda task, version: answers[int(task.group_id[2:])](task, version))
        batches = drive(make_generator(world, len(answers), filter_metric=metric, batch_size=2, num_samples=4), world)
        assert prompts(batches) == kept
        assert sum(batch.stats["filtered_groups"] for _, batch in batches) == pytest.approx(len(answers) - len(kept))

    def test_groups_whose_mean_is_out_of_the_range_are_dropped_too(self):
        # Means 0.5 (does not vary), 0.5, 0.0625, 0.9625.
        answers = [G1, G2, G3, G4]
        world = World(answer=lambda task, version: answers[int(task.group_id[2:])](task, version))
        generator = make_generator(world, len(answers), filter_metric="reward", filter_range=(0.0625, 1), batch_size=2)
        assert prompts(drive(generator, world)) == ["0-1", "0-3"]

    def test_when_every_prompt_is_filtered_out_the_run_stops_and_says_so(self):
        world = World(answer=G1)
        with pytest.raises(GenerationError, match=r"none of the 3 groups.*3 because reward does not vary"):
            drive(make_generator(world, 3, filter_metric="reward", num_samples=4), world)

    def test_incomplete_groups_are_replaced_although_what_they_have_varies(self):
        bad = failing(lambda group, k: k == 3, num_samples=4)

        def answer(task, version):
            made = G2(task, version)
            return [*made[:3], bad(task, version)[3]] if task.group_id == "0-1" else made

        world = World(answer=answer)
        batches = drive(make_generator(world, 9, filter_metric="reward", num_samples=4), world)
        assert prompts(batches) == [f"0-{i}" for i in (0, 2, 3, 4, 5, 6, 7, 8)]
        assert batches[0][1].stats["dropped_groups"] == 1
        assert sum(batch.stats["filtered_groups"] for _, batch in batches) == 0

    def test_dropped_groups_are_replaced_by_further_prompts(self):
        answers = [G1, G2]
        world = World(answer=lambda task, version: answers[int(task.group_id[2:]) % 2](task, version))
        batches = drive(make_generator(world, 16, filter_metric="reward"), world)
        assert [len(batch.groups) for _, batch in batches] == [4, 4]

    def test_endless_filtering_stops_with_the_counts(self):
        world = World(answer=G1)
        generator = make_generator(world, 10_000, filter_metric="reward", max_filter_tries=3)
        with pytest.raises(
            GenerationError,
            match=r"dropped 12 groups for one batch and kept 0 of the 4 it needs; 12 because reward does not vary "
            r"within the group: choose prompts .*; or raise --algo.dynamic_filtering_max_tries above 3$",
        ):
            drive(generator, world)

    def test_incomplete_groups_count_towards_the_same_limit_and_are_told_apart(self):
        # Of every eight groups one is good, two do not vary and five lack a rollout; the batch of four is not full
        # when 3 x 4 are dropped: after 8 dispatched groups 7 are, and after 5 more (2 filtered, 3 incomplete) 12.
        bad = failing(lambda group, k: k == 3, num_samples=4)
        answers = [G2, G1, G1, bad, bad, bad, bad, bad]
        world = World(answer=lambda task, version: answers[int(task.group_id[2:]) % 8](task, version))
        options = {"filter_metric": "reward", "num_samples": 4, "max_filter_tries": 3, "max_in_flight": 1}
        generator = make_generator(world, 10_000, **options)
        with pytest.raises(
            GenerationError,
            match=r"dropped 12 groups for one batch and kept 2 of the 4 it needs; 4 because reward does not vary.*"
            r"; 8 with fewer than 4 scored rollouts: make the failures rarer .*8 of 8.*sandbox did not start",
        ):
            drive(generator, world)
        assert len(world.started) == 14

    def test_the_limit_is_per_batch(self):
        # Three of four groups lack a rollout, so that four batches of four drop 48; 16 are allowed for each.
        bad = failing(lambda group, k: k == 3, num_samples=4)
        answers = [bad, bad, bad, G2]
        world = World(answer=lambda task, version: answers[int(task.group_id[2:]) % 4](task, version))
        options = {"filter_metric": "reward", "num_samples": 4, "max_in_flight": 1, "batch_size": 4}
        batches = drive(make_generator(world, 64, max_filter_tries=4, **options), world)
        assert [batch.stats["dropped_groups"] for _, batch in batches] == [12, 12, 12, 12]

    def test_a_metric_that_is_not_reported_is_named(self):
        world = World(answer=scores([0.0, 1.0], length=[1, 2]))
        with pytest.raises(ConfigError, match=r"'acc'.*there is: reward, length"):
            drive(make_generator(world, 8, filter_metric="acc"), world)


def failing(bad, message="sandbox did not start", status=RolloutStatus.ENV_ERROR, num_samples=2):
    """An answer in which the samples for which ``bad(group, sample)`` holds failed."""

    def answer(task, version):
        return [
            summary(task, k, version=version, status=status, error=message)
            if bad(int(task.group_id[2:]), k)
            else summary(task, k, version=version)
            for k in range(num_samples)
        ]

    return answer


class TestFailures:
    def test_excluded_rollouts_are_counted_by_reason_and_their_group_goes_on(self):
        world = World(answer=failing(lambda group, k: group == 1 and k == 0))
        ((_, batch),) = drive(make_generator(world, 4), world)
        assert [len(group.scored) for group in batch.groups] == [2, 1, 2, 2]
        assert batch.excluded == {"env_error": 1}

    def test_failed_attempts_are_counted_too(self):
        def answer(task, version):
            failed = (RolloutStatus.ENV_TIMEOUT,) if task.group_id == "0-0" else ()
            return [summary(task, 0, failed=failed)]

        world = World(answer=answer)
        ((_, batch),) = drive(make_generator(world, 4, max_staleness=9), world)
        assert batch.excluded == {"env_timeout": 1}
        assert batch.stats["retried_rollouts"] == 1

    def test_a_group_with_too_few_scored_rollouts_is_dropped_and_replaced(self):
        world = World(answer=failing(lambda group, k: group == 1 and k == 0))
        batches = drive(make_generator(world, 9, min_scored=2), world)
        assert prompts(batches) == [f"0-{i}" for i in (0, 2, 3, 4, 5, 6, 7, 8)]
        assert batches[0][1].stats["dropped_groups"] == 1

    def test_replacing_incomplete_groups_is_limited_without_filtering_too(self):
        world = World(answer=failing(lambda group, k: k == 0))
        generator = make_generator(world, 10_000, min_scored=2, max_filter_tries=5)
        with pytest.raises(GenerationError, match=r"dropped 20 groups.*; 20 with fewer than 2 scored.*did not start"):
            drive(generator, world)

    def test_when_everything_fails_the_run_stops_with_the_most_frequent_error(self):
        world = World(answer=failing(lambda group, k: True))
        with pytest.raises(GenerationError, match=r"12 groups in a row.*24 of 24.*sandbox did not start"):
            drive(make_generator(world, 1000), world)

    def test_when_everything_fails_and_the_prompts_end_first_the_run_stops_too(self):
        world = World(answer=failing(lambda group, k: True))
        with pytest.raises(GenerationError, match=r"none of the 3 groups.*sandbox did not start"):
            drive(make_generator(world, 3), world)

    def test_a_dead_runner_stops_the_run(self):
        def dies(task, version):
            raise RunnerDiedError("gone")

        world = World(answer=dies)
        with pytest.raises(RunnerDiedError):
            drive(make_generator(world, 100), world)

    def test_leaving_cancels_what_is_under_way(self):
        world = World([10**9])

        async def scenario():
            async with make_generator(world, 8) as generator:
                waiting = asyncio.create_task(generator.next_batch())
                await asyncio.sleep(0.01)
                assert world.in_flight == 4
                waiting.cancel()
            assert world.in_flight == 0

        asyncio.run(asyncio.wait_for(scenario(), 10))


class TestDispatcher:
    def test_evaluation_runs_each_row_once_in_order(self):
        worlds = [World([3, 0, 1]), World([0, 2])]
        dispatcher = GroupDispatcher(worlds, max_in_flight=3)
        rows = [{"n": i} for i in range(7)]
        groups = asyncio.run(dispatcher.run_all(rows, "eval0", 2, SamplingSettings(temperature=0.0), seed=1))
        assert [group.id for group in groups] == [f"eval0-{i}" for i in range(7)]
        assert sum(world.most_in_flight for world in worlds) <= 4
        assert all(isinstance(group, Group) and len(group.rollouts) == 2 for group in groups)

    def test_groups_go_to_the_runner_that_has_the_fewest(self):
        worlds = [World([5]), World([5])]
        generator = Generator(
            [{}] * 8,
            PromptCursor(8, seed=0, shuffle=False, num_episodes=1),
            GroupDispatcher(worlds),
            GeneratorSettings(8, 2, 8, 0, 0, seed=0),
        )
        drive(generator, World())
        assert [len(world.started) for world in worlds] == [4, 4]
