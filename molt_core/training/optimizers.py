"""AdamW and its learning-rate schedule, from the configuration."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from molt_core.config.shared import AdamConfig, TrainedModelConfig
from molt_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger("molt")

_NEED_A_METRIC = ("reduce_lr_on_plateau", "greedy")


def build_optimizer(parameters: Iterable[nn.Parameter], config: AdamConfig) -> Optimizer:
    """AdamW over the trainable parameters, one group, decoupled weight decay on all. Source: arXiv 1711.05101."""
    import torch

    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, foreach=True
    )


def check_schedule(config: TrainedModelConfig, section: str) -> None:
    """Raises ConfigError for a schedule that does not exist or needs more than a step count, and for its idle options.

    ``section``: where the user finds them.
    """
    accepts = _options_of(config.lr_scheduler, f"--{section}.lr_scheduler")
    used_by = {"lr_warmup_ratio": {"num_warmup_steps"}, "min_lr_ratio": {"min_lr_rate", "min_lr_ratio"}}
    for option, names in used_by.items():
        value = getattr(config, option)
        if value not in (0, type(config).model_fields[option].default) and accepts.isdisjoint(names):
            raise ConfigError(
                f"--{section}.{option} has no effect with the schedule {config.lr_scheduler}: leave it out, or choose "
                f"another --{section}.lr_scheduler"
            )


def _options_of(name: str, flag: str) -> set[str]:
    """What the Hugging Face schedule of that name can be told; ConfigError if it is none of those usable here."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    functions: dict[str, Any] = {kind.value: made for kind, made in TYPE_TO_SCHEDULER_FUNCTION.items()}
    known = sorted(functions.keys() - set(_NEED_A_METRIC))
    if name not in known:
        raise ConfigError(f"{flag} {name!r} is not usable here; write one of {', '.join(known)}")
    return set(inspect.signature(functions[name]).parameters)


def build_scheduler(optimizer: Optimizer, config: TrainedModelConfig, num_steps: int) -> LRScheduler:
    """The Hugging Face schedule of that name over ``num_steps`` optimizer steps. Raises ConfigError for a bad name.

    Warm-up takes ceil(num_steps * lr_warmup_ratio) steps and starts at 0. ``warmup_stable_decay`` decays over the last
    tenth. The lowest rate is min_lr_ratio of the peak where the schedule has such an option.
    """
    from transformers.optimization import get_scheduler

    name = config.lr_scheduler
    accepts = _options_of(name, "lr_scheduler")
    warmup = math.ceil(num_steps * config.lr_warmup_ratio)
    specific: dict[str, float] = {}
    if "min_lr_rate" in accepts:
        specific["min_lr_rate"] = config.min_lr_ratio
    if "min_lr_ratio" in accepts:
        specific["min_lr_ratio"] = config.min_lr_ratio
    if "num_decay_steps" in accepts:
        specific["num_decay_steps"] = math.ceil(num_steps / 10)
    if "num_warmup_steps" not in accepts and warmup:
        logger.info("lr_scheduler %s has no warm-up; lr_warmup_ratio is not used", name)
    return get_scheduler(name, optimizer, warmup, num_steps, specific or None)
