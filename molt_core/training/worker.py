"""One training rank: a Ray actor that holds a shard of the policy and its optimizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.config.rl import CriticConfig
from molt_core.config.shared import FsdpConfig, ModelConfig
from molt_core.errors import ConfigError
from molt_core.memory import freeze_heap, keep_freed_memory
from molt_core.plugins import PluginSpec
from molt_core.training.rows import ObjectiveSpec, WeightedRow, WindowPlan, resolve_segments

if TYPE_CHECKING:
    import torch
    from ray import ObjectRef

    from molt_core.training.critic import Critic
    from molt_core.training.objective import MetricSums
    from molt_core.training.packing import MicroBatch
    from molt_core.training.trained import Trained

logger = logging.getLogger("molt")

CHUNK_BYTES = 256 * 2**20
_CRITIC = "critic"


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
    critic: CriticConfig | None = None
    num_critic_steps: int = 0


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
            keep_freed_memory()
        self._store: Any = None

    def rendezvous(self, host: str | None) -> tuple[str, int]:
        """On rank 0: open the group's meeting point at ``host``, this node's address if None."""
        import ray

        from molt_core.training.mesh import host_store

        host = host or ray.util.get_node_ip_address()
        self._store = host_store(host, self.world)
        return host, self._store.port

    def setup(self, host: str, port: int) -> None:
        """Join the group, build the models, their optimizers and the objective."""
        import torch
        import torch.distributed as dist

        from molt_core.training import mesh
        from molt_core.training.critic import build_critic
        from molt_core.training.policy import Policy, build_model, build_reference
        from molt_core.training.trained import Trained

        spec = self.spec
        self.set_objective(spec.objective)
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
        policy = Policy(build_model(spec.model, spec.fsdp, place), place, spec.temperature)
        self.policy = Trained.build(policy, spec.model, spec.num_optimizer_steps, "train")
        self.reference = build_reference(spec.reference, spec.fsdp, place, spec.temperature) if spec.reference else None
        self.critic: Trained[Critic] | None = None
        if spec.critic is not None:
            critic = build_critic(spec.critic, spec.fsdp, place, spec.seed)
            self.critic = Trained.build(critic, spec.critic, spec.num_critic_steps, "critic")
        self.pad_id: int = getattr(policy.model.config, "pad_token_id", None) or 0
        freeze_heap()

    def set_objective(self, spec: ObjectiveSpec) -> None:
        """Minimise this from the next update on."""
        from molt_core.training.objective import Objective

        self.objective = Objective(spec, self.spec.plugins)

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
                old[w] = [self.policy.net.logprobs(batch) for batch in windows[w]]
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

        from molt_core.algorithms.aggregate import Totals
        from molt_core.training.objective import Known

        totals = Totals(plan.tokens, plan.sequences, plan.prompts)
        seen: list[torch.Tensor] = []
        for k, batch in enumerate(window):
            self.policy.net.sync_gradients(k == len(window) - 1)
            logprobs, entropy = self.policy.net.score(
                batch,
                entropy=not self.objective.is_supervised,
                entropy_grad=self.objective.spec.entropy_coef != 0,
            )
            seen.append(logprobs.detach())
            known = Known(old[k] if old else seen[-1], reference[k])
            loss = self.objective.loss(batch, logprobs, entropy, known, totals, tally, kl_coef)
            name = "loss" if self.objective.is_supervised else "policy_loss"
            self.policy.backward(loss, name, 1 / len(window), tally)
        self.policy.step(tally)
        return seen

    def update_critic(self, plans: Sequence[WindowPlan], order: Sequence[int]) -> MetricSums:
        """One optimizer step of the critic per entry of ``order``; the rows carry returns in place of advantages."""
        from molt_core.algorithms.aggregate import Totals, aggregate
        from molt_core.algorithms.value import value_loss
        from molt_core.training.objective import Tally

        assert self.critic is not None, "there is no critic"
        assert self.spec.critic is not None
        tally = Tally()
        windows = [self._collate(plan) for plan in plans]
        old = [[self.critic.net.values(b)[:, :-1] for b in w] for w in windows] if len(order) > 1 else None
        for w in order:
            plan, window = plans[w], windows[w]
            totals = Totals(plan.tokens, plan.sequences, plan.prompts)
            for k, batch in enumerate(window):
                self.critic.net.sync_gradients(k == len(window) - 1)
                values = self.critic.net.score(batch)[:, :-1]
                before = old[w][k] if old else values.detach()
                clip = self.spec.critic.value_clip or None
                loss, metrics = value_loss(values, before, batch.advantages, batch.mask, clip)
                tally.add_masked({f"critic/{name}": value for name, value in metrics.items()}, batch.mask)
                total = aggregate(loss, batch.mask, "token-mean", totals)
                self.critic.backward(total, "value_loss", 1 / len(window), tally)
            self.critic.step(tally)
        return tally.result()

    def logprobs(self, micro_batches: Sequence[Sequence[WeightedRow]]) -> list[list[np.ndarray]]:
        """Log-probs (T-1,) float32 of every row under the current weights, 0 off the actions."""
        return self._per_row(micro_batches, self.policy.net.logprobs)

    def token_kl(self, micro_batches: Sequence[Sequence[WeightedRow]], estimator: str) -> list[list[np.ndarray]]:
        """KL (T-1,) float32 of every row, of the current weights to the reference model, 0 off the actions."""
        from molt_core.algorithms.kl import token_kl

        reference = self.reference
        assert reference is not None, "a KL needs a reference model"
        return self._per_row(
            micro_batches,
            lambda batch: token_kl(self.policy.net.logprobs(batch), reference.logprobs(batch), batch.mask, estimator),
        )

    def values(self, micro_batches: Sequence[Sequence[WeightedRow]]) -> list[list[np.ndarray]]:
        """The critic's values (T,) float32 of every row, one per state."""
        assert self.critic is not None, "there is no critic"
        return self._per_row(micro_batches, self.critic.net.values)

    def _per_row(
        self, micro_batches: Sequence[Sequence[WeightedRow]], compute: Callable[[MicroBatch], torch.Tensor]
    ) -> list[list[np.ndarray]]:
        """``compute`` (B, T or T-1) of every micro-batch, without the padding of each row, on the host."""
        plan = WindowPlan(tuple(tuple(rows) for rows in micro_batches), 0, 0, 0)
        results = []
        for rows, batch in zip(plan.micro_batches, self._collate(plan), strict=True):
            values = compute(batch).cpu().numpy()
            shorter = batch.ids.shape[1] - values.shape[1]
            results.append([values[i, : item.row.length - shorter] for i, item in enumerate(rows)])
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
            ).to(self.policy.net.rank.device)
            for rows in plan.micro_batches
        ]

    def weights(self) -> list[ObjectRef]:
        """References to lists of (name in the HF checkpoint, full tensor), at most 256 MiB each; none above rank 0.

        Tensors have the compute dtype: numpy arrays in float32, torch tensors otherwise.
        """
        import ray

        from molt_core.training.export import chunked

        pairs = self.policy.net.hf_weights(self.policy.net.rank.dtype)
        return [ray.put(chunk) for chunk in chunked(pairs, CHUNK_BYTES)]

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Write the resumable state of all ranks into ``directory``."""
        from molt_core.training.state import save_model, save_state

        if self.critic is not None:
            save_model(directory / _CRITIC, *self.critic.stateful, self.critic.net.rank)
        save_state(directory, *self.policy.stateful, self.policy.net.rank, extra)

    def load(self, directory: Path) -> dict[str, Any]:
        """Read what :meth:`save` wrote, under any number of ranks. ConfigError if it lacks this run's critic."""
        from molt_core.training.state import load_model, load_state

        there = (directory / _CRITIC).is_dir()
        if self.critic is not None:
            if not there:
                raise ConfigError(
                    f"the checkpoint {directory} holds no critic, so a run with one cannot go on from it: start afresh "
                    "with another --ckpt.path, or choose the estimator that it was made with"
                )
            load_model(directory / _CRITIC, *self.critic.stateful)
        elif there and self.rank == 0:
            logger.warning("the critic in the checkpoint %s is not used: the estimator needs none", directory)
        return load_state(directory, *self.policy.stateful, self.policy.net.rank)

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint of the current weights."""
        from molt_core.training.export import export_checkpoint

        export_checkpoint(
            self.policy.net, self.spec.model.model_name_or_path, directory, self.spec.fsdp.trust_remote_code
        )


def _quiet_libraries() -> None:
    """No progress bars from a rank's process."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
