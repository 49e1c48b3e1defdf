"""From a configuration to a running loop: check everything, start the actors, run, clean up."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import psutil
import ray

from molt_core.blocking import run_blocking
from molt_core.chat.template import load_tokenizer
from molt_core.chat.vocabulary import vocabulary_difference
from molt_core.config import RLConfig, SFTConfig
from molt_core.config.checks import check_rl
from molt_core.config.checks import check_sft as check_sft_options
from molt_core.config.kl import KlPlan, advise_on_kl
from molt_core.config.rl import CriticConfig
from molt_core.data.conversations import Conversations, read_conversations
from molt_core.data.prompts import PromptCursor, digest_of
from molt_core.data.rows import read_rows
from molt_core.errors import ConfigError
from molt_core.evaluation import Evaluator
from molt_core.learner import Learner, critic_epochs, num_windows
from molt_core.logs import QUIET
from molt_core.loop import Parts
from molt_core.loop import train as run_loop
from molt_core.memory import freeze_heap
from molt_core.plugins import Plugins
from molt_core.progress import Columns, Progress
from molt_core.rollout.engine import EngineSettings
from molt_core.rollout.generator import Generator, GeneratorSettings, GroupDispatcher
from molt_core.rollout.refit import Refitter
from molt_core.rollout.remote import start_engines, start_runners
from molt_core.rollout.runner import RunnerSettings
from molt_core.run import RunDir, RunRecorder, make_trackers, resume_point
from molt_core.training.checkpoints import CheckpointStore
from molt_core.training.group import TrainGroup
from molt_core.training.optimizers import check_schedule
from molt_core.training.rows import ObjectiveSpec
from molt_core.training.sft import num_sft_steps, run_sft

if TYPE_CHECKING:
    from molt_core.agents.env import Env
    from molt_core.algorithms.estimator import Estimator, Needs
    from molt_core.algorithms.loss import Loss

logger = logging.getLogger("molt")

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class TrainInputs:
    """What the checks have read and found: prompts, device, length of the run, where it goes, what it resumes from."""

    rows: list[dict[str, Any]]
    eval_rows: list[dict[str, Any]]
    device: Device
    total_steps: int
    run_dir: RunDir
    checkpoint: Path | None
    state: dict[str, Any]


@dataclass(frozen=True)
class SftInputs:
    """The same for supervised fine-tuning."""

    conversations: Conversations
    device: Device
    run_dir: RunDir
    checkpoint: Path | None
    state: dict[str, Any]


def check_train(config: RLConfig, plugins: Plugins) -> TrainInputs:
    """Check everything that can be checked without starting a process. Raises ConfigError."""
    env = cast("type[Env]", plugins.validate("environment", config.env.name, config.env.args))
    advantage = config.algo.advantage
    estimator = cast("type[Estimator]", plugins.validate("estimator", advantage.estimator, advantage.args))
    loss = _check_loss(config, plugins)
    plugins.validate("chat-template", config.data.chat_template, {})
    if config.reward.name:
        plugins.validate("reward", config.reward.name, config.reward.args)
    for tracker in config.logger.trackers:
        plugins.validate("tracker", tracker, config.logger.tracker_args.get(tracker, {}))
    if estimator.needs.reward and not (env.gives_reward or config.reward.name):
        raise ConfigError(
            f"environment {config.env.name} gives no reward, which estimator {advantage.estimator} needs: set "
            "--env.name to one that does, or --reward.name"
        )
    check_rl(config, estimator.needs, single_step_loss=loss.single_step)
    trust = config.fsdp.trust_remote_code
    check_model(config.actor.model_name_or_path, "actor.model_name_or_path", trust, config.data.max_len)
    check_tokenizer(config.actor.model_name_or_path, "actor.model_name_or_path", trust)
    check_schedule(config.actor, "actor")
    kl = KlPlan.of(config, estimator.needs)
    advise_on_kl(kl)
    _check_scorer(config, kl.model, "reference model", "ref.model_name_or_path")
    if estimator.needs.values:
        check_schedule(config.critic, "critic")
        _check_scorer(config, critic_config(config).model_name_or_path, "critic", "critic.model_name_or_path")

    assert config.data.prompt_dataset is not None
    rows = read_rows(config.data.prompt_dataset, max_samples=config.data.max_samples, columns=env.columns)
    eval_rows: list[dict[str, Any]] = []
    if config.eval.dataset:
        eval_rows = read_rows(config.eval.dataset, max_samples=config.eval.max_samples, columns=env.columns)
    total = math.ceil(len(rows) * config.train.num_episodes / config.rollout.batch_size)
    total = min(total, config.train.max_steps or total)
    if 0 < total <= config.actor.freezing_steps:
        raise ConfigError(
            f"--actor.freezing_steps {config.actor.freezing_steps} leaves none of the {total} steps for the actor: "
            "lower it, or raise --train.max_steps or --train.num_episodes"
        )
    run_dir = RunDir("rl", config.logger, config.ckpt)
    checkpoint, state = resume_point(run_dir, config.ckpt)
    return TrainInputs(rows, eval_rows, resolve_device(config.device), total, run_dir, checkpoint, state)


def _check_loss(config: RLConfig, plugins: Plugins) -> type[Loss]:
    """The loss exists and has the options given; a shorthand that it does not have is refused under its own name."""
    actor = config.actor
    loss = cast("type[Loss]", plugins.resolve("loss", actor.loss_mode))
    options = loss.Config.model_fields
    given = [name for name in ("eps_clip_low_high", "dual_clip") if getattr(actor, name) is not None]
    for name in given:
        if name not in options:
            raise ConfigError(
                f"loss {actor.loss_mode} has no {name}: leave --actor.{name} out, or choose another --actor.loss_mode"
            )
    try:
        plugins.validate("loss", actor.loss_mode, loss_args(config))
    except ConfigError as error:
        text = str(error)
        for name in given:
            text = text.replace(f"--actor.loss_args.{name}", f"--actor.{name}")
        raise ConfigError(text) from None
    return loss


def _check_scorer(config: RLConfig, model: str | None, role: str, flag: str) -> None:
    """Another model than the actor that scores the actor's tokens: both must mean the same by them."""
    actor, trust = config.actor.model_name_or_path, config.fsdp.trust_remote_code
    if model is None or model == actor:
        return
    check_model(model, flag, trust, config.data.max_len)
    check_tokenizer(model, flag, trust)
    difference = vocabulary_difference(actor, model, trust)
    if difference:
        raise ConfigError(
            f"the {role} {model} has another vocabulary than {actor} ({difference}), so it cannot score the tokens: "
            f"set --{flag} to a model with the actor's tokenizer"
        )


