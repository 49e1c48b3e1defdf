"""Killing and resuming real runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest
import torch
from programs import alive, descendants, run, start, steps, wait_for
from safetensors.torch import load_file

from molt_core.testing.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.e2e

RUN = [
    *("train", "--device", "cpu", "--actor.model_name_or_path", "model", "--env.name", "arithmetic"),
    *("--data.prompt_dataset", "prompts.jsonl", "--data.max_len", 64, "--rollout.max_new_tokens", 6),
    *("--rollout.batch_size", 4, "--rollout.n_samples_per_prompt", 4, "--train.num_episodes", 2),
    *("--algo.advantage.estimator", "reinforce_baseline", "--actor.adam.lr", 1e-3, "--train.force_sync_mode"),
    *("--train.max_steps", 6, "--ckpt.save_steps", 1),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interruption")
    make_tiny_checkpoint(folder / "model", hidden_size=64, layers=2, intermediate=128)
    # One-byte answers, so that a random model is right now and then; the second episode begins at step 4.
    rows = [{"question": f"{i}", "answer": str(i % 10)} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ended_by_themselves(pids: set[int]) -> dict[int, str]:
    """What is left half a minute after the driver was killed; what Ray itself leaves is ended here."""
    deadline = time.monotonic() + 30
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in [pid for pid, command in left.items() if command.split()[0].endswith("Agent")]:
        # Ray's agents do not notice the end of a cluster that was killed; they hold no memory or device of the run.
        os.kill(pid, signal.SIGKILL)
        del left[pid]
    return left


def test_a_killed_and_resumed_run_ends_like_one_that_was_not_stopped(workspace):
    run(*RUN, "--logger.run_dir", "runs/whole", cwd=workspace)

    process = start(*RUN, "--logger.run_dir", "runs/cut", cwd=workspace)
    third = workspace / "runs/cut/checkpoints/step_3"
    wait_for(third.is_dir, process)
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not ended_by_themselves(started)

    for later in ("step_4", "step_5", "step_6"):
        shutil.rmtree(workspace / "runs/cut/checkpoints" / later, ignore_errors=True)
    run(*RUN, "--logger.run_dir", "runs/cut", "--ckpt.load_enable", cwd=workspace)

    history = steps(workspace / "runs/cut")
    assert [x["step"] for x in history] == [1, 2, 3, 4, 5, 6]
    # Nothing is stale, and engine and trainer agree on every token, before and after refits and the resumption.
    assert max(x["staleness/max"] for x in history) == 0
    assert max(x["mismatch/abs_max"] for x in history) <= 1e-4
    start_weights = load_file(workspace / "model/model.safetensors")
    whole = load_file(workspace / "runs/whole/hf/model.safetensors")
    cut = load_file(workspace / "runs/cut/hf/model.safetensors")
    assert whole.keys() == cut.keys()
    assert any((whole[name] - start_weights[name]).abs().max() > 1e-4 for name in whole)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], atol=1e-5, rtol=0)


def is_starting(workspace, process) -> bool:
    """The trainer and the engine are being set up."""
    commands = alive(descendants(process.pid)).values()
    return any("TrainWorker.setup" in c for c in commands) and any("Engine" in c for c in commands)


def is_training(workspace, process) -> bool:
    """Some steps are done, and rollouts are in flight."""
    return (workspace / "runs/stopped/metrics.jsonl").is_file() and len(steps(workspace / "runs/stopped")) >= 2


@pytest.mark.parametrize("moment", [is_starting, is_training])
def test_ctrl_c_ends_every_process_within_ten_seconds(moment, workspace):
    shutil.rmtree(workspace / "runs/stopped", ignore_errors=True)
    long = ["--train.max_steps", 1000, "--train.num_episodes", 1000]
    process = start(*RUN, "--logger.run_dir", "runs/stopped", *long, cwd=workspace)
    wait_for(lambda: moment(workspace, process), process)
    started = descendants(process.pid)
    assert len(started) > 3
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=10)
    assert process.returncode == 130
    assert not alive(started)
    assert "Traceback" not in (workspace / "log.txt").read_text()


def test_the_next_run_starts_at_once_after_an_interrupted_one(workspace):
    run(*RUN, "--logger.run_dir", "runs/next", "--train.max_steps", 1, cwd=workspace)
