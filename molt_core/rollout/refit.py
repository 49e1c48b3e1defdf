"""Refit: give new weights to running engines, and prove that every parameter was replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt_core.blocking import run_blocking
from molt_core.rollout.actors import WeightsIncompleteError

if TYPE_CHECKING:
    import torch

    from molt_core.rollout.engine import Engine
    from molt_core.rollout.remote import RemoteEngine

logger = logging.getLogger("molt")


class Refitter:
    """Takes the trainer's weights to all engines. ``weights`` blocks and returns references to the chunks."""

    def __init__(self, engines: Sequence[Engine | RemoteEngine], weights: Callable[[], Sequence[Any]]) -> None:
        self.engines, self.weights = engines, weights

    async def refit(self, version: int) -> None:
        """Collect the weights while the engines still sample, then pause, load and resume."""
        chunk_refs = await run_blocking(self.weights)
        await refit(self.engines, chunk_refs, version)


async def refit(engines: Sequence[Engine | RemoteEngine], chunk_refs: Sequence[Any], version: int) -> None:
    """Load the weights into all engines at once; requests in flight wait and go on with the new weights.

    Tokens sampled afterwards carry ``version``. The engines resume also after an error, so that nothing hangs on it.
    """
    try:
        await _all(engine.pause() for engine in engines)
        await _all(engine.load_weights(chunk_refs, version) for engine in engines)
    finally:
        await _all(engine.resume() for engine in engines)


async def _all(calls: Iterator[Awaitable[None]]) -> None:
    """Wait for every call, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def send_to_workers(collective_rpc: Callable[..., Awaitable[list[Any]]], chunk_refs: Sequence[Any]) -> None:
    """Hand the chunks to an engine's workers, one after the other, as files in shared memory; then check.

    The files are readable by this user alone, and gone when this returns. All workers must be on this node.
    """
    await collective_rpc("molt_refit_begin")
    for ref in chunk_refs:
        chunk = ref if isinstance(ref, list) else await ref
        folder = await run_blocking(_write_chunk, chunk)
        try:
            await collective_rpc("molt_refit_chunk", args=(str(folder / _FILE),))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    results = await collective_rpc("molt_refit_finish")
    missing = sorted({name for one, _ in results for name in one})
    # A tensor of an expert that lives on another worker is ignored here and used there.
    ignored = sorted(set.intersection(*(set(names) for _, names in results)))
    if missing or ignored:
        raise WeightsIncompleteError(
            f"refit: {len(missing)} engine parameters were not replaced{_few(missing)}; "
            f"{len(ignored)} tensors have no place in the engine's model{_few(ignored)}"
        )


_FILE = "chunk.safetensors"


def _few(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})" if names else ""


def _write_chunk(chunk: Sequence[tuple[str, Any]]) -> Path:
    """Write one chunk into a new private folder, in shared memory if it fits, and return the folder."""
    import torch
    from safetensors.torch import save_file

    with warnings.catch_warnings():
        # Arrays from the object store are read-only, and are only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {
            name: (value if isinstance(value, torch.Tensor) else torch.from_numpy(value)).contiguous()
            for name, value in chunk
        }
    if len(tensors) != len(chunk):
        raise WeightsIncompleteError("refit: a name occurs twice in one chunk of weights")
    size = sum(tensor.nbytes for tensor in tensors.values())
    shared = Path("/dev/shm")
    fits = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * size
    folder = Path(tempfile.mkdtemp(prefix="molt-refit-", dir=shared if fits else None))
    try:
        save_file(tensors, folder / _FILE)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


class WeightReceiver:
    """Methods that vLLM mixes into its workers, called by ``collective_rpc``."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def molt_refit_begin(self) -> None:
        """Bring the parameters back into checkpoint layout, so that they can be loaded again."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # It warns of every layer without tensors of its own, at every refit; LoadCounter is the check here.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        self._molt_loads = LoadCounter(model)

    def molt_refit_chunk(self, path: str) -> None:
        """Load the tensors of one file. A layer becomes live when its last tensor arrived."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self._molt_loads.watch(_read_chunk(path)))

    def molt_refit_finish(self) -> tuple[list[str], list[str]]:
        """Put the rest in place; returns parameters that were not replaced and tensors that were not used."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        missing, unused = self._molt_loads.missing(), self._molt_loads.unused
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            unused = [name for name in unused if not name.endswith("lm_head.weight")]
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.model_config)
            _repack_for_cpu(model, self._molt_loads.tied)
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        return missing, unused


def _read_chunk(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a dict)
            yield name, file.get_tensor(name)


def _repack_for_cpu(model: torch.nn.Module, tied: Sequence[Any]) -> None:
    """Repack for the CPU kernels what vLLM 0.32 repacks at the first load only: experts, and tied output layers.

    Without it they compute from old or wrongly laid out weights, without an error.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        weight = getattr(layer, "w13_weight", None)
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(layer)
    for layer in tied:
        if all(parameter.device.type == "cpu" for parameter in layer.parameters()):
            layer.quant_method.process_weights_after_loading(layer)


