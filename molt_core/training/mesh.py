"""Process group, device and sharding of one training rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from molt_core.config.shared import FsdpConfig
from molt_core.errors import ConfigError

if TYPE_CHECKING:
    from nemo_automodel.components.distributed.config import DistributedSetup

_TIMEOUT = timedelta(minutes=30)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Rank:
    """Where this process stands. ``dtype`` is the dtype of the computation; master weights are float32."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def check_parallelism(fsdp: FsdpConfig) -> None:
    """Refuse what the trainer does not do. Raises ConfigError."""
    for name in ("tp_size", "cp_size", "ep_size"):
        size = getattr(fsdp, name)
        if size != 1:
            raise ConfigError(f"fsdp.{name} is {size}, but the trainer only shards data-parallel so far; set it to 1")
    if fsdp.param_dtype == "fp16":
        raise ConfigError("fsdp.param_dtype fp16 needs loss scaling, which the trainer does not do; use bf16 or fp32")


def compute_dtype(param_dtype: str, device: str) -> torch.dtype:
    """The dtype of forward and backward: as asked, or bfloat16 on CUDA and float32 on CPU."""
    if param_dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return _DTYPES[param_dtype]


def host_store(host: str, world: int) -> dist.TCPStore:
    """The rendezvous of a group, listening on ``host`` only, on a port of the system's choice."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, world, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def init_process_group(rank: int, world: int, device: str, store: dist.Store) -> None:
    """Join the group: NCCL on CUDA (with gloo for CPU tensors), gloo on CPU."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)


def build_setup(dtype: torch.dtype, gradient_checkpoint: bool) -> DistributedSetup:
    """AutoModel's description of the sharding: FSDP2 over all ranks, gradients reduced in float32."""
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    )
    return DistributedSetup.build(
        strategy=FSDP2Config(mp_policy=policy),
        parallelism_sizes=ParallelismSizes(),
        activation_checkpointing=gradient_checkpoint,
    )
