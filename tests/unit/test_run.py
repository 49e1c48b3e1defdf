"""What a run leaves behind: trackers, sampled rollouts, checkpoints to resume from."""

import json
import logging
import math

import pytest

from molt_core import ConfigError, Tracker
from molt_core.batches import RolloutBatch
from molt_core.config.rl import RLConfig
from molt_core.config.shared import CheckpointConfig, LoggerConfig
from molt_core.contract import Rollout, RolloutStatus, Segment, StoredRollout, Turn
from molt_core.progress import Progress
from molt_core.rollout.generator import Group
from molt_core.rollout.tasks import RolloutSummary
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

    def log_eval(self, step, metrics):
        self.calls.append(("eval", step, dict(metrics)))

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
    return RolloutSummary.of(whole, StoredRollout([whole], 0))


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


def test_checkpoints_are_wanted_every_save_steps_and_at_the_end(tmp_path):
    run = recorder(tmp_path, {})
    assert [step for step in range(1, 7) if run.wants_checkpoint(step)] == [2, 4, 6]
    assert run.wants_last_checkpoint(5)
    assert not run.wants_last_checkpoint(6)


def test_evaluations_are_apart_from_steps(tmp_path):
    memory = Memory()
    run = recorder(tmp_path, {"memory": memory})
    with run.open(RLConfig(), resumed_step=0):
        run.log_eval(0, {"eval/reward_mean": 0.25})
    assert memory.calls[1] == ("eval", 0, {"step": 0, "eval/reward_mean": 0.25})


def save_checkpoint(root, step, program):
    store = CheckpointStore(root, 2)
    (store.begin(step) / "state.json").write_text(json.dumps({"program": program, "step": step}))
    store.commit(step)


def point(tmp_path, load_enable, **options):
    logger, ckpt = LoggerConfig(run_dir=tmp_path, **options), CheckpointConfig(load_enable=load_enable)
    return resume_point(RunDir("rl", logger, ckpt), ckpt)


def test_a_run_resumes_from_the_newest_checkpoint_of_its_own_program(tmp_path):
    save_checkpoint(tmp_path / "checkpoints", 2, "rl")
    save_checkpoint(tmp_path / "checkpoints", 10, "rl")
    assert point(tmp_path, True) == (tmp_path / "checkpoints/step_10", {"program": "rl", "step": 10})
    save_checkpoint(tmp_path / "checkpoints", 11, "sft")
    with pytest.raises(ConfigError, match="'sft'"):
        point(tmp_path, True)


def test_a_fresh_run_into_a_folder_with_checkpoints_is_refused(tmp_path):
    save_checkpoint(tmp_path / "checkpoints", 2, "rl")
    with pytest.raises(ConfigError, match=r"--ckpt\.load_enable"):
        point(tmp_path, False)


def test_resuming_starts_afresh_with_a_warning_only_where_there_is_nothing_at_all(tmp_path, caplog):
    assert point(tmp_path, True) == (None, {})
    assert "starting afresh" in caplog.text
    (tmp_path / "checkpoints/step_2").mkdir(parents=True)
    assert point(tmp_path, False) == (None, {})
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        point(tmp_path, True)


def test_resuming_needs_a_run_that_has_a_name():
    ckpt = CheckpointConfig(load_enable=True)
    with pytest.raises(ConfigError, match=r"--logger\.run_dir"):
        resume_point(RunDir("rl", LoggerConfig(), ckpt), ckpt)


def test_the_saved_configuration_is_read_back_as_it_was(tmp_path):
    import tomllib

    config = RLConfig(
        env={"name": "arithmetic", "args": {"tries": 2}},
        actor={"eps_clip_low_high": (0.2, 0.3)},
        logger={"run_dir": tmp_path},
    )
    RunDir("rl", config.logger, CheckpointConfig()).save_config(config)
    assert RLConfig(**tomllib.loads((tmp_path / "config.toml").read_text())) == config


def test_progress_without_a_terminal_is_one_line_per_step(caplog):
    with caplog.at_level(logging.INFO, "molt"), Progress(2, columns=Progress.RL) as progress:
        progress.step(1, {"rollout/reward_mean": 0.25, "staleness/max": 1})
        progress.step(2, {"rollout/reward_mean": math.nan})
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step 1/2  reward 0.250  loss -  tokens/s -  staleness 1  left ")
    assert lines[1].endswith("left 0m00s")
