"""Metrics in TensorBoard's format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molt_core import ConfigError, Tracker


class TensorBoard(Tracker):
    """RUN_DIR/tensorboard, one scalar per metric; what is not finite is left out, as TensorBoard cannot draw it.

    A resumed run hides what was logged for steps after the resumed one. Needs ``molt-trackers[tensorboard]``.
    """

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
        """Open the event file and record the configuration. Raises ConfigError without tensorboard installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "the tracker 'tensorboard' needs a package that is missing; pip install 'molt-trackers[tensorboard]'"
            ) from error
        purge = resumed_step + 1 if resumed_step else None
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```", resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record every finite metric of one step."""
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
