"""The training ranks as the driver sees them: one object, whose methods block."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molt_core.config.rl import CriticConfig
from molt_core.config.shared import FsdpConfig, ModelConfig
from molt_core.errors import ConfigError, RunError
from molt_core.plugins import PluginSpec
from molt_core.training.packing import partition, plan_window
from molt_core.training.rows import ObjectiveSpec, TrainRow, WeightedRow, WindowPlan
from molt_core.training.worker import TrainWorker, WorkerSpec

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from molt_core.training.objective import MetricSums

logger = logging.getLogger("molt")

_PLACEMENT_SECONDS = 300.0


class TrainingError(RunError):
    """A training rank failed; the group cannot go on and should be closed."""


class TrainGroup:
    """A policy trained by one Ray actor per rank. Build it with :meth:`start`, end it with :meth:`close`.

    Every method runs on all ranks and returns when all have finished. An error in one rank is raised here at once, as a
    ConfigError if the user can fix it, else as a TrainingError.
    """

    def __init__(self, workers: Sequence[ActorHandle], placement: Any = None) -> None:
        self._workers = list(workers)
        self._placement = placement

    @classmethod
    def start(
        cls,
        model: ModelConfig,
        fsdp: FsdpConfig,
        *,
        device: str,
        seed: int = 42,
        cpu_threads: int = 1,
        num_optimizer_steps: int,
        temperature: float = 1.0,
        objective: ObjectiveSpec,
        plugins: PluginSpec | None = None,
        reference: str | None = None,
        critic: CriticConfig | None = None,
        num_critic_steps: int = 0,
    ) -> TrainGroup:
        """Start num_nodes x num_gpus_per_node ranks and build the model on them.

        ``device``: "cuda", one GPU per rank, or "cpu", ``cpu_threads`` threads per rank. ``num_optimizer_steps``: the
        length of the learning-rate schedule. ``temperature``: that of the log-probs. ``reference``: checkpoint of the
        reference model, which every rank holds a frozen shard of. ``critic``: a value model in the same ranks, trained
        for ``num_critic_steps``. Raises ConfigError when the cluster does not have the GPUs, or when model, schedule or
        loss are not usable.
        """
        import ray

        from molt_core.training.mesh import check_parallelism

        check_parallelism(fsdp)
        world = model.num_nodes * model.num_gpus_per_node
        spec = WorkerSpec(
            model,
            fsdp,
            device,
            seed,
            cpu_threads,
            num_optimizer_steps,
            temperature,
            objective,
            plugins or PluginSpec(),
            reference,
            critic,
            num_critic_steps,
        )
        placement = _place(model) if device == "cuda" else None
        actor: Any = ray.remote(TrainWorker)
        workers: list[ActorHandle] = [
            actor.options(**_actor_options(model, device, rank, placement)).remote(rank, world, spec)
            for rank in range(world)
        ]
        group = cls(workers, placement)
        try:
            local = "127.0.0.1" if model.num_nodes == 1 else None
            host, port = _wait([workers[0].rendezvous.remote(local)], "rendezvous")[0]
            group._call("setup", host, port)
        except BaseException:
            group.close()
            raise
        return group

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._workers)

    def set_objective(self, objective: ObjectiveSpec) -> None:
        """Minimise something else from the next update on; models and optimizers stay as they are."""
        self._call("set_objective", objective)

    def update(
        self,
        windows: Sequence[Sequence[TrainRow]],
        *,
        max_tokens: int = 16384,
        micro_batch_size: int | None = None,
        recompute_old: bool = False,
        kl_coef: float = 0.0,
    ) -> dict[str, float]:
        """One optimizer step per window, on all ranks, with one denominator per window; returns metrics.

        ``max_tokens``: padded tokens per micro-batch, or ``micro_batch_size`` rows. ``recompute_old``: the old
        log-probs of every row are those of the weights before the first window, needed where there is more than one;
        otherwise a row's old log-probs are its current ones. A window listed again (the same object) is another
        pass over it. A window without an action token is not a step; it is counted in ``train/empty_windows``.
        ``kl_coef``: the weight of the KL term, if the objective has one.
        """
        plan = self._plan(windows, max_tokens, micro_batch_size)
        return self._steps("update", "train", plan, recompute_old, kl_coef)

    def update_critic(
        self, windows: Sequence[Sequence[TrainRow]], *, max_tokens: int = 16384, micro_batch_size: int | None = None
    ) -> dict[str, float]:
        """The same for the critic; the rows carry returns in place of advantages. Metrics are ``critic/*``."""
        return self._steps("update_critic", "critic", self._plan(windows, max_tokens, micro_batch_size))

    def _plan(
        self, windows: Sequence[Sequence[TrainRow]], max_tokens: int, micro_batch_size: int | None
    ) -> tuple[list[list[WindowPlan]], list[int], int]:
        """Plans per rank of all different windows, the order of the steps, and how many windows are no step."""
        unique: dict[int, int] = {}
        order = [unique.setdefault(id(window), len(unique)) for window in windows if any(r.num_actions for r in window)]
        by_id = {id(window): window for window in windows}
        planned = [
            plan_window(by_id[key], self.world_size, max_tokens=max_tokens, micro_batch_size=micro_batch_size)
            for key in unique
        ]
        per_rank = [[plans[rank] for plans in planned] for rank in range(self.world_size)]
        return per_rank, order, len(windows) - len(order)

    def _steps(
        self, method: str, prefix: str, plan: tuple[list[list[WindowPlan]], list[int], int], *more: Any
    ) -> dict[str, float]:
        per_rank, order, empty = plan
        if empty:
            logger.warning("%d of %d windows have no action token and are not trained", empty, empty + len(order))
        metrics = {f"{prefix}/optimizer_steps": float(len(order)), f"{prefix}/empty_windows": float(empty)}
        if order:
            metrics |= merge(self._call_each(method, [(plans, order, *more) for plans in per_rank]))
            metrics[f"{prefix}/optimizer_steps"] -= metrics[f"{prefix}/skipped_steps"]
        return metrics

    def logprobs(self, rows: Sequence[TrainRow], *, max_tokens: int = 16384) -> list[np.ndarray]:
        """Log-probs of each row's actions under the current weights and the temperature, (T-1,), 0 off the actions."""
        return self._per_row("logprobs", rows, max_tokens)

    def token_kl(self, rows: Sequence[TrainRow], estimator: str, *, max_tokens: int = 16384) -> list[np.ndarray]:
        """KL of the current policy to the reference model on each row's actions, (T-1,), 0 off the actions.

        ``estimator``: "k1", "k2" or "k3" (algorithms.kl). The group must have been started with a reference.
        """
        return self._per_row("token_kl", rows, max_tokens, estimator)

    def values(self, rows: Sequence[TrainRow], *, max_tokens: int = 16384) -> list[np.ndarray]:
        """The critic's values of each row's states, (T,): entry k after token k, so that [:-1] is next-token."""
        return self._per_row("values", rows, max_tokens)

    def _per_row(self, method: str, rows: Sequence[TrainRow], max_tokens: int, *more: Any) -> list[np.ndarray]:
        """One array per row, in the order of the rows, from a method of the ranks that takes micro-batches."""
        ranks = partition([row.length for row in rows], self.world_size, max_tokens=max_tokens)
        arguments = [([[WeightedRow(rows[i]) for i in chunk] for chunk in rank], *more) for rank in ranks]
        out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for rank, results in zip(ranks, self._call_each(method, arguments), strict=True):
            for chunk, values in zip(rank, results, strict=True):
                for i, value in zip(chunk, values, strict=True):
                    out[i] = value
        return out

    def weights(self) -> list[ObjectRef]:
        """References to chunks of the full weights, each a list of (name in the Hugging Face checkpoint, tensor).

        They live in the object store of rank 0's node as long as the references do, and never pass through the driver.
        """
        return self._call("weights")[0]

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write everything that :meth:`load` needs into an existing folder; ``state`` becomes ``state.json`` there."""
        self._call("save", Path(directory).absolute(), state)

    def load(self, directory: Path) -> dict[str, Any]:
        """Go on from a folder that :meth:`save` wrote, under any number of ranks; returns its ``state``."""
        return self._call("load", Path(directory).absolute())[0]

    def export_hf(self, directory: Path) -> None:
        """Write a checkpoint that transformers and vLLM load, tokenizer included."""
        self._call("export_hf", Path(directory).absolute())

    def close(self) -> None:
        """End all ranks and give their GPUs back. May be called twice."""
        import ray

        workers, placement = self._workers, self._placement
        self._workers, self._placement = [], None
        if not ray.is_initialized():
            return
        for worker in workers:
            ray.kill(worker)
        if placement is not None:
            ray.util.remove_placement_group(placement)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_each(method, [arguments] * self.world_size)

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert self._workers, "the training group is closed"
        return _wait([getattr(w, method).remote(*a) for w, a in zip(self._workers, arguments, strict=True)], method)


def merge(parts: Sequence[MetricSums]) -> dict[str, float]:
    """Metrics of all ranks: Σ sums / Σ counts, the sum of events, the largest maximum; none where all counts are 0."""
    merged = {}
    for name in sorted({name for part in parts for name in part.sums}):
        total = sum(part.sums.get(name, 0.0) for part in parts)
        counts = [part.counts[name] for part in parts if name in part.counts]
        if not counts:
            merged[name] = total
        elif any(counts):
            merged[name] = total / sum(counts)
    for name in sorted({name for part in parts for name in part.maxima}):
        merged[name] = max(part.maxima[name] for part in parts if name in part.maxima)
    return merged


def _wait(refs: Sequence[ObjectRef], method: str) -> list[Any]:
    """Results in order. The first failure is raised at once: the other ranks may be waiting for the failed one."""
    import ray

    ranks = {ref: rank for rank, ref in enumerate(refs)}
    pending = list(refs)
    results: dict[ObjectRef, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        for ref in done:
            try:
                results[ref] = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise ConfigError(str(error.cause)) from None
                logger.debug("training rank %d: %s", ranks[ref], error)
                cause = error.cause if error.cause is not None else error
                raise TrainingError(
                    f"training rank {ranks[ref]} failed in {method}: {type(cause).__name__}: {cause}"
                ) from error
            except ray.exceptions.RayActorError as error:
                raise TrainingError(
                    f"training rank {ranks[ref]} died in {method}: {str(error).splitlines()[0]}"
                ) from error
    return [results[ref] for ref in refs]


def _actor_options(model: ModelConfig, device: str, rank: int, placement: Any) -> dict[str, Any]:
    """A rank's share of the cluster: a GPU in its node's bundle; on CPU nothing, for its threads are counted."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "num_gpus": 1 if device == "cuda" else 0}
    if placement is not None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement, placement_group_bundle_index=rank // model.num_gpus_per_node
        )
    return options


def _place(model: ModelConfig) -> Any:
    """One bundle of GPUs per node; ConfigError when the cluster does not have them, now or soon."""
    import ray

    world = model.num_nodes * model.num_gpus_per_node
    there = int(ray.cluster_resources().get("GPU", 0))
    if there < world:
        raise ConfigError(
            f"training asks for {model.num_nodes} x {model.num_gpus_per_node} GPUs, but the cluster has {there}; lower "
            "num_nodes or num_gpus_per_node, or write --device cpu"
        )
    bundles = [{"GPU": model.num_gpus_per_node}] * model.num_nodes
    placement = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if model.num_nodes > 1 else "PACK")
    if not placement.wait(_PLACEMENT_SECONDS):
        ray.util.remove_placement_group(placement)
        raise ConfigError(
            f"the {world} GPUs for training did not become free on {model.num_nodes} nodes within "
            f"{_PLACEMENT_SECONDS:.0f} s; ask for fewer GPUs, or stop what uses them"
        )
    return placement
