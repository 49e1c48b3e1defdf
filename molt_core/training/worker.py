"""One training rank: a Ray actor that holds a shard of the policy and its optimizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.config.shared import FsdpConfig, ModelConfig
from molt_core.plugins import PluginSpec
from molt_core.training.rows import ObjectiveSpec, WeightedRow, WindowPlan, resolve_segments

if TYPE_CHECKING:
    import torch
    from ray import ObjectRef

    from molt_core.training.objective import MetricSums
    from molt_core.training.packing import MicroBatch

logger = logging.getLogger("molt")

CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a rank is built from; the same for all ranks."""

    model: ModelConfig
    fsdp: FsdpConfig
    device: str
    seed: int
    cpu_threads: int
    num_optimizer_steps: int
    temperature: float
    objective: ObjectiveSpec
    plugins: PluginSpec
    reference: str | None = None


class TrainWorker:
    """The methods of a training rank. All ranks must call the same methods in the same order.

    ``rendezvous`` and ``setup`` come first. Windows are plans made by the driver, whose micro-batch counts are equal on
    all ranks; metrics are returned as local sums, so that no metric costs a collective.
    """

    def __init__(self, rank: int, world: int, spec: WorkerSpec) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if spec.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # AutoModel takes a GPU where it sees one
        import torch

        self.rank, self.world, self.spec = rank, world, spec
        if spec.device == "cpu":
            torch.set_num_threads(spec.cpu_threads)
        self._store: Any = None

    def rendezvous(self, host: str | None) -> tuple[str, int]:
        """On rank 0: open the group's meeting point at ``host``, this node's address if None."""
        import ray

        from molt_core.training.mesh import host_store

        host = host or ray.util.get_node_ip_address()
        self._store = host_store(host, self.world)
        return host, self._store.port

    def setup(self, host: str, port: int) -> None:
        """Join the group, build the model, the optimizer and the objective."""
        import torch
        import torch.distributed as dist

        from molt_core.training import mesh
        from molt_core.training.objective import Objective
        from molt_core.training.optimizers import build_optimizer, build_scheduler
        from molt_core.training.policy import Policy, build_model, build_reference

        spec = self.spec
        self.objective = Objective(spec.objective, spec.plugins)
        _quiet_libraries()
        if self._store is None:
            self._store = dist.TCPStore(host, port, self.world, is_master=False)
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu")
        if spec.device == "cuda":
            torch.cuda.set_device(device)
        mesh.init_process_group(self.rank, self.world, spec.device, self._store)
        torch.manual_seed(spec.seed)
        place = mesh.Rank(self.rank, self.world, device, mesh.compute_dtype(spec.fsdp.param_dtype, spec.device))
        model = build_model(spec.model, spec.fsdp, place)
        self.policy = Policy(model, place, spec.temperature)
        self.reference = build_reference(spec.reference, spec.fsdp, place, spec.temperature) if spec.reference else None
        self.optimizer = build_optimizer(model.parameters(), spec.model.adam)
        self.scheduler = build_scheduler(self.optimizer, spec.model, spec.num_optimizer_steps)
        self.pad_id: int = getattr(model.config, "pad_token_id", None) or 0

    def update(
        self, plans: Sequence[WindowPlan], order: Sequence[int], recompute_old: bool, kl_coef: float = 0.0
    ) -> MetricSums:
        """One optimizer step per entry of ``order``, an index into ``plans``."""
        from molt_core.training.objective import Tally, add_mismatch

        tally = Tally()
        windows = [self._collate(plan) for plan in plans]
        old: list[list[torch.Tensor] | None] = [None] * len(windows)
        if recompute_old and not self.objective.is_supervised:
            for w in sorted(set(order) - {order[0]}):
                old[w] = [self.policy.logprobs(batch) for batch in windows[w]]
        reference = [self._reference_logprobs(window) for window in windows]
        for n, w in enumerate(order):
            seen = self._step(plans[w], windows[w], old[w], reference[w], kl_coef, tally)
            if n == 0:
                first = seen
                old[w] = seen if recompute_old else None
        if not self.objective.is_supervised:
            before = zip(old, windows, strict=True) if recompute_old else [(first, windows[order[0]])]
            for known, window in before:
                for values, batch in zip(known or (), window, strict=True):
                    add_mismatch(tally, values, batch)
        return tally.result()

    def _reference_logprobs(self, window: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        if not self.objective.needs_reference:
            return [None] * len(window)
        assert self.reference is not None, "the objective needs a reference model"
        return [self.reference.logprobs(batch) for batch in window]

    def _step(
        self,
        plan: WindowPlan,
        window: list[MicroBatch],
        old: list[torch.Tensor] | None,
        reference: list[torch.Tensor | None],
        kl_coef: float,
        tally: Any,
    ) -> list[torch.Tensor]:
        """Forward and backward over a window's micro-batches, then the optimizer. Returns the log-probs that it saw."""
        import torch

        from molt_core.algorithms.aggregate import Totals
        from molt_core.training.objective import Known

        totals = Totals(plan.tokens, plan.sequences, plan.prompts)
        seen: list[torch.Tensor] = []
        for k, batch in enumerate(window):
            self.policy.sync_gradients(k == len(window) - 1)
            logprobs, entropy = self.policy.score(
                batch,
                entropy=not self.objective.is_supervised,
                entropy_grad=self.spec.objective.entropy_coef != 0,
            )
            seen.append(logprobs.detach())
            known = Known(old[k] if old else seen[-1], reference[k])
            loss = self.objective.loss(batch, logprobs, entropy, known, totals, tally, kl_coef)
            name = "train/loss" if self.objective.is_supervised else "train/policy_loss"
            finite = loss.detach().isfinite()
            tally.add(
                name, torch.where(finite, loss.detach().double(), 0.0), finite * float(self.rank == 0) / len(window)
            )
            # A loss that is not finite makes every gradient NaN on every rank, so that all of them skip the step.
            (loss * self.world * torch.where(finite, 1.0, torch.nan)).backward()
        self._optimize(tally)
        return seen

    def _optimize(self, tally: Any) -> None:
        """Clip, step and schedule; a gradient norm that is not finite skips the step on all ranks alike."""
        import math

        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        norm = scale_grads_and_clip_grad_norm(self.spec.model.max_norm or math.inf, [self.policy.model])
        norm = float(norm)
        main = float(self.rank == 0)
        tally.add("train/lr", main * self.scheduler.get_last_lr()[0], main)
        tally.add_event("train/skipped_steps", main * (not math.isfinite(norm)))
        if math.isfinite(norm):
            tally.add("train/grad_norm", main * norm, main)
            self.optimizer.step()
            self.scheduler.step()
        elif self.rank == 0:
            logger.warning("the gradient norm is %s: the optimizer step is skipped", norm)
        self.optimizer.zero_grad(set_to_none=True)

    def logprobs(self, micro_batches: Sequence[Sequence[WeightedRow]]) -> list[list[np.ndarray]]:
        """Log-probs (T-1,) float32 of every row under the current weights, 0 off the actions."""
        return self._per_row(micro_batches, self.policy.logprobs)

    def token_kl(self, micro_batches: Sequence[Sequence[WeightedRow]], estimator: str) -> list[list[np.ndarray]]:
        """KL (T-1,) float32 of every row, of the current weights to the reference model, 0 off the actions."""
        from molt_core.algorithms.kl import token_kl

        reference = self.reference
        assert reference is not None, "a KL needs a reference model"
        return self._per_row(
            micro_batches,
            lambda batch: token_kl(self.policy.logprobs(batch), reference.logprobs(batch), batch.mask, estimator),
        )

    def _per_row(
        self, micro_batches: Sequence[Sequence[WeightedRow]], compute: Callable[[MicroBatch], torch.Tensor]
    ) -> list[list[np.ndarray]]:
        """``compute`` (B, L) of every micro-batch, cut to the rows' own T-1 and taken to the host."""
        plan = WindowPlan(tuple(tuple(rows) for rows in micro_batches), 0, 0, 0)
        results = []
        for rows, batch in zip(plan.micro_batches, self._collate(plan), strict=True):
            values = compute(batch).cpu().numpy()
            results.append([values[i, : item.row.length - 1] for i, item in enumerate(rows)])
        return results

    def _collate(self, plan: WindowPlan) -> list[MicroBatch]:
        from molt_core.training.packing import collate

        segments = iter(resolve_segments([item.row for rows in plan.micro_batches for item in rows]))
        return [
            collate(
                [next(segments) for _ in rows],
                [item.row.advantage for item in rows],
                [item.weight for item in rows],
                self.pad_id,
            ).to(self.policy.rank.device)
            for rows in plan.micro_batches
        ]

    def weights(self) -> list[ObjectRef]:
        """References to lists of (name in the HF checkpoint, full tensor), at most 256 MiB each; none above rank 0.

        Tensors have the compute dtype: numpy arrays in float32, torch tensors otherwise.
        """
        import ray

        from molt_core.training.export import chunked

        pairs = self.policy.hf_weights(self.policy.rank.dtype)
        return [ray.put(chunk) for chunk in chunked(pairs, CHUNK_BYTES)]

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Write the resumable state of all ranks into ``directory``."""
        from molt_core.training.state import save_state

        self.policy.reshard()
        save_state(directory, self.policy.model, self.optimizer, self.scheduler, self.policy.rank, extra)

    def load(self, directory: Path) -> dict[str, Any]:
        """Read what :meth:`save` wrote, under any number of ranks."""
        from molt_core.training.state import load_state

        self.policy.reshard()
        return load_state(directory, self.policy.model, self.optimizer, self.scheduler, self.policy.rank)

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint of the current weights."""
        from molt_core.training.export import export_checkpoint

        export_checkpoint(self.policy, self.spec.model.model_name_or_path, directory, self.spec.fsdp.trust_remote_code)


def _quiet_libraries() -> None:
    """No progress bars from a rank's process."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
