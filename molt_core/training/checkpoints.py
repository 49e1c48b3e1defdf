"""Folders of resumable checkpoints: written so that a kill at any moment leaves the previous one loadable.

A checkpoint is ``step_N`` with a completion mark inside, and only the mark makes it one. It is written as
``step_N.tmp``, flushed, marked, renamed, and then the pointer ``latest`` is moved.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

logger = logging.getLogger("molt")

MARK = "complete.json"
POINTER = "latest"
_NAME = re.compile(r"step_(\d+)")


class CheckpointStore:
    """The checkpoints under ``root``; keeps the ``max_num`` newest complete ones, all if that is 0 or less."""

    def __init__(self, root: Path, max_num: int = 0) -> None:
        self.root = Path(root)
        self.max_num = max_num

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into; what an earlier attempt left is cleared."""
        tmp = self.root / f"step_{step}.tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        return tmp

    def commit(self, step: int) -> Path:
        """Make what was written since :meth:`begin` a checkpoint. It replaces one of the same step."""
        tmp = self.root / f"step_{step}.tmp"
        for path in [*tmp.rglob("*"), tmp]:
            _fsync(path)
        _write(tmp / MARK, json.dumps({"step": step}))
        final = self._publish(tmp)
        _write(self.root / f"{POINTER}.tmp", final.name)
        os.replace(self.root / f"{POINTER}.tmp", self.root / POINTER)
        _fsync(self.root)
        return final

    def latest(self) -> Path | None:
        """The newest complete checkpoint, by number; warns about newer ones that were never completed.

        None if there is none. Deletes nothing, but gives a checkpoint its name that was marked and not yet renamed when
        the run was killed.
        """
        for tmp in self.root.glob("step_*.tmp"):
            if _NAME.fullmatch(tmp.stem) and (tmp / MARK).is_file():
                self._publish(tmp)
        steps = self._steps()
        complete = [step for step in steps if self._is_complete(step)]
        newest = complete[-1] if complete else -1
        broken = [f"step_{step}" for step in steps if step > newest]
        pointer = self.root / POINTER
        if pointer.is_file() and (name := pointer.read_text().strip()) and not (self.root / name / MARK).is_file():
            broken += [name] if name not in broken else []
        if broken:
            logger.warning("%s: %s not complete, not used", self.root, ", ".join(broken))
        return self.root / f"step_{newest}" if complete else None

    def prune(self, best: int | None = None) -> list[Path]:
        """Remove all complete checkpoints but the newest ``max_num`` and that of step ``best``; returns the removed.

        Incomplete ones and files that are not checkpoints are never touched, and never counted as kept.
        """
        if self.max_num <= 0:
            return []
        complete = [step for step in self._steps() if self._is_complete(step)]
        if best is not None and best not in complete:
            logger.warning("%s: the best checkpoint step_%d does not exist", self.root, best)
        removed = [self.root / f"step_{step}" for step in complete[: -self.max_num] if step != best]
        for path in removed:
            _remove(path)
        return removed

    def _publish(self, tmp: Path) -> Path:
        """Rename a marked ``step_N.tmp`` to ``step_N``, over an older one of that step."""
        final = self.root / tmp.stem
        if final.exists():
            _remove(final)
        tmp.rename(final)
        _fsync(self.root)
        return final

    def _steps(self) -> list[int]:
        names = [path.name for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _is_complete(self, step: int) -> bool:
        return (self.root / f"step_{step}" / MARK).is_file()


def _remove(path: Path) -> None:
    """Remove a checkpoint; first its mark, so that a kill leaves no half that looks whole."""
    (path / MARK).unlink(missing_ok=True)
    _fsync(path)
    shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _fsync(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
