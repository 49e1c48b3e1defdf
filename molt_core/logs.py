"""Where the logger "molt" writes: coloured on a terminal, plain lines elsewhere, always to stderr."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def setup_logging(level: int = logging.INFO) -> None:
    """Give the logger "molt" its one handler. May be called again."""
    quiet_libraries()
    logger = logging.getLogger("molt")
    logger.setLevel(level)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(_handler())


_IGNORED = ("FutureWarning", "DeprecationWarning", "UserWarning:megatron_fsdp.mixed_precision")
QUIET = {"TORCH_LOGS": "-all", "PYTHONWARNINGS": ",".join(f"ignore::{warning}" for warning in _IGNORED)}
"""Variables that keep notes of torch to its own developers out of the output of a run's processes."""


def quiet_libraries() -> None:
    """Errors only, from libraries that warn at import about what is normal on a machine without a GPU."""
    for name in ("torchao", "torch.utils._pytree", "transformers.modeling_rope_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)


@cache
def terminal() -> Console:
    """The one console on standard error: log lines appear above a live display on it, not in its midst."""
    from rich.console import Console

    return Console(stderr=True)


def _handler() -> logging.Handler:
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.logging import RichHandler

        handler = RichHandler(console=terminal(), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


class _Stderr(logging.StreamHandler):
    """Writes to what is standard error at the time, which may have been redirected since."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
