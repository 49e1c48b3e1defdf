"""The runner: plays groups of rollouts, an environment against an engine, and turns every ending into a status."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.agents.env import Action, Env, EnvContext, Message, Result
from molt_core.agents.reward import Reward, Score
from molt_core.contract import Rollout, RolloutStatus, Segment, StoredRollout, Turn
from molt_core.data.overflow import OverflowReport, fit_prompt, grant_new_tokens
from molt_core.rollout.actors import EngineDiedError, RunnerDiedError, call_actor
from molt_core.rollout.engine import Completion, EngineRequest
from molt_core.rollout.pool import EnginePool, GeneratesTokens
from molt_core.rollout.threads import CallTimeoutError, Lease, LoopThreads

if TYPE_CHECKING:
    from molt_core.chat.template import ChatTemplate
    from molt_core.config.rl import EnvConfig, RewardConfig, RLConfig
    from molt_core.plugins import PluginSpec

logger = logging.getLogger("molt")

MAX_CONCURRENT_GROUPS = 1_000_000
"""Calls that one runner actor may hold; how many there are is up to the generator."""

CLOSE_SECONDS = 3.0
"""How long the end of a run waits for environments to close."""

MAX_CACHED_PROMPTS = 256
"""First observations whose token ids are kept."""

_RUN_AGAIN = (RolloutStatus.ENGINE_ERROR, RolloutStatus.ENV_ERROR, RolloutStatus.ENV_TIMEOUT)
"""Failures that another attempt may not have. A failed scoring is repeated by itself, without sampling again."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample. ``max_new_tokens`` per turn; None: what the context leaves."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One prompt to be run ``num_samples`` times. ``group_id`` and ``seed`` together determine all sampling seeds."""

    group_id: str
    row: Mapping[str, Any]
    num_samples: int
    seed: int
    sampling: SamplingSettings = SamplingSettings()
    is_eval: bool = False
    row_index: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the controller needs to know of a segment. ``length``: T, all tokens.

    ``action_ranges``: [start, end) of each run of sampled tokens on the token axis. ``version_sum``: sum of the policy
    versions of the sampled tokens. Without any, the oldest and newest version are -1.
    """

    length: int
    num_actions: int
    oldest_version: int
    newest_version: int
    version_sum: int
    action_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segment: Segment) -> SegmentInfo:
        edges = np.flatnonzero(np.diff(segment.action_mask, prepend=False, append=False)).tolist()
        versions = segment.versions[segment.action_mask]
        return cls(
            length=len(segment.ids),
            num_actions=len(versions),
            oldest_version=int(versions.min()) if len(versions) else -1,
            newest_version=int(versions.max()) if len(versions) else -1,
            version_sum=int(versions.sum(dtype=np.int64)),
            action_ranges=tuple(zip(edges[::2], edges[1::2], strict=True)),
        )


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A rollout without its tokens; ``data`` says where the Rollout is.

    ``reward`` is NaN unless the status is scored. ``failed_attempts``: how earlier attempts of this rollout ended.
    ``terminated``: the environment ended the episode.
    """

    id: str
    group_id: str
    reward: float
    status: RolloutStatus
    info: Mapping[str, float]
    num_turns: int
    segments: tuple[SegmentInfo, ...]
    data: StoredRollout
    seconds: float
    error: str = ""
    failed_attempts: tuple[RolloutStatus, ...] = ()
    terminated: bool = False

    @classmethod
    def of(cls, rollout: Rollout, data: StoredRollout, failed_attempts: Sequence[RolloutStatus] = ()) -> RolloutSummary:
        return cls(
            id=rollout.id,
            group_id=rollout.group_id,
            reward=rollout.reward,
            status=rollout.status,
            info=rollout.info,
            num_turns=rollout.num_turns,
            segments=tuple(SegmentInfo.of(segment) for segment in rollout.segments),
            data=data,
            seconds=rollout.seconds,
            error=rollout.error,
            failed_attempts=tuple(failed_attempts),
            terminated=rollout.terminated,
        )

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among its sampled tokens; it must have one."""
        return min(segment.oldest_version for segment in self.segments if segment.num_actions)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What a runner process needs to know of the configuration."""

    plugins: PluginSpec
    env: EnvConfig
    reward: RewardConfig
    max_len: int
    max_prompt_len: int
    overflow: str
    chat_template: str
    model: str
    trust_remote_code: bool = False

    @classmethod
    def from_config(cls, config: RLConfig, plugins: PluginSpec) -> RunnerSettings:
        return cls(
            plugins=plugins,
            env=config.env,
            reward=config.reward,
            max_len=config.data.max_len,
            max_prompt_len=config.data.max_prompt_len or config.data.max_len - 1,
            overflow=config.data.overflow,
            chat_template=config.data.chat_template,
            model=config.actor.model_name_or_path,
            trust_remote_code=config.fsdp.trust_remote_code,
        )


class _Failed(Exception):
    """A rollout cannot go on."""

    def __init__(self, status: RolloutStatus, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class _Play:
    """A rollout while it is played."""

    id: str
    task: GroupTask
    attempt: int
    sample: int
    ctx: EnvContext
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    info: dict[str, float] = field(default_factory=dict)
    is_cut: bool = False
    terminated: bool = False
    ids: list[int] = field(default_factory=list)
    deadline: float = math.inf


class Runner:
    """Runs environments. One instance of the environment per rollout; a failing rollout never harms another.

    Users' code runs on event loops of its own (threads.py), every call under a time limit. A reward is instantiated
    once per loop. What blocks the interpreter itself, without releasing its lock, still delays all.
    """

    def __init__(
        self,
        *,
        engines: Sequence[GeneratesTokens],
        template: ChatTemplate,
        make_env: Callable[[], Env],
        env: EnvConfig,
        reward: RewardConfig,
        max_len: int,
        max_prompt_len: int | None = None,
        overflow: str = "drop",
        make_reward: Callable[[], Reward] | None = None,
        put: Callable[[Sequence[Rollout]], Any] = lambda rollouts: rollouts,
        on_finished: Callable[[Rollout], None] = lambda rollout: None,
        index: int = 0,
    ) -> None:
        """``put`` stores the rollouts of a finished group and returns the reference that goes into their summaries."""
        self._pool = EnginePool(engines, start=index)
        self._template = template
        self._make_env, self._make_reward = make_env, make_reward
        self._env, self._reward = env, reward
        self._max_len, self._max_prompt_len = max_len, max_prompt_len or max_len - 1
        self._overflow, self._overflow_report = overflow, OverflowReport()
        self._put, self._on_finished = put, on_finished
        self._threads = LoopThreads()
        self._rollouts: set[asyncio.Task[Any]] = set()
        self._warned: set[str] = set()
        self._prompts: dict[str, list[int]] = {}

    @classmethod
    def start(cls, settings: RunnerSettings, engines: Sequence[GeneratesTokens], index: int = 0) -> Runner:
        """Load plugins and tokenizer, in the process that is to run environments. Rollouts go to Ray's object store."""
        import ray

        from molt_core.chat.template import load_tokenizer
        from molt_core.plugins import load_plugins

        plugins = load_plugins(settings.plugins)
        tokenizer = load_tokenizer(settings.model, settings.trust_remote_code)
        env, reward = settings.env, settings.reward
        # Imported here, once: the instances are made in several threads.
        plugins.validate("environment", env.name, env.args)
        if reward.name:
            plugins.validate("reward", reward.name, reward.args)
        return cls(
            engines=engines,
            template=plugins.create("chat-template", settings.chat_template, {}, tokenizer=tokenizer),
            make_env=partial(plugins.create, "environment", env.name, env.args),
            make_reward=partial(plugins.create, "reward", reward.name, reward.args) if reward.name else None,
            env=env,
            reward=reward,
            max_len=settings.max_len,
            max_prompt_len=settings.max_prompt_len,
            overflow=settings.overflow,
            put=ray.put,
            on_finished=lambda rollout: plugins.hook.molt_rollout_finished(rollout=rollout),
            index=index,
        )

    async def run_group(self, task: GroupTask) -> list[RolloutSummary]:
        """Run all rollouts of a group at once.

        Raises EngineDiedError when an engine is gone, and ConfigError for a prompt that is too long where
        ``data.overflow`` says so; everything else becomes a rollout's status.
        """
        rollouts = [asyncio.create_task(self._run(task, sample)) for sample in range(task.num_samples)]
        self._rollouts.update(rollouts)
        try:
            ended = await asyncio.gather(*rollouts)
        finally:
            for rollout in rollouts:
                _cancel_once(rollout)
                rollout.add_done_callback(self._rollouts.discard)
        stored = self._put([rollout for rollout, _ in ended])
        return [
            RolloutSummary.of(rollout, StoredRollout(stored, index), failed)
            for index, (rollout, failed) in enumerate(ended)
        ]

    async def close(self) -> None:
        """Cancel what is still played, and give the environments CLOSE_SECONDS to close."""
        rollouts = list(self._rollouts)
        for rollout in rollouts:
            _cancel_once(rollout)
        if rollouts:
            await asyncio.wait(rollouts, timeout=CLOSE_SECONDS)
        self._threads.close()

    async def _run(self, task: GroupTask, sample: int) -> tuple[Rollout, Sequence[RolloutStatus]]:
        """One rollout, run again after failures of infrastructure, and how its earlier attempts ended."""
        failed: list[RolloutStatus] = []
        while True:
            rollout = await self._attempt(task, sample, len(failed))
            if rollout.status not in _RUN_AGAIN or len(failed) >= self._env.retries:
                break
            failed.append(rollout.status)
        self._on_finished(rollout)
        return rollout, failed

    async def _attempt(self, task: GroupTask, sample: int, attempt: int) -> Rollout:
        started = time.monotonic()
        rollout_id = f"{task.group_id}-{sample}"
        # One seed for the group: what an environment draws from it is the same task for all its rollouts.
        ctx = EnvContext(task.row, rollout_id, stable_seed(task.seed, task.group_id), task.is_eval)
        play = _Play(rollout_id, task, attempt, sample, ctx, deadline=started + self._env.rollout_timeout)
        with Lease(self._threads) as lease:
            try:
                await self._play(play, lease)
                status = RolloutStatus.TRUNCATED if play.is_cut else RolloutStatus.COMPLETED
                rollout = self._rollout(play, status)
                if self._make_reward is not None:
                    rollout = await self._score(play, rollout, lease)
            except _Failed as failure:
                rollout = self._rollout(play, failure.status, failure.message)
        return replace(rollout, seconds=time.monotonic() - started)

    def _rollout(self, play: _Play, status: RolloutStatus, error: str = "") -> Rollout:
        segment = Segment.from_turns(play.turns)
        if status.is_scored and not segment.num_actions:
            raise _Failed(RolloutStatus.EMPTY, "it ended without a sampled token")
        return Rollout(
            id=play.id,
            group_id=play.task.group_id,
            row=play.task.row,
            segments=(segment,) if segment.num_actions else (),
            reward=play.reward if status.is_scored else math.nan,
            status=status,
            num_turns=len(play.turns),
            info=dict(play.info),
            text=str(self._template.tokenizer.decode(segment.ids.tolist())),
            error=error,
            terminated=play.terminated,
        )

    async def _play(self, play: _Play, lease: Lease) -> None:
        """Make the environment, play it to its end, and close it whatever happens."""
        env: Env = await self._user_code(play, lease, "the environment's constructor", self._make_env)
        try:
            start = await self._user_code(play, lease, "reset", env.reset, play.task.row, play.ctx)
            with self._pool.engine() as engine:
                await self._take_turns(play, lease, env, engine, start)
        finally:
            if getattr(type(env), "close", None) is not Env.close:
                try:
                    await lease.call(env.close, timeout=self._env.turn_timeout)
                except Exception as error:
                    logger.warning("rollout %s: close failed: %s", play.id, _describe(error))

    async def _take_turns(
        self, play: _Play, lease: Lease, env: Env, engine: GeneratesTokens, start: Sequence[Message] | str
    ) -> None:
        is_plain = isinstance(start, str)
        observation = self._prompt_ids(play, start)
        for turn in range(1, self._env.max_turns + 1):
            play.ids += observation
            granted = grant_new_tokens(self._max_len, len(play.ids), play.task.sampling.max_new_tokens)
            if granted == 0:
                play.is_cut = True
                return
            completion = await self._generate(play, engine, observation, granted)
            action = Action(self._template.action_text(completion.ids), tuple(completion.ids), completion.finish_reason)
            result = await self._user_code(play, lease, "step", env.step, action, play.ctx)
            self._take_result(play, result)
            play.is_cut |= action.is_cut_off or result.truncated
            play.terminated = result.terminated
            if result.terminated or result.truncated:
                return
            if turn == self._env.max_turns:
                play.is_cut = True
                return
            observation = self._next_ids(completion, result, is_plain)

    async def _user_code(self, play: _Play, lease: Lease, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call the environment within the turn's and the rollout's limit; its failures become the rollout's."""
        left = play.deadline - time.monotonic()
        limit = min(self._env.turn_timeout, max(left, 0.0))
        try:
            return await lease.call(function, *args, timeout=limit)
        except CallTimeoutError as error:
            name = "turn_timeout" if limit == self._env.turn_timeout else "rollout_timeout"
            message = f"{what} did not end within env.{name} ({getattr(self._env, name):g} s)"
            raise _Failed(RolloutStatus.ENV_TIMEOUT, message) from error
        except Exception as error:
            raise _Failed(RolloutStatus.ENV_ERROR, f"{what} raised {_describe(error)}") from error

    async def _generate(
        self, play: _Play, engine: GeneratesTokens, observation: Sequence[int], granted: int
    ) -> Completion:
        sampling = play.task.sampling
        request = EngineRequest(
            prompt_ids=tuple(play.ids),
            max_tokens=granted,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=stable_seed(play.task.seed, play.task.group_id, play.sample, play.attempt, len(play.turns)),
            stop_token_ids=self._template.stop_token_ids,
        )
        try:
            async with asyncio.timeout(play.deadline - time.monotonic()):
                completion = await engine.generate(request)
            turn = Turn(observation, completion.ids, completion.logprobs, completion.versions, completion.finish_reason)
        except TimeoutError as error:
            limit = self._env.rollout_timeout
            message = f"generation did not end within env.rollout_timeout ({limit:g} s)"
            raise _Failed(RolloutStatus.ENGINE_ERROR, message) from error
        except EngineDiedError:
            raise
        except Exception as error:
            raise _Failed(RolloutStatus.ENGINE_ERROR, f"generation raised {_describe(error)}") from error
        if not np.isfinite(completion.logprobs).all():
            raise _Failed(RolloutStatus.ENGINE_ERROR, "the engine returned a log-prob that is not finite")
        play.turns.append(turn)
        play.ids += completion.ids
        return completion

    def _prompt_ids(self, play: _Play, start: Sequence[Message] | str) -> list[int]:
        try:
            ids = self._render_prompt(start)
        except Exception as error:
            message = f"the prompt cannot be rendered: {_describe(error)}"
            raise _Failed(RolloutStatus.ENV_ERROR, message) from error
        fitted = fit_prompt(
            ids, self._max_prompt_len, self._overflow, row=play.task.row_index, report=self._overflow_report
        )
        if self._overflow == "truncate_left":
            play.info["prompt_truncated"] = float(len(ids) > self._max_prompt_len)
        if fitted is None:
            message = f"the prompt has {len(ids)} > {self._max_prompt_len} tokens (data.max_prompt_len)"
            raise _Failed(RolloutStatus.EMPTY, message)
        return fitted

    def _render_prompt(self, start: Sequence[Message] | str) -> list[int]:
        """Token ids of a first observation. The rollouts of a group mostly begin alike and share one rendering."""
        key = repr(start)
        if key not in self._prompts:
            while len(self._prompts) >= MAX_CACHED_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            template = self._template
            ids = template.raw_prompt_ids(start) if isinstance(start, str) else template.prompt_ids(start)
            self._prompts[key] = ids
        return self._prompts[key]

    def _next_ids(self, completion: Completion, result: Result, is_plain: bool) -> list[int]:
        """The tokens between this action and the next. A conversation that began as plain text goes on as it."""
        observation = result.observation
        if observation is None:
            raise _Failed(RolloutStatus.ENV_ERROR, "step neither ended the rollout nor gave an observation")
        try:
            if isinstance(observation, str):
                if is_plain:
                    return list(self._template.tokenizer.encode(observation, add_special_tokens=False))
                observation = [{"role": "user", "content": observation}]
            return self._template.next_turn_ids(completion.ids, observation)
        except Exception as error:
            message = f"the observation cannot be rendered: {_describe(error)}"
            raise _Failed(RolloutStatus.ENV_ERROR, message) from error

    def _take_result(self, play: _Play, result: Any) -> None:
        if not isinstance(result, Result):
            raise _Failed(RolloutStatus.ENV_ERROR, f"step returned {type(result).__name__}, not molt_core.Result")
        reward = as_number(result.reward)
        if not math.isfinite(reward):
            raise _Failed(RolloutStatus.INVALID_REWARD, f"step returned a reward of {result.reward!r}")
        play.reward += reward
        self._take_info(play.info, result.info)

    def _take_info(self, info: dict[str, float], new: Mapping[str, Any]) -> None:
        for key, value in new.items():
            number = as_number(value)
            if math.isfinite(number):
                info[str(key)] = number
            elif key not in self._warned:
                self._warned.add(key)
                logger.warning("info %r is not a finite number (%r) and is left out of the metrics", key, value)

    async def _score(self, play: _Play, rollout: Rollout, lease: Lease) -> Rollout:
        """Replace the reward by the plugin's; only the scoring is repeated when it fails."""
        failure = _Failed(RolloutStatus.REWARD_ERROR, "")
        for _ in range(self._reward.retries + 1):
            try:
                score = await lease.call(self._ask_reward, play, rollout, lease, timeout=self._reward.timeout)
            except Exception as error:
                failure = _Failed(RolloutStatus.REWARD_ERROR, f"scoring raised {_describe(error)}")
                continue
            score = score if isinstance(score, Score) else Score(score)
            play.reward = as_number(score.reward)
            if math.isfinite(play.reward):
                self._take_info(play.info, score.info)
                return self._rollout(play, rollout.status)
            failure = _Failed(RolloutStatus.INVALID_REWARD, f"scoring returned a reward of {score.reward!r}")
        raise failure

    def _ask_reward(self, play: _Play, rollout: Rollout, lease: Lease) -> Any:
        """Make and use the plugin in one call, on one loop: clients often belong to one."""
        assert self._make_reward is not None
        reward: Reward = lease.shared(Reward, self._make_reward)
        return reward.score(rollout, play.ctx)


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """A second cancellation would interrupt the environment's close."""
    if not task.cancelling():
        task.cancel()


def as_number(value: Any) -> float:
    """A Python, numpy or 0-d tensor number or boolean as a float; NaN for anything else."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        return float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.inf


def stable_seed(*parts: Any) -> int:
    """A seed in [0, 2^63) that depends on the parts alone, the same in every process and run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


class RunnerActor:
    """A Runner in a Ray actor."""

    def __init__(self, settings: RunnerSettings, engines: Sequence[GeneratesTokens], index: int) -> None:
        self._runner = Runner.start(settings, engines, index)

    async def run_group(self, task: GroupTask) -> list[RolloutSummary]:
        return await self._runner.run_group(task)

    async def ready(self) -> None:
        """Returns once the process is set up."""

    async def close(self) -> None:
        await self._runner.close()


class RemoteRunner:
    """The runner in an actor, with the same method."""

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

    actor_class = ray.remote(RunnerActor).options(num_cpus=0, max_concurrency=MAX_CONCURRENT_GROUPS)
    return [RemoteRunner(actor_class.remote(settings, list(engines), index)) for index in range(num_runners)]
