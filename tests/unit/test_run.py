"""What a run leaves behind: trackers, sampled rollouts, checkpoints to resume from."""

import json
import logging
import math

import pytest

from molt_core import ConfigError, Tracker
from molt_core.batches import RolloutBatch
from molt_core.config.rl import RLConfig
from molt_core.config.shared import CheckpointConfig, LoggerConfig
from molt_core.contract import Rollout, RolloutStatus, Segment, Turn
from molt_core.progress import Progress
from molt_core.rollout.generator import Group
from molt_core.rollout.runner import RolloutSummary, SegmentInfo
from molt_core.run import RunDir, RunRecorder, resume_point
from molt_core.training.checkpoints import CheckpointStore


class Memory(Tracker):
    def __init__(self):
        super().__init__()
        self.calls = []

    def start(self, run_dir, config, resumed_step):
        self.calls.append(("start", resumed_step))

    def log(self, step, metrics):
        self.calls.append(("log", step, dict(metrics)))

    def log_rollouts(self, step, rollouts):
        self.calls.append(("rollouts", step, list(rollouts)))

    def close(self):
        self.calls.append(("close",))


class Broken(Tracker):
    def log(self, step, metrics):
        raise OSError("the disk is full")


def recorder(tmp_path, trackers, **options):
    logger, ckpt = LoggerConfig(run_dir=tmp_path, **options), CheckpointConfig(save_steps=2)
    progress = Progress(10, columns=Progress.RL)
    return RunRecorder(RunDir("rl", logger, ckpt), trackers, progress, CheckpointStore(tmp_path, 2), ckpt, logger)


def rollout(index: int) -> RolloutSummary:
    segment = Segment.from_turns([Turn([1, 2], [3], [-0.5], [7])])
    whole = Rollout(f"r{index}", "g", {}, (segment,), 1.0, RolloutStatus.COMPLETED, text="hello")
    infos = (SegmentInfo.of(segment),)
    return RolloutSummary(whole.id, "g", 1.0, whole.status, {}, 1, infos, whole, 0.0)


def test_a_broken_tracker_is_logged_by_name_and_the_others_go_on(tmp_path, caplog):
    memory = Memory()
    run = recorder(tmp_path, {"broken": Broken(), "memory": memory})
    with caplog.at_level(logging.ERROR, "molt"), run.open(RLConfig(), resumed_step=3):
        run.log_step(4, {"rollout/reward_mean": 0.5})
    assert "broken" in caplog.text
    assert memory.calls == [("start", 3), ("log", 4, {"step": 4, "rollout/reward_mean": 0.5}), ("close",)]


def test_sampled_rollouts_carry_ids_mask_and_logprobs_and_are_spread_over_the_batch(tmp_path):
    memory = Memory()
    run = recorder(tmp_path, {"memory": memory}, num_rollouts=2)
    batch = RolloutBatch.from_groups([Group("g", tuple(rollout(i) for i in range(4)))])
    with run.open(RLConfig(), resumed_step=0):
        run.log_step(1, {}, batch)
    ((_, _, samples),) = [call for call in memory.calls if call[0] == "rollouts"]
    assert [sample["id"] for sample in samples] == ["r0", "r2"]
    assert samples[0]["segments"] == [
        {"ids": [1, 2, 3], "mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5], "versions": [-1, -1, 7]}
    ]
    assert json.dumps(samples)


def test_checkpoints_are_wanted_every_save_steps(tmp_path):
    run = recorder(tmp_path, {})
    assert [step for step in range(1, 7) if run.wants_checkpoint(step)] == [2, 4, 6]


def test_a_fresh_start_is_a_choice_when_only_incomplete_checkpoints_are_there(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    assert resume_point(store, load_enable=True) is None
    (tmp_path / "checkpoints/step_2").mkdir(parents=True)
    assert resume_point(store, load_enable=False) is None
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        resume_point(store, load_enable=True)


def test_the_saved_configuration_is_read_back_as_it_was(tmp_path):
    import tomllib

    config = RLConfig(env={"name": "arithmetic", "args": {"tries": 2}}, actor={"eps_clip_low_high": (0.2, 0.3)})
    RunDir("rl", LoggerConfig(run_dir=tmp_path), CheckpointConfig()).save_config(config)
    assert RLConfig(**tomllib.loads((tmp_path / "config.toml").read_text())) == config


def test_progress_without_a_terminal_is_one_line_per_step(caplog):
    with caplog.at_level(logging.INFO, "molt"), Progress(2, columns=Progress.RL) as progress:
        progress.step(1, {"rollout/reward_mean": 0.25, "staleness/max": 1})
        progress.step(2, {"rollout/reward_mean": math.nan})
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step 1/2  reward 0.250  loss -  tokens/s -  staleness 1  left ")
    assert lines[1].endswith("left 0m00s")
