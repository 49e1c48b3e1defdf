"""Metrics and rollouts as JSON lines in the folder of the run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from molt_core import Tracker

logger = logging.getLogger("molt")

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Line ends that JSON may hold as they are, and at which many readers would cut a line in two."""


class Jsonl(Tracker):
    """RUN_DIR/metrics.jsonl, eval.jsonl and rollouts.jsonl: one object per step, evaluation and sampled rollout.

    Every object has its ``step``. A number that is not finite is written as null. A resumed run continues the files
    after dropping what was logged for steps after the resumed one; a fresh run keeps older files under ``.old``.
    """

    def __init__(self, config=None) -> None:
        super().__init__(config)
        self._metrics: TextIO | None = None
        self._evals: TextIO | None = None
        self._rollouts: TextIO | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
        """Open the files."""
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = _open(run_dir / "metrics.jsonl", resumed_step)
        self._evals = _open(run_dir / "eval.jsonl", resumed_step)
        self._rollouts = _open(run_dir / "rollouts.jsonl", resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl."""
        assert self._metrics is not None, "the tracker was not started"
        _write(self._metrics, {"step": step, **metrics})

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to eval.jsonl."""
        assert self._evals is not None, "the tracker was not started"
        _write(self._evals, {"step": step, **metrics})

    def log_rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per rollout to rollouts.jsonl."""
        assert self._rollouts is not None, "the tracker was not started"
        for rollout in rollouts:
            _write(self._rollouts, {"step": step, **rollout})

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._evals, self._rollouts):
            if file is not None:
                file.close()


def _open(path: Path, resumed_step: int) -> TextIO:
    """The file, ready to be appended to, holding only lines of steps up to the resumed one."""
    if path.exists():
        if resumed_step:
            _keep_until(path, resumed_step)
        else:
            os.replace(path, path.with_name(path.name + ".old"))
    # A lone surrogate has no UTF-8 form; its backslash form is what JSON writes for it.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps and broken lines: a killed run may have left its last line half-written."""
    temporary = path.with_name(path.name + ".tmp")
    broken = 0
    with path.open(encoding="utf-8", errors="replace") as old, temporary.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                kept = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                broken += 1
                continue
            if kept:
                new.write(line.rstrip("\n") + "\n")
    os.replace(temporary, path)
    if broken:
        logger.warning("dropped %d broken line(s) of %s", broken, path)


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    text = json.dumps(_plain(record), allow_nan=False, ensure_ascii=False)
    file.write(text.translate(_LINE_ENDS) + "\n")
    file.flush()


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: arrays as lists, array scalars as numbers, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
