"""Trackers: what is in the files, also after a crash and a resume."""

import builtins
import json

import numpy as np
import pytest
from molt_trackers.jsonl import Jsonl
from molt_trackers.tensorboard import TensorBoard

from molt_core import ConfigError


def run(folder, steps, resumed_step=0):
    tracker = Jsonl()
    tracker.start(folder, {}, resumed_step)
    for step in steps:
        tracker.log(step, {"reward": step / 10})
        tracker.log_rollouts(step, [{"text": f"rollout of step {step}"}])
    tracker.close()


def lines(path):
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in path.open()]


def test_one_object_per_step_and_per_rollout(tmp_path):
    run(tmp_path / "new", [1, 2])
    assert lines(tmp_path / "new" / "metrics.jsonl") == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]
    assert lines(tmp_path / "new" / "rollouts.jsonl")[1] == {"step": 2, "text": "rollout of step 2"}


def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
    tracker = Jsonl()
    tracker.start(tmp_path, {}, 0)
    tracker.log(1, {"reward": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 1.0}]
    tracker.close()


def test_a_resumed_run_replaces_what_came_after_the_checkpoint(tmp_path):
    run(tmp_path, [1, 2, 3, 4])
    run(tmp_path, [3], resumed_step=2)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path / "rollouts.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("tail", ['{"step": 2, "rew', '{"step": 2, "reward": 0.2}', "17\n", "\n", "\xff\n"])
def test_a_half_written_last_line_is_tolerated(tmp_path, tail):
    run(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(tail)
    run(tmp_path, [3], resumed_step=2)
    kept = [1, 2, 3] if tail.endswith("0.2}") else [1, 3]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == kept


def test_a_fresh_run_does_not_mix_with_or_delete_an_older_one(tmp_path):
    run(tmp_path, [1, 2])
    run(tmp_path, [1])
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl.old")] == [1, 2]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    tracker = Jsonl()
    tracker.start(tmp_path, {}, 0)
    tracker.log(
        1, {"a": float("nan"), "b": float("inf"), "c": np.float32("nan"), "d": np.float32(0.5), "e": np.int64(3)}
    )
    tracker.log_rollouts(1, [{"logprobs": np.array([-0.5, -np.inf]), "mask": (True, np.bool_(False)), "reward": None}])
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": None, "d": 0.5, "e": 3}]
    assert lines(tmp_path / "rollouts.jsonl") == [
        {"step": 1, "logprobs": [-0.5, None], "mask": [True, False], "reward": None}
    ]


def test_text_keeps_its_characters_and_stays_on_one_line(tmp_path):
    tracker = Jsonl()
    tracker.start(tmp_path, {}, 0)
    text = "π\n\x85\u2028\u2029 \ud800"
    tracker.log_rollouts(1, [{"text": text}])
    tracker.close()
    assert lines(tmp_path / "rollouts.jsonl")[0]["text"] == text
    # Readers that cut at every line end of Unicode see one line, too.
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 1


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def track(folder, steps, resumed_step=0):
    tracker = TensorBoard()
    tracker.start(folder, {"train": {"seed": 1}}, resumed_step)
    for step in steps:
        tracker.log(step, {"reward": step / 4, "missing": float("nan")})
    tracker.close()


def test_tensorboard_holds_the_finite_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    track(tmp_path, [1, 2])
    assert scalars(tmp_path) == {"reward": [(1, 0.25), (2, 0.5)]}


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    track(tmp_path, [1, 2, 3])
    track(tmp_path, [2], resumed_step=1)
    assert scalars(tmp_path) == {"reward": [(1, 0.25), (2, 0.5)]}


def test_a_missing_tensorboard_is_said_with_the_remedy(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"molt-trackers\[tensorboard\]"):
        TensorBoard().start(tmp_path, {}, 0)