class LoadCounter:
    """Watches one refit of a vLLM model that is prepared for layer-wise loading."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._model = model
        self._loads = 0
        self._names: set[str] = set()
        self.unused: list[str] = []
        """Tensors that no parameter took."""
        self.tied: list[torch.nn.Module] = []
        """Layers without tensors of their own, whose parameters are those of another layer; known after `missing`."""
        self._layers_of: dict[int, list[torch.nn.Module]] = defaultdict(list)
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights = _TickingList(self._tick)
            for parameter in (info.kernel_tensors or ({}, {}))[0].values():
                self._layers_of[id(parameter)].append(layer)

    def _tick(self) -> None:
        self._loads += 1

    def watch(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the weights on; a model loads each before it asks for the next."""
        for name, tensor in weights:
            if name in self._names:
                raise WeightsIncompleteError(f"refit: the weights contain {name} twice")
            self._names.add(name)
            before = self._loads
            yield name, tensor
            if self._loads == before:
                self.unused.append(name)

    def missing(self) -> list[str]:
        """Parameters of which not every value was loaded, with the counts. To be called before finalisation."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        missing = []
        for prefix, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            # A layer whose last value arrived is finished and can load no more. Attention scales are optional.
            if not info.can_load() or is_deferred_attention_layer(layer):
                continue
            if self._is_tied(info):
                self.tied.append(layer)
                continue
            loaded = _values_loaded(info.loaded_weights)
            for name, expected in _values_expected(layer).items():
                if loaded[name] < expected:
                    missing.append(f"{prefix}.{name} [{loaded[name]} of {expected} values]")
        return missing

    def _is_tied(self, info: Any) -> bool:
        """Whether nothing was loaded into this layer and all its parameters belong to a layer that is finished."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        parameters = info.kernel_tensors[0].values() if info.kernel_tensors else ()
        sharing = [self._layers_of[id(parameter)] for parameter in parameters]
        return bool(sharing) and all(
            any(not get_layerwise_info(layer).can_load() for layer in layers) for layers in sharing
        )


class _TickingList(list):
    """The list in which vLLM notes every load of a layer, with a callback."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self._tick = tick

    def append(self, item: Any) -> None:
        self._tick()
        super().append(item)


def _values_loaded(loads: Sequence[tuple[str, Any]]) -> dict[str, int]:
    """Values loaded per parameter, by running its loads again on the meta device, which moves no data."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import get_numel_loaded

    loaded: dict[str, int] = defaultdict(int)
    for name, arguments in loads:
        numel, _ = get_numel_loaded(_get_original_loader(arguments.arguments["param"]), arguments)
        loaded[name] += numel
    return loaded


def _values_expected(layer: torch.nn.Module) -> dict[str, int]:
    """Values that a checkpoint holds per parameter; vocabulary rows that exist for alignment only are not in it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    expected = {
        name: get_tensor_load_numel(parameter)
        for name, parameter in layer._parameters.items()
        if parameter is not None and name not in SKIP_LOAD_TENSORS
    }
    if isinstance(layer, VocabParallelEmbedding):
        shard = layer.shard_indices
        rows = shard.org_vocab_end_index - shard.org_vocab_start_index
        for name in expected:
            parameter = layer._parameters[name]
            assert parameter is not None
            expected[name] = rows * (parameter.numel() // parameter.shape[0])
    return expected
