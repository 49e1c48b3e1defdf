"""The model of one rank: building it, scoring tokens with it, and reading its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from molt_core.config.shared import FsdpConfig, TrainedModelConfig
from molt_core.errors import ConfigError
from molt_core.training.compat import automodel_on_cpu
from molt_core.training.mesh import Rank, build_setup
from molt_core.training.packing import MicroBatch

HEAD_ROWS = 1024
"""Positions that go through the output embedding at once: what bounds the memory for logits."""

_MARK = 96.0
"""A logit that soft capping and scaling would change, exact in every dtype."""


def build_model(config: TrainedModelConfig, fsdp: FsdpConfig, rank: Rank) -> nn.Module:
    """AutoModel's implementation of the checkpoint, sharded over all ranks, with float32 master weights."""
    from huggingface_hub.errors import HFValidationError
    from nemo_automodel import NeMoAutoModelForCausalLM

    setup = build_setup(rank.dtype, config.gradient_checkpoint)
    with automodel_on_cpu() if rank.device.type == "cpu" else nullcontext():
        try:
            model = NeMoAutoModelForCausalLM.from_pretrained(
                config.model_name_or_path,
                dtype=torch.float32,
                attn_implementation=fsdp.attn_implementation,
                distributed_setup=setup,
                use_liger_kernel=False,
                trust_remote_code=fsdp.trust_remote_code,
            )
        except (OSError, HFValidationError) as error:
            raise ConfigError(
                f"the checkpoint {config.model_name_or_path!r} cannot be loaded ({str(error).splitlines()[0]}); "
                "check model_name_or_path"
            ) from error
    for module in model.modules():
        # The routers' balance loss depends on how the rows are cut into micro-batches, so it has no place here.
        if getattr(module, "aux_loss_coeff", 0):
            module.aux_loss_coeff = 0.0
    model.train()
    return model


def build_reference(path: str, fsdp: FsdpConfig, rank: Rank, temperature: float) -> Policy:
    """A frozen policy, sharded and computed like the trained one, so that equal checkpoints give equal log-probs."""
    model = build_model(TrainedModelConfig(model_name_or_path=path), fsdp, rank)
    return Policy(model.requires_grad_(False).eval(), rank, temperature)


class CausalModel:
    """A sharded causal language model, whose output embedding a subclass replaces by what it computes per position."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.rank = rank
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if self._head is None:
            raise ConfigError(f"{type(model).__name__} has no output embedding; choose a causal language model")
        self._check_head()

    def sync_gradients(self, enabled: bool) -> None:
        """Whether the next backward pass reduces gradients over the ranks, or only adds them up here."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)

    def reshard(self) -> None:
        """Put every parameter back into its sharded form; a forward pass without a backward leaves some gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def _replaced_head(self, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While it is open, ``forward`` maps the last hidden states (B, T, H) to what the model returns.

        It runs inside the output embedding's own call, so that the hooks of FSDP around it stay as they are.
        """
        self._head.forward = forward
        try:
            yield
        finally:
            del self._head.forward

    def _forward(self, batch: MicroBatch) -> Tensor:
        with self._autocast():
            output = self.model(
                input_ids=batch.ids, attention_mask=batch.attention, position_ids=batch.positions, use_cache=False
            )
        return output if isinstance(output, Tensor) else output.logits

    def _autocast(self) -> AbstractContextManager[Any]:
        """FSDP casts the weights; a model on one rank is not sharded and is cast here."""
        if isinstance(self.model, FSDPModule) or self.rank.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.rank.device.type, self.rank.dtype)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a model that changes what its output embedding returns: everything would be silently wrong."""
        ids = torch.arange(4, device=self.rank.device)[None]
        ones, nothing = torch.ones_like(ids), torch.zeros(0, device=self.rank.device)
        batch = MicroBatch(ids, ones, ids, ones[:, 1:].bool(), *[nothing] * 5)
        with self._replaced_head(lambda hidden: hidden.new_full((*hidden.shape[:-1], 1), _MARK)):
            output = self._forward(batch)
        self.reshard()
        if not (output == _MARK).all():
            raise ConfigError(
                f"{type(self.model).__name__} changes its logits after the output embedding (soft capping or scaling), "
                "which the trainer does not support; choose another model"
            )


class Policy(CausalModel):
    """A causal language model that gives the log-probs of chosen tokens. All methods are collective over the ranks."""

    def __init__(self, model: nn.Module, rank: Rank, temperature: float = 1.0) -> None:
        super().__init__(model, rank)
        self.temperature = temperature

    def score(
        self, batch: MicroBatch, *, entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (B, T-1) float32 of the batch's action tokens at the temperature, 0 elsewhere; and entropies.

        log softmax(logits / temperature) of the next token. Logits exist for the action positions only, HEAD_ROWS at a
        time, and are computed again in the backward pass. ``entropy``: also -Σ p log p of each
        distribution, (B, T-1), which has a gradient only with ``entropy_grad``.
        """
        with self._scoring_head(batch, (entropy, entropy_grad)):
            packed = self._forward(batch).float()
        width = batch.ids.shape[1]

        def spread(values: Tensor) -> Tensor:
            grid = values.new_zeros(batch.ids.numel()).index_copy(0, batch.index, values)
            return grid.view(-1, width)[:, :-1]

        return spread(packed[:, 0]), spread(packed[:, 1]) if entropy else None

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs (B, T-1) as of :meth:`score`, without a graph."""
        values, _ = self.score(batch)
        self.reshard()
        return values

    def hf_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their names in a Hugging Face checkpoint, tied copies left out; on the CPU of rank 0.

        Every rank must run the iterator to its end; ranks above 0 get nothing.
        """
        self.reshard()
        adapter = getattr(self.model, "state_dict_adapter", None)
        own = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - own
        for name, value in self.model.state_dict().items():
            if name in tied or name.endswith("_extra_state"):
                continue
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if not self.rank.is_main:
                continue
            pairs = adapter.convert_single_tensor_to_hf(name, full) if adapter else [(name, full)]
            for hf_name, tensor in pairs:
                tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
                yield hf_name, tensor.contiguous()

    def _scoring_head(self, batch: MicroBatch, entropy: tuple[bool, bool]) -> AbstractContextManager[None]:
        """While it is open, the model returns (N, 1 or 2) log-probs and entropies instead of (B, T, V) logits."""
        project = self._head.forward

        def forward(hidden: Tensor) -> Tensor:
            hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.index)
            chunks = zip(hidden.split(HEAD_ROWS), batch.targets.split(HEAD_ROWS), strict=True)
            return torch.cat(
                [
                    checkpoint(_token_scores, project, rows, ids, self.temperature, entropy, use_reentrant=False)
                    for rows, ids in chunks
                ]
            )

        return self._replaced_head(forward)


def _token_scores(
    project: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: float, entropy: tuple[bool, bool]
) -> Tensor:
    """Log-prob, and entropy if asked for (with gradient if asked for), of each row's target, (rows, 1 or 2) float32."""
    logp = (project(hidden).float() / temperature).log_softmax(-1)
    columns = [logp.gather(-1, targets[:, None])[:, 0]]
    wanted, with_gradient = entropy
    if wanted:
        source = logp if with_gradient else logp.detach()
        columns.append(-(source.exp() * source).sum(-1))
    return torch.stack(columns, -1)
