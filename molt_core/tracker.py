"""Where metrics go: the interface of tracker plugins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from molt_core.component import Component


class Tracker(Component):
    """Receives metrics and sampled rollouts. Lives in the driver process.

    An exception raised by a tracker is logged with its name and never stops the run.
    """

    kind: ClassVar[str] = "tracker"

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
        """Open the sink. ``config`` is the resolved run configuration as plain data.

        ``resumed_step`` is 0 for a fresh run; otherwise what was logged for later steps is void.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation of the policy after ``step`` steps, 0 before the first."""
        self.log(step, metrics)

    def log_rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Record sampled rollouts: plain data with text, ids, log-probs, mask, reward and status."""

    def close(self) -> None:
        """Flush and close the sink."""