def loss_args(config: RLConfig) -> dict[str, Any]:
    """The loss's options; the shorthands of the actor section are passed on under their own names."""
    short = {"eps_clip_low_high": config.actor.eps_clip_low_high, "dual_clip": config.actor.dual_clip}
    return {**config.actor.loss_args, **{k: v for k, v in short.items() if v is not None}}


def check_model(name: str, flag: str, trust_remote_code: bool, max_len: int | None = None) -> None:
    """The checkpoint is a folder with a configuration and weights, or a name that the hub or its cache knows.

    ``max_len``: the context that it must have room for. Raises ConfigError.
    """
    path = Path(name)
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ConfigError(f"--{flag}: there is no folder {name}; give the path of a Hugging Face checkpoint")
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ConfigError(f"--{flag}: the folder {name} holds no weights; give a Hugging Face checkpoint")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        what = "has no config.json that can be read" if path.is_dir() else "is no folder and the hub does not know it"
        raise ConfigError(f"--{flag}: {name} {what}; check the name ({str(error).splitlines()[0]})") from error
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_len is not None and limit is not None and max_len > limit:
        raise ConfigError(f"--data.max_len {max_len} is more than the {limit} positions of {name}: lower it")


def check_tokenizer(name: str, flag: str, trust_remote_code: bool) -> None:
    """The checkpoint's tokenizer makes tokens of text: where files are missing, transformers makes an empty one."""
    try:
        ids = load_tokenizer(name, trust_remote_code).encode("text", add_special_tokens=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}: the tokenizer of {name} cannot be loaded ({error})") from error
    if not ids:
        raise ConfigError(f"--{flag}: {name} has no tokenizer files; copy them there from the base model")


