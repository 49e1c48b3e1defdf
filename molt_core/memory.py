"""Memory of the processes that a run keeps for long."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # names of mallopt's parameters in malloc.h


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks, activations and logits above all, that it would give back and fault in anew."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def freeze_heap() -> None:
    """Keep what was made so far out of garbage collection; to be called when a process is set up.

    A full collection that visits the modules of torch and vLLM stops the process for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
