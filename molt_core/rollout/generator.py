"""The generator: keeps groups in flight, and assembles batches that are fresh enough to be trained."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from molt_core.errors import ConfigError, RunError
from molt_core.rollout.pool import LeastLoaded
from molt_core.rollout.tasks import GroupTask, RolloutSummary, SamplingSettings

if TYPE_CHECKING:
    from molt_core.config.rl import RLConfig

logger = logging.getLogger("molt")

FAILED_BATCHES = 3
"""As many batches' worth of groups may fail in a row, without one scored rollout, before the run stops."""
SAME = 1e-6
"""A metric that varies by no more than this within a group carries no signal."""


class GenerationError(RunError):
    """No more usable groups can be had; the message says why."""


class RunsGroups(Protocol):
    """A runner, local or remote."""

    async def run_group(self, task: GroupTask) -> list[RolloutSummary]: ...


class Cursor(Protocol):
    """Where the prompts come from (`molt_core.data.prompts.PromptCursor`)."""

    def next(self) -> tuple[int, int] | None: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt, those without a score included."""

    id: str
    rollouts: tuple[RolloutSummary, ...]

    @property
    def scored(self) -> list[RolloutSummary]:
        return [rollout for rollout in self.rollouts if rollout.status.is_scored]

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among the tokens that would be trained."""
        return min(rollout.oldest_version for rollout in self.scored)


@dataclass(frozen=True, slots=True)
class GeneratedBatch:
    """Groups to be trained in one step, in the order of their prompts' dispatch.

    ``excluded``: failed attempts at a rollout by status, since the last batch. ``stats``: numbers for the metrics.
    """

    groups: tuple[Group, ...]
    excluded: Mapping[str, int]
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """``max_ahead``: batches that may be under way besides the one that is trained next. Staleness is in updates.

    ``min_scored``: a group with fewer scored rollouts is dropped; with filtering, any that lacks one, since what it
    lacks might have made the difference. ``filter_metric``: "reward", a key of ``info``, or None for no filtering;
    ``filter_range``: bounds that its mean over a group must lie strictly between; ``max_filter_tries``: batches' worth
    of groups that may be dropped for one batch, filtered or with too few scored rollouts.
    """

    batch_size: int
    num_samples: int
    max_in_flight: int
    max_ahead: int
    max_staleness: int
    seed: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    min_scored: int = 1
    filter_metric: str | None = None
    filter_range: tuple[float, float] | None = None
    max_filter_tries: int = 20

    @property
    def fewest_scored(self) -> int:
        """Scored rollouts that a group needs to be trained."""
        return self.num_samples if self.filter_metric is not None else max(self.min_scored, 1)

    @classmethod
    def from_config(cls, config: RLConfig, min_scored: int = 1) -> GeneratorSettings:
        """Running ahead further than the staleness bound would only make groups that are thrown away."""
        train, rollout = config.train, config.rollout
        ahead = 0 if train.force_sync_mode else train.async_queue_size
        staleness = ahead if train.max_staleness is None else train.max_staleness
        return cls(
            batch_size=rollout.batch_size,
            num_samples=rollout.n_samples_per_prompt,
            max_in_flight=rollout.vllm_generate_batch_size or rollout.batch_size,
            max_ahead=min(ahead, staleness),
            max_staleness=staleness,
            seed=train.seed,
            sampling=SamplingSettings(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens),
            min_scored=min_scored,
            filter_metric=config.algo.dynamic_filtering_metric if config.algo.dynamic_filtering_enable else None,
            filter_range=config.algo.dynamic_filtering_range,
            max_filter_tries=config.algo.dynamic_filtering_max_tries,
        )


class GroupDispatcher:
    """Sends groups to the runner that has the fewest."""

    def __init__(self, runners: Sequence[RunsGroups], max_in_flight: int = 64) -> None:
        """``max_in_flight``: groups that ``run_all`` has under way at once."""
        self._balance = LeastLoaded(runners)
        self._max_in_flight = max_in_flight

    async def run(self, task: GroupTask) -> list[RolloutSummary]:
        with self._balance.hold() as runner:
            return await runner.run_group(task)

    async def run_all(
        self,
        rows: Sequence[Mapping[str, Any]],
        prefix: str,
        num_samples: int,
        sampling: SamplingSettings,
        seed: int,
    ) -> list[Group]:
        """One group per row, in the rows' order, for evaluation. Group ids are ``{prefix}-{row index}``."""
        places = asyncio.Semaphore(self._max_in_flight)

        async def run_one(index: int, row: Mapping[str, Any]) -> Group:
            task = GroupTask(f"{prefix}-{index}", row, num_samples, seed, sampling, is_eval=True, row_index=index)
            async with places:
                return Group(task.group_id, tuple(await self.run(task)))

        groups = [asyncio.create_task(run_one(index, row)) for index, row in enumerate(rows)]
        try:
            return list(await asyncio.gather(*groups))
        finally:
            for group in groups:
                group.cancel()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A prompt under way. ``order`` counts dispatches; ``version`` is the policy's at dispatch."""

    order: int
    prompt: tuple[int, int]
    version: int