def resolve_device(device: str) -> Device:
    """ "auto" becomes "cuda" where there is a CUDA device, else "cpu"."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device; write --device cpu, or run `molt doctor`")
    wants_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return "cuda" if wants_cuda else "cpu"


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on the loopback interface of this machine; stop it at the end."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where: dict[str, Any] = {"address": address}
    if address is None:
        where = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    quiet = {"env_vars": QUIET, "worker_process_setup_hook": "molt_core.logs.quiet_libraries"}
    ray.init(**where, runtime_env=quiet, logging_level=logging.WARNING, configure_logging=False)
    try:
        yield
    finally:
        started = psutil.Process().children(recursive=True) if address is None else []
        ray.shutdown()
        _end(started)


def _end(processes: Sequence[psutil.Process]) -> None:
    """End what Ray leaves running when it is stopped while actors start or work."""
    _, left = psutil.wait_procs(processes, timeout=2)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends a run like Ctrl-C does: with every process stopped."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def check_sft(config: SFTConfig, plugins: Plugins) -> SftInputs:
    """Check everything and read the conversations, before any process is started. Raises ConfigError."""
    check_sft_options(config)
    for tracker in config.logger.trackers:
        plugins.validate("tracker", tracker, config.logger.tracker_args.get(tracker, {}))
    model, trust = config.model.model_name_or_path, config.fsdp.trust_remote_code
    check_model(model, "model.model_name_or_path", trust)
    check_tokenizer(model, "model.model_name_or_path", trust)
    check_schedule(config.model, "model")
    assert config.data.dataset is not None
    conversations = read_conversations(
        config.data.dataset,
        plugins.create("chat-template", config.data.chat_template, {}, tokenizer=load_tokenizer(model, trust)),
        max_len=config.data.max_len,
        messages_key=config.data.messages_key,
        max_samples=config.data.max_samples,
        last_turn_only=config.data.train_on_last_turn_only,
    )
    run_dir = RunDir("sft", config.logger, config.ckpt)
    checkpoint, state = resume_point(run_dir, config.ckpt)
    return SftInputs(conversations, resolve_device(config.device), run_dir, checkpoint, state)


def sft(config: SFTConfig, plugins: Plugins, inputs: SftInputs) -> None:
    """Supervised fine-tuning, to the final export."""
    run_dir, checkpoint, segments = inputs.run_dir, inputs.checkpoint, inputs.conversations.segments
    start, total = inputs.state.get("step", 0), num_sft_steps(len(segments), config.train)
    run_dir.save_config(config)
    plugins.hook.molt_configure(config=config)
    recorder = _recorder(config, plugins, run_dir, Progress.SFT, total, start)
    with interruptible(), ray_session(config.train.ray_address), ExitStack() as stack:
        trainer = TrainGroup.start(
            config.model,
            config.fsdp,
            device=inputs.device,
            seed=config.train.seed,
            cpu_threads=config.train.cpu_threads,
            num_optimizer_steps=total,
            objective=ObjectiveSpec(),
            plugins=plugins.spec,
        )
        stack.callback(trainer.close)
        if checkpoint:
            trainer.load(checkpoint)
            logger.info("resumed from %s", checkpoint)

        def on_step(step: int, metrics: Any, position: dict[str, Any]) -> None:
            recorder.log_step(step, metrics)
            if recorder.wants_checkpoint(step) or (step == total and recorder.wants_last_checkpoint(step)):
                recorder.save(step, trainer, position)

        with recorder.open(config, resumed_step=start):
            run_sft(segments, trainer, config.train, on_step=on_step, state=inputs.state or None)
        if not config.ckpt.disable_final_save:
            trainer.export_hf(run_dir.hf)
            logger.info("the fine-tuned model is in %s", run_dir.hf)


def train(config: RLConfig, plugins: Plugins, inputs: TrainInputs) -> None:
    """Reinforcement learning, to the final export."""
    inputs.run_dir.save_config(config)
    plugins.hook.molt_configure(config=config)
    with interruptible(), ray_session(config.train.ray_address):
        asyncio.run(_train(config, plugins, inputs))


async def _train(config: RLConfig, plugins: Plugins, inputs: TrainInputs) -> None:
    """Start the actors, run the loop, export the model."""
    run_dir, checkpoint = inputs.run_dir, inputs.checkpoint
    advantage = config.algo.advantage
    estimator = cast("Estimator", plugins.create("estimator", advantage.estimator, advantage.args))

    cursor = PromptCursor(
        len(inputs.rows),
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        num_episodes=config.train.num_episodes,
        digest=digest_of(json.dumps(row, sort_keys=True).encode() for row in inputs.rows),
    )
    async with AsyncExitStack() as stack:
        engines = start_engines(engine_settings(config, inputs.device), config.vllm.num_engines)
        runners = start_runners(RunnerSettings.from_config(config, plugins.spec), engines, config.rollout.num_runners)
        stack.push_async_callback(stop_actors, [*(r.close for r in runners), *(e.shutdown for e in engines)])
        trainer = await run_blocking(start_trainer, config, plugins, inputs, estimator.needs)
        stack.callback(trainer.close)
        await asyncio.gather(*(e.check_health() for e in engines), *(r.ready() for r in runners))

        refitter = Refitter(engines, trainer.weights)
        learner = Learner(config, estimator, trainer)
        step = inputs.state.get("step", 0)
        if checkpoint is not None:
            await run_blocking(trainer.load, checkpoint)
            learner.load(inputs.state["learner"])
            await refitter.refit(learner.version(step))
            logger.info("resumed from %s", checkpoint)
        dispatcher = GroupDispatcher(runners)
        settings = GeneratorSettings.from_config(config, estimator.needs.fewest)
        generator = Generator(inputs.rows, cursor, dispatcher, settings, version=learner.version(step))
        if checkpoint is not None:
            generator.load(inputs.state["generator"])
        recorder = _recorder(config, plugins, run_dir, Progress.RL, inputs.total_steps, step)
        evaluator = Evaluator(inputs.eval_rows, dispatcher, config) if inputs.eval_rows else None
        parts = Parts(generator, trainer, refitter, learner, evaluator, recorder)
        with recorder.open(config, resumed_step=step):
            freeze_heap()
            async with generator:
                await run_loop(config, parts, step, inputs.total_steps)
        if not config.ckpt.disable_final_save:
            await run_blocking(trainer.export_hf, run_dir.hf)
    recorder.print_summary()


async def stop_actors(ends: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Let actors end by themselves what they hold; what does not answer in time is ended with the session."""
    with suppress(Exception):
        async with asyncio.timeout(4):
            await asyncio.gather(*(end() for end in ends), return_exceptions=True)


