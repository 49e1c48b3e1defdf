"""From a configuration to a running loop: check everything, start the actors, run, clean up."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt_core.config.checks import check_rl
from molt_core.data.prompts import PromptCursor
from molt_core.data.rows import read_rows
from molt_core.errors import ConfigError

if TYPE_CHECKING:
    from molt_core.config import RLConfig, SFTConfig
    from molt_core.plugins import Plugins

logger = logging.getLogger("molt")


@dataclass(frozen=True)
class TrainInputs:
    """What the checks have read: prompts, held-out prompts, the device, the length of the run."""

    rows: list[dict[str, Any]]
    eval_rows: list[dict[str, Any]]
    device: str
    total_steps: int


def check_train(config: RLConfig, plugins: Plugins) -> TrainInputs:
    """Check everything that can be checked without starting a process. Raises ConfigError."""
    env = plugins.validate("environment", config.env.name, config.env.args)
    estimator = plugins.validate("estimator", config.algo.advantage.estimator, config.algo.advantage.args)
    plugins.validate("loss", config.actor.loss_mode, loss_args(config))
    plugins.validate("chat-template", config.data.chat_template, {})
    if config.reward.name:
        plugins.validate("reward", config.reward.name, config.reward.args)
    for tracker in config.logger.trackers:
        plugins.validate("tracker", tracker, config.logger.tracker_args.get(tracker, {}))
    check_rl(config, estimator.needs)
    check_model(config.actor.model_name_or_path, "actor.model_name_or_path")

    assert config.data.prompt_dataset is not None
    rows = read_rows(config.data.prompt_dataset, max_samples=config.data.max_samples, columns=env.columns)
    eval_rows: list[dict[str, Any]] = []
    if config.eval.dataset:
        eval_rows = read_rows(config.eval.dataset, max_samples=config.eval.max_samples, columns=env.columns)
    total = math.ceil(len(rows) * config.train.num_episodes / config.rollout.batch_size)
    return TrainInputs(rows, eval_rows, resolve_device(config.device), min(total, config.train.max_steps or total))


def loss_args(config: RLConfig) -> dict[str, Any]:
    """The loss's options; the shorthands of the actor section are passed on under their own names."""
    short = {"eps_clip_low_high": config.actor.eps_clip_low_high, "dual_clip": config.actor.dual_clip}
    return {**config.actor.loss_args, **{k: v for k, v in short.items() if v is not None}}


def check_model(name: str, flag: str) -> None:
    """The checkpoint is a folder with a config.json, or a name that the hub or its cache knows."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--{flag}: {name} is a folder without a config.json; give a Hugging Face checkpoint")
        return
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(f"--{flag}: there is no folder {name}; give the path of a Hugging Face checkpoint")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--{flag}: {name} is neither a folder nor a checkpoint that the Hugging Face hub knows; check the name "
            f"({str(error).splitlines()[0]})"
        ) from error


def resolve_device(device: str) -> str:
    """ "auto" becomes "cuda" where there is a CUDA device, else "cpu"."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device; write --device cpu, or run `molt doctor`")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


@contextmanager
def ray_session(address: str | None, device: str) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on the loopback interface of this machine; stop it at the end."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where: dict[str, Any] = {"address": address}
    if address is None:
        where = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(**where, log_to_driver=True, logging_level=logging.WARNING, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


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


def train(config: RLConfig, plugins: Plugins) -> None:
    """Reinforcement learning, from the checks to the final export."""
    inputs = check_train(config, plugins)
    with interruptible():
        asyncio.run(_train(config, plugins, inputs))