class Generator:
    """Hands out batches for training; lives on the driver's event loop. An asynchronous context manager.

    Groups are dispatched while fewer than (batches trained + max_ahead + 1) x batch_size groups are or were under way.
    A batch takes finished groups, the first dispatched first. A group that would be too old for the next batch is
    waited for, so that long rollouts are not lost; a bound on staleness above ``max_ahead`` lets a batch go without its
    slowest groups. One that is too old all the same is run again.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        cursor: Cursor,
        dispatcher: GroupDispatcher,
        settings: GeneratorSettings,
        version: int = 0,
    ) -> None:
        """``version``: of the policy that the engines have now. Nothing is dispatched before the first next_batch."""
        self._rows, self._cursor, self._dispatcher, self._settings = rows, cursor, dispatcher, settings
        self._version = version
        self._again: deque[tuple[int, int]] = deque()
        self._flying: dict[_Flight, asyncio.Task[None]] = {}
        self._ready: dict[_Flight, Group] = {}
        self._num_dispatched = self._num_taken = self._num_batches = self._num_trained = 0
        self._started = self._exhausted = False
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._failed_in_a_row = 0
        self._messages: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._state = self._current_state()

    async def __aenter__(self) -> Generator:
        return self

    async def __aexit__(self, *_: object) -> None:
        flights = list(self._flying.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def next_batch(self) -> GeneratedBatch | None:
        """The next batch; the last one may be smaller; None after it.

        Raises GenerationError when too many groups fail in a row or are dropped for one batch, ActorDiedError when a
        process is gone, and ConfigError when the filter's metric is not reported.
        """
        self._started = True
        began = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            self._drop_stale()
            self._dispatch()
            batch = self._complete_batch()
            if batch is not None:
                return self._hand_out(batch, time.monotonic() - began)
            if self._exhausted and not self._flying:
                return self._finish(time.monotonic() - began)
            self._changed.clear()
            await self._changed.wait()

    def policy_updated(self, version: int) -> None:
        """To be called once per batch handed out, after its refit; ``version``: the policy's that samples now."""
        self._version = version
        self._num_trained += 1
        if self._started and self._error is None:
            self._dispatch()
        self._changed.set()

    def state(self) -> dict[str, Any]:
        """For JSON: goes on right behind the last batch handed out, with what was under way then first."""
        return self._state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, before the first batch."""
        assert not self._started
        self._cursor.load(state["cursor"])
        self._again = deque((int(episode), int(row)) for episode, row in state["untrained"])
        self._state = self._current_state()

    def _current_state(self) -> dict[str, Any]:
        under_way = sorted([*self._flying, *self._ready], key=lambda flight: flight.order)
        untrained = [*self._again, *(flight.prompt for flight in under_way)]
        return {"cursor": self._cursor.state(), "untrained": [list(prompt) for prompt in untrained]}

    def _dispatch(self) -> None:
        """Send out as many prompts as the limits allow."""
        settings = self._settings
        allowed = (self._num_trained + settings.max_ahead + 1) * settings.batch_size - self._num_taken
        while len(self._flying) < settings.max_in_flight and len(self._flying) + len(self._ready) < allowed:
            prompt = self._again.popleft() if self._again else self._cursor.next()
            if prompt is None:
                self._exhausted = True
                return
            flight = _Flight(self._num_dispatched, prompt, self._version)
            self._num_dispatched += 1
            self._flying[flight] = asyncio.create_task(self._fly(flight))

    async def _fly(self, flight: _Flight) -> None:
        episode, row = flight.prompt
        settings = self._settings
        task = GroupTask(
            f"{episode}-{row}",
            self._rows[row],
            settings.num_samples,
            settings.seed,
            settings.sampling,
            row_index=row,
        )
        try:
            rollouts = await self._dispatcher.run(task)
            group = Group(task.group_id, tuple(rollouts))
            if self._is_usable(group):
                self._ready[flight] = group
        except Exception as error:
            self._error = self._error or error
        finally:
            del self._flying[flight]
            self._changed.set()
        if self._error is None:
            self._dispatch()

    def _is_usable(self, group: Group) -> bool:
        """Count the failures of a finished group, and decide whether it can be trained."""
        for rollout in group.rollouts:
            self._counts["retried_rollouts"] += len(rollout.failed_attempts)
            self._excluded.update(status.value for status in rollout.failed_attempts)
            if not rollout.status.is_scored:
                self._excluded[rollout.status.value] += 1
                self._messages[rollout.error] += 1
        scored = group.scored
        self._failed_in_a_row = 0 if scored else self._failed_in_a_row + 1
        if self._failed_in_a_row >= FAILED_BATCHES * self._settings.batch_size:
            raise GenerationError(
                f"{self._failed_in_a_row} groups in a row had no scored rollout; {self._common_error()}"
            )
        metric = self._settings.filter_metric
        if len(scored) >= self._settings.fewest_scored and (metric is None or self._has_signal(scored, metric)):
            return True
        self._counts["filtered_groups" if len(scored) >= self._settings.fewest_scored else "dropped_groups"] += 1
        self._limit_replacements()
        return False

    def _limit_replacements(self) -> None:
        """GenerationError when so many groups were replaced since the last batch that all prompts might go this way."""
        settings = self._settings
        filtered, incomplete = self._counts["filtered_groups"], self._counts["dropped_groups"]
        if filtered + incomplete < settings.max_filter_tries * settings.batch_size:
            return
        tries = f"; or raise --algo.dynamic_filtering_max_tries above {settings.max_filter_tries}"
        raise GenerationError(
            f"dropped {filtered + incomplete} groups for one batch and kept {len(self._ready)} of the "
            f"{settings.batch_size} it needs; {self._why_dropped()}"
            f"{tries if settings.filter_metric is not None else ''}"
        )

    def _why_dropped(self) -> str:
        """Why groups were dropped since the last batch, and what to change."""
        settings = self._settings
        filtered, incomplete = self._counts["filtered_groups"], self._counts["dropped_groups"]
        reasons = []
        if filtered:
            out = ", or its mean is out of --algo.dynamic_filtering_range" if settings.filter_range else ""
            reasons.append(
                f"{filtered} because {settings.filter_metric} does not vary within the group{out}: choose prompts that "
                "the model answers right now and then"
            )
        if incomplete:
            reasons.append(
                f"{incomplete} with fewer than {settings.fewest_scored} scored rollouts: make the failures rarer "
                f"({self._common_error()})"
            )
        return "; ".join(reasons)

    def _has_signal(self, scored: Sequence[RolloutSummary], metric: str) -> bool:
        """Whether the metric varies within the group, and its mean lies strictly between the bounds."""
        for rollout in scored:
            if metric != "reward" and metric not in rollout.info:
                raise ConfigError(
                    f"rollout {rollout.id} reports no {metric!r}, which --algo.dynamic_filtering_metric asks for; "
                    f"there is: {', '.join(['reward', *sorted(rollout.info)])}"
                )
        values = [rollout.reward if metric == "reward" else rollout.info[metric] for rollout in scored]
        varies = max(values) - min(values) > SAME
        low, high = self._settings.filter_range or (-math.inf, math.inf)
        return varies and low < sum(values) / len(values) < high

    def _common_error(self) -> str:
        message, count = max(self._messages.items(), key=lambda item: item[1], default=("unknown", 0))
        return f"most frequent error ({count} of {sum(self._messages.values())}): {message}"

    @property
    def _version_at_training(self) -> int:
        """The policy version when the next batch is trained: the batches handed out before it come first."""
        return self._version + self._num_batches - self._num_trained

    def _drop_stale(self) -> None:
        """Send groups that are too old for the next batch back to the prompts."""
        oldest = self._version_at_training - self._settings.max_staleness
        stale = [flight for flight, group in self._ready.items() if group.oldest_version < oldest]
        for flight in stale:
            del self._ready[flight]
            self._again.append(flight.prompt)
        self._counts["stale_groups"] += len(stale)

    def _complete_batch(self) -> list[_Flight] | None:
        """The next batch if it is complete, and if no group would become too old while it is trained."""
        size = self._settings.batch_size
        batch = sorted(self._ready, key=lambda flight: flight.order)[:size]
        if len(batch) < size:
            return None
        rest = sorted({*self._ready, *self._flying}.difference(batch), key=lambda flight: flight.order)
        overtakes = rest and rest[0].order < batch[-1].order
        return None if overtakes and not self._can_take_later(rest) else batch

    def _can_take_later(self, flights: Sequence[_Flight]) -> bool:
        """Whether the batches behind the next one can take these groups before they are too old."""
        versions = sorted(self._ready[f].oldest_version if f in self._ready else f.version for f in flights)
        first = self._version_at_training + 1 - self._settings.max_staleness
        return all(version >= first + i // self._settings.batch_size for i, version in enumerate(versions))

    def _hand_out(self, batch: Sequence[_Flight], seconds: float) -> GeneratedBatch:
        groups = tuple(self._ready.pop(flight) for flight in batch)
        self._num_taken += len(groups)
        self._num_batches += 1
        self._state = self._current_state()
        keys = ("dropped_groups", "filtered_groups", "stale_groups", "retried_rollouts")
        stats: dict[str, float] = {key: self._counts[key] for key in keys}
        stats |= {"seconds_waiting": seconds, "groups_in_flight": len(self._flying), "groups_ready": len(self._ready)}
        excluded = dict(self._excluded)
        self._counts.clear()
        self._excluded.clear()
        self._messages.clear()
        return GeneratedBatch(groups, excluded, stats)

    def _finish(self, seconds: float) -> GeneratedBatch | None:
        """All prompts are used up: the rest, if there is any."""
        if self._ready:
            return self._hand_out(sorted(self._ready, key=lambda flight: flight.order), seconds)
        dropped = self._counts["filtered_groups"] + self._counts["dropped_groups"]
        if dropped and not self._num_batches:
            raise GenerationError(f"none of the {dropped} groups can be trained; {self._why_dropped()}")
        return None
