"""What a user gets wrong is one clear line on stderr and exit code 2, before any actor is started."""

from __future__ import annotations

import json

import pytest
import ray

from molt_core.cli import main
from molt_core.testing.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.e2e

GOOD = b'{"question": "1+1=", "answer": "2"}\n'


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    make_tiny_checkpoint(folder / "model", hidden_size=64, layers=2, intermediate=128)
    files = {
        "good": GOOD * 16,
        "empty": b"",
        "bom": b"\xef\xbb\xbf" + GOOD,
        "blank": GOOD + b"\n" + GOOD,
        "broken": GOOD * 2 + b'{"question": \n',
        "columns": b'{"question": "1+1="}\n',
    }
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    conversation = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    (folder / "conversations.jsonl").write_text(json.dumps(conversation) + "\n")
    return folder


CASES = {
    "missing model": (["--actor.model_name_or_path", "nowhere"], "nowhere"),
    "missing dataset": (["--data.prompt_dataset", "nowhere.jsonl"], "nowhere.jsonl"),
    "missing column": (["--data.prompt_dataset", "columns.jsonl"], "answer"),
    "missing plugin": (["--env.name", "arithmetik"], "arithmetic"),
    "empty dataset": (["--data.prompt_dataset", "empty.jsonl"], "empty"),
    "byte-order mark": (["--data.prompt_dataset", "bom.jsonl"], "byte-order mark"),
    "blank line": (["--data.prompt_dataset", "blank.jsonl"], "line 2"),
    "broken line": (["--data.prompt_dataset", "broken.jsonl"], "line 3"),
    "batch sizes that do not divide": (["--train.batch_size", "7"], "--train.batch_size"),
    "unknown flag": (["--rollout.batchsize", "4"], "--rollout.batch_size"),
    "group estimator with one sample": (["--rollout.n_samples_per_prompt", "1"], "--rollout.n_samples_per_prompt"),
    "off-policy without correction": (["--algo.advantage.is_correction_level", "off"], "is_correction_level"),
    "unknown option of the environment": (["--env.args.trys", "2"], "tries"),
    "truncated sampling": (["--rollout.top_p", "0.9"], "--rollout.top_p"),
    "no GPU": (["--device", "cuda"], "cuda"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line_that_names_it(case, workspace, monkeypatch, capfd):
    import torch

    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.chdir(workspace)
    flags, named = CASES[case]
    base = {
        "--actor.model_name_or_path": "model",
        "--data.prompt_dataset": "good.jsonl",
        "--env.name": "arithmetic",
        "--algo.advantage.estimator": "grpo",
        "--rollout.batch_size": "2",
        "--rollout.n_samples_per_prompt": "4",
        "--device": "cpu",
    } | dict(zip(flags[::2], flags[1::2], strict=True))
    code = main(["train", *[x for pair in base.items() for x in pair]])
    captured = capfd.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert code == 2
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("Error: ")
    assert named in lines[0]
    assert not ray.is_initialized()
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data.dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data.dataset", "good.jsonl"], "messages"),
        (["--data.dataset", "conversations.jsonl", "--data.max_len", "4"], "max_len"),
    ],
)
def test_mistakes_in_supervised_runs_too(flags, named, workspace, monkeypatch, capfd):
    monkeypatch.chdir(workspace)
    code = main(["sft", "--device", "cpu", "--model.model_name_or_path", "model", *flags])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert code == 2
    assert len(lines) == 1
    assert named in lines[0]


def test_a_dry_run_prints_a_configuration_that_can_be_read_back(workspace, monkeypatch, capfd):
    monkeypatch.chdir(workspace)
    flags = [
        *("--actor.model_name_or_path", "model", "--data.prompt_dataset", "good.jsonl", "--env.name", "arithmetic"),
        *("--env.args.tries", "3", "--rollout.batch_size", "2", "--device", "cpu"),
    ]
    assert main(["train", *flags, "--dry-run"]) == 0
    first = capfd.readouterr().out
    (workspace / "run.toml").write_text(first)
    assert main(["train", "--config", "run.toml", "--dry-run"]) == 0
    assert capfd.readouterr().out == first
    assert "tries = 3" in first
    assert not ray.is_initialized()