def engine_settings(config: RLConfig, device: Device) -> EngineSettings:
    """What an engine is started with."""
    return EngineSettings.from_config(
        config.vllm,
        model=config.actor.model_name_or_path,
        device=device,
        max_len=config.data.max_len,
        seed=config.train.seed,
        trust_remote_code=config.fsdp.trust_remote_code,
    )


def objective_spec(config: RLConfig, needs: Needs) -> ObjectiveSpec:
    """What the options say is to be minimised, for an estimator with these needs."""
    actor, advantage, kl = config.actor, config.algo.advantage, KlPlan.of(config, needs)
    return ObjectiveSpec(
        loss=actor.loss_mode,
        loss_args=loss_args(config),
        agg_mode=actor.loss_agg_mode,
        agg_norm=actor.loss_agg_norm or config.rollout.max_new_tokens or config.data.max_len,
        entropy_coef=actor.entropy_coef,
        kl=kl.estimator if kl.use == "loss" else None,
        kl_ref=config.algo.kl.ref,
        is_level=advantage.is_correction_level,
        is_mode=advantage.is_correction_mode,
        is_threshold=advantage.is_correction_threshold,
        is_gating=advantage.is_correction_gating,
    )


def critic_config(config: RLConfig) -> CriticConfig:
    """The critic's section, with the actor's checkpoint if it names none."""
    model = config.critic.model_name_or_path or config.actor.model_name_or_path
    return config.critic.model_copy(update={"model_name_or_path": model})


def start_trainer(config: RLConfig, plugins: Plugins, inputs: TrainInputs, needs: Needs) -> TrainGroup:
    """The training ranks, with the models that the estimator's needs ask for."""
    steps = inputs.total_steps * num_windows(config)
    return TrainGroup.start(
        config.actor,
        config.fsdp,
        device=inputs.device,
        seed=config.train.seed,
        cpu_threads=config.train.cpu_threads,
        num_optimizer_steps=(steps - config.actor.freezing_steps * num_windows(config)) * config.train.max_epochs,
        temperature=config.rollout.temperature,
        objective=objective_spec(config, needs),
        plugins=plugins.spec,
        reference=KlPlan.of(config, needs).model,
        critic=critic_config(config) if needs.values else None,
        num_critic_steps=steps * critic_epochs(config),
    )


def _recorder(
    config: RLConfig | SFTConfig, plugins: Plugins, run_dir: RunDir, columns: Columns, total: int, step: int
) -> RunRecorder:
    return RunRecorder(
        run_dir,
        make_trackers(plugins, config.logger),
        Progress(total, step, columns=columns, every=config.logger.logging_steps),
        CheckpointStore(run_dir.checkpoints, config.ckpt.max_num),
        config.ckpt,
        config.logger,
        on_step=lambda step, metrics: plugins.hook.molt_step_finished(step=step, metrics=metrics),
    )
