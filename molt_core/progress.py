"""Live progress: a rich display on a terminal, one plain log line per step elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import ClassVar

from rich.live import Live
from rich.table import Table

from molt_core.logs import terminal

logger = logging.getLogger("molt")

Columns = tuple[tuple[str, str, str], ...]
"""What is shown of the metrics: heading, metric, format."""


class Progress:
    """Shows step, reward, tokens per second, staleness and the time left. Use as a context manager."""

    RL: ClassVar[Columns] = (
        ("reward", "rollout/reward_mean", "{:.3f}"),
        ("loss", "train/policy_loss", "{:.4f}"),
        ("tokens/s", "throughput/tokens_per_second", "{:.0f}"),
        ("staleness", "staleness/max", "{:.0f}"),
    )
    SFT: ClassVar[Columns] = (
        ("loss", "train/loss", "{:.4f}"),
        ("grad norm", "train/grad_norm", "{:.3f}"),
        ("tokens/s", "throughput/tokens_per_second", "{:.0f}"),
    )

    def __init__(self, total_steps: int, start_step: int = 0, *, every: int = 1, columns: Columns) -> None:
        self.total, self.start, self.every, self.columns = total_steps, start_step, every, columns
        self._began = time.monotonic()
        self._live: Live | None = None
        self._recent: list[list[str]] = []

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if terminal().is_terminal:
            self._live = Live(console=terminal(), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        done = step - self.start
        left = (time.monotonic() - self._began) / max(done, 1) * (self.total - step)
        cells = [form.format(metrics[key]) if key in metrics else "-" for _, key, form in self.columns]
        if self._live is not None:
            self._recent = [*self._recent[-9:], [f"{step}/{self.total}", *cells, _duration(left)]]
            self._live.update(self._table())
        elif step % self.every == 0 or step == self.total:
            shown = "  ".join(f"{name} {cell}" for (name, _, _), cell in zip(self.columns, cells, strict=True))
            logger.info("step %d/%d  %s  left %s", step, self.total, shown, _duration(left))

    def _table(self) -> Table:
        table = Table("step", *(name for name, _, _ in self.columns), "time left", expand=False)
        for row in self._recent:
            table.add_row(*row)
        return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
