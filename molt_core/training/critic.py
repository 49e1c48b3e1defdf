"""The value model of one rank: a causal language model with a scalar in the place of its logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from molt_core.config.shared import FsdpConfig, TrainedModelConfig
from molt_core.training.mesh import Rank
from molt_core.training.packing import MicroBatch
from molt_core.training.policy import CausalModel, build_model


class Critic(CausalModel):
    """Values of states. ``value_head`` belongs to ``model``. All methods are collective over the ranks."""

    def __init__(self, model: nn.Module, rank: Rank, value_head: nn.Module) -> None:
        super().__init__(model, rank)
        self._value_head = value_head

    def score(self, batch: MicroBatch) -> Tensor:
        """Values (B, T) float32, with a graph: entry k is of the state after token k, so [:, :-1] is next-token."""
        with self._replaced_head(self._project):
            return self._forward(batch)[..., 0]

    @torch.no_grad()
    def values(self, batch: MicroBatch) -> Tensor:
        """Values (B, T) as of :meth:`score`, without a graph."""
        values = self.score(batch)
        self.reshard()
        return values

    def _project(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self._value_head(hidden.float())


def build_critic(config: TrainedModelConfig, fsdp: FsdpConfig, rank: Rank, seed: int) -> Critic:
    """The checkpoint's backbone with a new head: Linear(hidden, 1) in float32 without bias, normal initialisation."""
    model = build_model(config, fsdp, rank)
    replaced = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if replaced.weight is not embedding.weight:
        replaced.requires_grad_(False)  # nothing reads it
    head = nn.Linear(replaced.weight.shape[-1], 1, bias=False, device=rank.device, dtype=torch.float32)
    deviation = getattr(model.config, "initializer_range", 0.02)
    # Drawn on the CPU from the seed alone, so that it is the same on all ranks.
    drawn = torch.empty(head.weight.shape).normal_(0.0, deviation, generator=torch.Generator().manual_seed(seed))
    head.weight.data.copy_(drawn)
    if isinstance(model, FSDPModule):
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(head, mesh=embedding.weight.device_mesh, mp_policy=exact)
    model.value_head = head
    return Critic(model, rank, head)
