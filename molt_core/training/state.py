"""What a rank must store to go on as if it had not stopped, in a form that any number of ranks can load.

Model and optimizer tensors go through torch's distributed checkpoint, the random state of each rank into safetensors,
everything else into JSON. Hyper-parameters are not stored: they come from the configuration.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from molt_core.training.mesh import Rank

logger = logging.getLogger("molt")

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE, _EXTRA = "training.json", "state.json"
_SCHEDULE = ("last_epoch", "_step_count")
_TABLE_OF_CONTENTS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath"),
}
"""The names that the table of contents of a checkpoint is made of."""


def save_state(
    directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, rank: Rank, extra: dict[str, Any]
) -> None:
    """Write everything below ``directory``. Collective."""
    save_model(directory, model, optimizer, scheduler, rank)
    random = {"cpu": torch.get_rng_state()}
    if rank.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(rank.device)
    save_file(random, directory / f"random_{rank.rank}.safetensors")
    if rank.is_main:
        (directory / _EXTRA).write_text(json.dumps(extra))
    dist.barrier()


def load_state(
    directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, rank: Rank
) -> dict[str, Any]:
    """Read what :func:`save_state` wrote, under any number of ranks; returns ``extra``. Collective."""
    world = load_model(directory, model, optimizer, scheduler)
    random = directory / f"random_{rank.rank}.safetensors"
    if world == rank.world:
        states = load_file(random)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and rank.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], rank.device)
    elif rank.is_main:
        logger.warning("the checkpoint is of %d ranks, not %d: random states start anew", world, rank.world)
    extra: dict[str, Any] = json.loads((directory / _EXTRA).read_text())
    return extra


def save_model(directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, rank: Rank) -> None:
    """Write a model with its optimizer and schedule below ``directory``. Collective."""
    with _plain_errors("saved"):
        dcp.save(_tensors(model, optimizer), checkpoint_id=directory / "dcp")
    if rank.is_main:
        kept = {k: v for k, v in scheduler.state_dict().items() if k in _SCHEDULE}
        (directory / _STATE).write_text(json.dumps({"scheduler": kept, "world": rank.world}))


def load_model(directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> int:
    """Read what :func:`save_model` wrote; returns the number of ranks that wrote it. Collective."""
    state = json.loads((directory / _STATE).read_text())
    tensors = _tensors(model, optimizer)
    with _plain_errors("loaded"):
        dcp.load(tensors, storage_reader=_SafeReader(directory / "dcp"))
    set_model_state_dict(model, tensors["model"])
    moments = get_optimizer_state_dict(model, optimizer, options=_FLAT) | tensors["optimizer"]
    set_optimizer_state_dict(model, optimizer, moments, options=_FLAT)
    scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    # The place in the schedule is the checkpoint's, the rates are the configuration's.
    assert isinstance(scheduler, LambdaLR), "every schedule of build_scheduler is a factor of the base rate"
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    scheduler._last_lr = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, lr in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = lr
    return int(state["world"])


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    if not optimizer.state:
        # torch makes the moments of a fresh optimizer by a step without gradients; it must not count as one.
        get_optimizer_state_dict(model, optimizer)
        for state in optimizer.state.values():
            state["step"].zero_()
    moments = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    moments = {name: value for name, value in moments.items() if isinstance(value, torch.Tensor)}
    return {"model": get_model_state_dict(model), "optimizer": moments}


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception: left alone it would end the process."""
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise RuntimeError(f"the training state cannot be {what}: {causes}") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of a checkpoint's table of contents, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _TABLE_OF_CONTENTS.get(module, ()):
            raise pickle.UnpicklingError(f"a checkpoint may not contain {module}.{name}")
        return super().find_class(module, name)


class _SafeReader(FileSystemReader):
    """torch's reader, without running code from the file that it reads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
