"""What NeMo AutoModel needs to build a model on a machine without a GPU.

AutoModel asks for ``torch.cuda.current_device()`` while it constructs a model and puts tensors on the device of that
index. Inside :func:`automodel_on_cpu` the index is 0 and every CUDA device is read as the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class _CudaMeansCpu(TorchFunctionMode):
    """Reads every CUDA device, object, string or bare index, as the CPU."""

    _TAKES_INDEX = (torch.device, torch.Tensor.to, torch._C._nn._parse_to)
    """Functions that take a bare device index as a positional argument."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cpu")
        if func in self._TAKES_INDEX:
            args = tuple("cpu" if _is_cuda(a) or type(a) is int else a for a in args)
            if func is torch.device:
                args = args[:1]  # torch.device("cuda", 0): the second "cpu" was the index
        return func(*args, **kwargs)


@contextmanager
def automodel_on_cpu() -> Iterator[None]:
    """Let AutoModel construct a model on the CPU. Only for construction: it costs Python time per torch call."""
    with mock.patch.object(torch.cuda, "current_device", return_value=0), _CudaMeansCpu():
        yield
