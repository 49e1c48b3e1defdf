"""The runner: plays groups of rollouts, an environment against an engine, and turns every ending into a status."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.agents.env import Action, Env, EnvContext, Message, Result
from molt_core.agents.reward import Reward
from molt_core.contract import Rollout, RolloutStatus, Segment, StoredRollout, Turn
from molt_core.data.overflow import OverflowReport, fit_prompt, grant_new_tokens
from molt_core.rollout.actors import EngineDiedError
from molt_core.rollout.engine import Completion, EngineRequest
from molt_core.rollout.pool import EnginePool, GeneratesTokens
from molt_core.rollout.scoring import RolloutFailedError, Scorer, Tally, describe
from molt_core.rollout.tasks import GroupTask, RolloutSummary
from molt_core.rollout.threads import CallTimeoutError, Lease, LoopThreads

if TYPE_CHECKING:
    from molt_core.chat.template import ChatTemplate
    from molt_core.config.rl import EnvConfig, RewardConfig, RLConfig
    from molt_core.plugins import PluginSpec

logger = logging.getLogger("molt")

CLOSE_SECONDS = 3.0
"""How long the end of a run waits for environments to close."""

MAX_CACHED_PROMPTS = 256
"""First observations whose token ids are kept."""

_RUN_AGAIN = (RolloutStatus.ENGINE_ERROR, RolloutStatus.ENV_ERROR, RolloutStatus.ENV_TIMEOUT)
"""Failures that another attempt may not have. A failed scoring is repeated by itself, without sampling again."""


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


@dataclass
class _Play:
    """A rollout while it is played."""

    id: str
    task: GroupTask
    attempt: int
    sample: int
    ctx: EnvContext
    doing: str = "the environment's constructor"
    env: Env | None = None
    turns: list[Turn] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
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
        self._make_env, self._env = make_env, env
        self._scorer = Scorer(make_reward, reward) if make_reward is not None else None
        self._max_len, self._max_prompt_len = max_len, max_prompt_len or max_len - 1
        self._overflow, self._overflow_report = overflow, OverflowReport()
        self._put, self._on_finished = put, on_finished
        self._threads = LoopThreads()
        self._rollouts: set[asyncio.Task[Any]] = set()
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
                if self._scorer is not None:
                    scored = await self._scorer.score(rollout, ctx, lease, play.tally)
                    rollout = replace(rollout, reward=scored.reward, info=scored.info)
            except RolloutFailedError as failure:
                rollout = self._rollout(play, failure.status, failure.message)
        return replace(rollout, seconds=time.monotonic() - started)

    def _rollout(self, play: _Play, status: RolloutStatus, error: str = "") -> Rollout:
        segment = Segment.from_turns(play.turns)
        if status.is_scored and not segment.num_actions:
            raise RolloutFailedError(RolloutStatus.EMPTY, "it ended without a sampled token")
        return Rollout(
            id=play.id,
            group_id=play.task.group_id,
            row=play.task.row,
            segments=(segment,) if segment.num_actions else (),
            reward=play.tally.reward if status.is_scored else math.nan,
            status=status,
            num_turns=len(play.turns),
            info=dict(play.tally.info),
            text=str(self._template.tokenizer.decode(segment.ids.tolist())),
            error=error,
            terminated=play.terminated,
        )

    async def _play(self, play: _Play, lease: Lease) -> None:
        """Make the environment, play it to its end, and close it whatever happens."""
        try:
            start = await self._user_code(play, lease, self._open, play)
            with self._pool.engine() as engine:
                await self._take_turns(play, lease, engine, start)
        finally:
            close = getattr(play.env, "close", None)
            # Most environments have nothing to close.
            if close is not None and getattr(close, "__func__", None) is not Env.close:
                try:
                    await lease.call(close, timeout=self._env.turn_timeout)
                except Exception as error:
                    logger.warning("rollout %s: close failed: %s", play.id, describe(error))

    def _open(self, play: _Play) -> Any:
        """Make the environment and reset it in one call, on its loop: most are made in no time."""
        play.env = self._make_env()
        play.doing = "reset"
        return play.env.reset(play.task.row, play.ctx)

    async def _take_turns(
        self, play: _Play, lease: Lease, engine: GeneratesTokens, start: Sequence[Message] | str
    ) -> None:
        assert play.env is not None
        play.doing = "step"
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
            result = await self._user_code(play, lease, play.env.step, action, play.ctx)
            if not isinstance(result, Result):
                message = f"step returned {type(result).__name__}, not molt_core.Result"
                raise RolloutFailedError(RolloutStatus.ENV_ERROR, message)
            play.tally.add("step", result.reward, result.info)
            play.is_cut |= action.is_cut_off or result.truncated
            play.terminated = result.terminated
            if result.terminated or result.truncated:
                return
            if turn == self._env.max_turns:
                play.is_cut = True
                return
            observation = self._next_ids(completion, result, is_plain)

    async def _user_code(self, play: _Play, lease: Lease, function: Callable[..., Any], *args: Any) -> Any:
        """Call the environment within the turn's and the rollout's limit; its failures become the rollout's."""
        left = play.deadline - time.monotonic()
        limit = min(self._env.turn_timeout, max(left, 0.0))
        try:
            return await lease.call(function, *args, timeout=limit)
        except CallTimeoutError as error:
            name = "turn_timeout" if limit == self._env.turn_timeout else "rollout_timeout"
            message = f"{play.doing} did not end within env.{name} ({getattr(self._env, name):g} s)"
            raise RolloutFailedError(RolloutStatus.ENV_TIMEOUT, message) from error
        except Exception as error:
            raise RolloutFailedError(RolloutStatus.ENV_ERROR, f"{play.doing} raised {describe(error)}") from error

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
            raise RolloutFailedError(RolloutStatus.ENGINE_ERROR, message) from error
        except EngineDiedError:
            raise
        except Exception as error:
            raise RolloutFailedError(RolloutStatus.ENGINE_ERROR, f"generation raised {describe(error)}") from error
        if not np.isfinite(completion.logprobs).all():
            raise RolloutFailedError(RolloutStatus.ENGINE_ERROR, "the engine returned a log-prob that is not finite")
        play.turns.append(turn)
        play.ids += completion.ids
        return completion

    def _prompt_ids(self, play: _Play, start: Sequence[Message] | str) -> list[int]:
        try:
            ids = self._render_prompt(start)
        except Exception as error:
            message = f"the prompt cannot be rendered: {describe(error)}"
            raise RolloutFailedError(RolloutStatus.ENV_ERROR, message) from error
        fitted = fit_prompt(
            ids, self._max_prompt_len, self._overflow, row=play.task.row_index, report=self._overflow_report
        )
        if self._overflow == "truncate_left":
            play.tally.info["prompt_truncated"] = float(len(ids) > self._max_prompt_len)
        if fitted is None:
            message = f"the prompt has {len(ids)} > {self._max_prompt_len} tokens (data.max_prompt_len)"
            raise RolloutFailedError(RolloutStatus.EMPTY, message)
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
            raise RolloutFailedError(RolloutStatus.ENV_ERROR, "step neither ended the rollout nor gave an observation")
        try:
            if isinstance(observation, str):
                if is_plain:
                    return list(self._template.tokenizer.encode(observation, add_special_tokens=False))
                observation = [{"role": "user", "content": observation}]
            return self._template.next_turn_ids(completion.ids, observation)
        except Exception as error:
            message = f"the observation cannot be rendered: {describe(error)}"
            raise RolloutFailedError(RolloutStatus.ENV_ERROR, message) from error


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """A second cancellation would interrupt the environment's close."""
    if not task.cancelling():
        task.cancel()


def stable_seed(*parts: Any) -> int:
    """A seed in [0, 2^63) that depends on the parts alone, the same in every process and run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
