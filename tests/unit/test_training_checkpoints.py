"""Checkpoint folders: chosen by mark and number, pruned by number, and never lost to a kill."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from molt_core.training import checkpoints
from molt_core.training.checkpoints import MARK, CheckpointStore


def make(root: Path, step: int, content: str = "weights") -> None:
    store = CheckpointStore(root)
    (store.begin(step) / "model").write_text(content)
    store.commit(step)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


@pytest.mark.parametrize(
    ("steps", "best", "keep", "kept"),
    [
        ([9800, 9900, 10000, 10100], 9800, 2, {"step_9800", "step_10000", "step_10100"}),
        ([5, 10], 10, 1, {"step_10"}),
        ([5, 10], 5, 1, {"step_5", "step_10"}),
        ([7], None, 1, {"step_7"}),
        ([1, 2, 3], None, 0, {"step_1", "step_2", "step_3"}),
    ],
)
def test_pruning_keeps_the_newest_by_number_and_the_best(tmp_path, steps, best, keep, kept):
    for step in steps:
        make(tmp_path, step)
    CheckpointStore(tmp_path, keep).prune(best)
    assert names(tmp_path) == kept


def test_a_best_that_does_not_exist_is_a_warning(tmp_path, caplog):
    for step in (1, 2, 3):
        make(tmp_path, step)
    with caplog.at_level(logging.WARNING, "molt"):
        removed = CheckpointStore(tmp_path, 2).prune(best=77)
    assert [path.name for path in removed] == ["step_1"]
    assert "step_77" in caplog.text


def test_pruning_leaves_foreign_names_alone(tmp_path):
    for step in (5, 10):
        make(tmp_path, step)
    foreign = {"step_10.tmp", "notes", "step_final", "my_step_3"}
    for name in foreign:
        (tmp_path / name).mkdir()
    assert CheckpointStore(tmp_path, 1).prune(best=5) == []
    assert names(tmp_path) == {"step_5", "step_10"} | foreign


def test_pruning_never_counts_an_incomplete_checkpoint_as_kept(tmp_path):
    make(tmp_path, 10)
    (tmp_path / "step_20").mkdir()
    assert CheckpointStore(tmp_path, 1).prune() == []
    assert names(tmp_path) == {"step_10", "step_20"}


def test_the_newest_complete_checkpoint_is_resumed_and_the_broken_one_named(tmp_path, caplog):
    make(tmp_path, 10)
    (tmp_path / "step_20").mkdir()
    (tmp_path / "step_20" / "model").write_text("half")
    (tmp_path / "step_30.tmp").mkdir()
    (tmp_path / "latest").write_text("step_20")
    with caplog.at_level(logging.WARNING, "molt"):
        found = CheckpointStore(tmp_path).latest()
    assert found == tmp_path / "step_10"
    assert "step_20" in caplog.text
    assert names(tmp_path) == {"step_10", "step_20", "step_30.tmp"}


@pytest.mark.parametrize("pointer", ["step_99", None])
def test_without_a_usable_pointer_the_newest_complete_one_is_found(tmp_path, pointer):
    make(tmp_path, 9)
    make(tmp_path, 10)
    (tmp_path / "latest").unlink()
    if pointer:
        (tmp_path / "latest").write_text(pointer)
    assert CheckpointStore(tmp_path).latest() == tmp_path / "step_10"


def test_no_complete_checkpoint_is_none(tmp_path):
    (tmp_path / "step_20").mkdir()
    assert CheckpointStore(tmp_path).latest() is None
    assert CheckpointStore(tmp_path / "absent").latest() is None


def test_a_checkpoint_is_complete_only_after_commit(tmp_path):
    store = CheckpointStore(tmp_path)
    (store.begin(4) / "model").write_text("weights")
    assert store.latest() is None
    final = store.commit(4)
    assert store.latest() == final == tmp_path / "step_4"
    assert (tmp_path / "latest").read_text() == "step_4"


def test_what_an_earlier_attempt_left_is_cleared(tmp_path):
    store = CheckpointStore(tmp_path)
    (store.begin(4) / "stale").write_text("x")
    assert list(store.begin(4).iterdir()) == []


class Killed(BaseException):
    """Stands for kill -9: nothing handles it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Let the n-th change of the file system from here on (counted from 0) end the process."""
    left = [n]

    def guard(function):
        def guarded(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return guarded

    for owner, name in [
        (checkpoints, "_fsync"),
        (Path, "write_text"),
        (Path, "rename"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (os, "replace"),
        (shutil, "rmtree"),
        (os, "unlink"),
    ]:
        monkeypatch.setattr(owner, name, guard(getattr(owner, name)))


@pytest.mark.parametrize("again", [False, True], ids=["first save of the step", "same step saved before"])
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path, again):
    killed = survived = 0
    for n in range(100):
        root = tmp_path / str(n)
        make(root, 10, "old")
        if again:
            make(root, 20, "old")
        store = CheckpointStore(root, 1)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, n)
            try:
                (store.begin(20) / "model").write_text("new")
                store.commit(20)
                store.prune()
            except Killed:
                killed += 1
            else:
                survived += 1
        found = CheckpointStore(root).latest()
        assert found is not None
        assert (found / MARK).is_file()
        assert (found / "model").read_text() in ("old", "new")
        if survived:
            assert (found.name, (found / "model").read_text()) == ("step_20", "new")
            break
    assert killed > 10
    assert survived == 1
