"""Full weights leaving the training group: as chunks for the engines, and as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from molt_core.training.policy import Policy

SHARD_BYTES = 5 * 10**9


def chunked(pairs: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Group (name, tensor) pairs into lists of at most ``max_bytes``; a larger tensor is alone in its list.

    Float32 tensors become numpy arrays, which readers of Ray's object store map without a copy.
    """
    chunk: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in pairs:
        if chunk and size + tensor.nbytes > max_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor.numpy() if tensor.dtype is torch.float32 else tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def export_checkpoint(policy: Policy, source: str, directory: Path, trust_remote_code: bool) -> None:
    """Write safetensors, configuration and tokenizer so that transformers and vLLM load them. Collective.

    Weights have the compute dtype. The folder appears under its name when it is complete.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    tmp = directory.with_name(directory.name + ".tmp")
    if policy.rank.is_main:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    shards: list[dict[str, int]] = []
    for chunk in chunked(policy.hf_weights(policy.rank.dtype), SHARD_BYTES):
        tensors = {name: torch.as_tensor(value) for name, value in chunk}
        save_file(tensors, tmp / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in tensors.items()})
    if not policy.rank.is_main:
        return
    _name_shards(tmp, shards)
    _write_configuration(tmp, source, policy.rank.dtype, trust_remote_code)
    if directory.exists():
        shutil.rmtree(directory)
    tmp.rename(directory)


def _name_shards(directory: Path, shards: list[dict[str, int]]) -> None:
    """Give the files the names that loaders expect, and write their index where there is more than one."""
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    files: dict[str, str] = {}
    for i, names in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{i}.safetensors").rename(directory / name)
        files |= dict.fromkeys(names, name)
    size = sum(nbytes for names in shards for nbytes in names.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_configuration(directory: Path, source: str, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Copy configuration, generation defaults and tokenizer from the checkpoint that training started from."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    config.dtype = dtype
    config.save_pretrained(directory)
    try:
        GenerationConfig.from_pretrained(source).save_pretrained(directory)
    except OSError:
        GenerationConfig.from_model_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(directory)
