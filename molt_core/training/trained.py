"""A model together with what updates it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from molt_core.training.optimizers import build_optimizer, build_scheduler
from molt_core.training.policy import CausalModel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from molt_core.config.shared import TrainedModelConfig
    from molt_core.training.objective import Tally

logger = logging.getLogger("molt")

Model = TypeVar("Model", bound=CausalModel)


@dataclass(frozen=True)
class Trained(Generic[Model]):
    """``net`` with its optimizer, schedule and clipping; ``prefix`` goes before the names of its metrics."""

    net: Model
    optimizer: Optimizer
    scheduler: LRScheduler
    max_norm: float
    prefix: str

    @classmethod
    def build(cls, net: Model, config: TrainedModelConfig, num_steps: int, prefix: str) -> Trained[Model]:
        """``num_steps``: the length of the learning-rate schedule."""
        optimizer = build_optimizer(net.model.parameters(), config.adam)
        return cls(net, optimizer, build_scheduler(optimizer, config, num_steps), config.max_norm, prefix)

    @property
    def stateful(self) -> tuple[nn.Module, Optimizer, LRScheduler]:
        """What a checkpoint stores, its parameters sharded."""
        self.net.reshard()
        return self.net.model, self.optimizer, self.scheduler

    def backward(self, loss: Tensor, name: str, share: float, tally: Tally) -> None:
        """Backward pass of one micro-batch's share of a window's loss, which is metric ``name``.

        ``share``: 1 / micro-batches of the window, so that the metric is a mean over windows.
        """
        rank = self.net.rank
        finite = loss.detach().isfinite()
        tally.add(
            f"{self.prefix}/{name}",
            torch.where(finite, loss.detach().double(), 0.0),
            finite * float(rank.is_main) * share,
        )
        # A loss that is not finite makes every gradient NaN on every rank, so that all of them skip the step.
        (loss * rank.world * torch.where(finite, 1.0, torch.nan)).backward()

    def step(self, tally: Tally) -> None:
        """Clip, step and schedule; a gradient norm that is not finite skips the step on all ranks alike."""
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        norm = float(scale_grads_and_clip_grad_norm(self.max_norm or math.inf, [self.net.model]))
        main = float(self.net.rank.is_main)
        tally.add(f"{self.prefix}/lr", main * self.scheduler.get_last_lr()[0], main)
        tally.add_event(f"{self.prefix}/skipped_steps", main * (not math.isfinite(norm)))
        if math.isfinite(norm):
            tally.add(f"{self.prefix}/grad_norm", main * norm, main)
            self.optimizer.step()
            self.scheduler.step()
        elif self.net.rank.is_main:
            logger.warning("%s: the gradient norm is %s, so the optimizer step is skipped", self.prefix, norm)
        self.optimizer.zero_grad(set_to_none=True)
