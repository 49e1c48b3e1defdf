"""`molt train` on real Ray, vLLM and AutoModel: it learns, survives bad environments, and stays exact."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from programs import run, steps
from transformers import AutoModelForCausalLM

from molt_core.testing.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.e2e

ENV = '''
import asyncio
from molt_core import Env, Result

class Digits(Env):
    """The share of sampled tokens that are digits. What a row's ``fault`` names goes wrong."""
    columns = ("question", "fault")

    async def reset(self, row, ctx):
        if row["fault"] == "raise":
            raise RuntimeError("the sandbox did not start")
        return [{"role": "user", "content": row["question"]}]

    async def step(self, action, ctx):
        fault = ctx.row["fault"]
        if fault == "sleep":
            await asyncio.sleep(3600)
        if fault == "nan":
            return Result(reward=float("nan"), terminated=True)
        if fault == "int":
            return Result(reward=1, terminated=True)
        if fault == "bool":
            return Result(reward=True, terminated=True)
        share = sum(48 <= i < 58 for i in action.ids) / len(action.ids)
        return Result(reward=share, terminated=True, info={"share": share})
'''


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    make_tiny_checkpoint(folder / "model", hidden_size=64, layers=2, intermediate=128)
    (folder / "my_env.py").write_text(ENV)
    return folder


def write_prompts(path, faults):
    rows = [{"question": f"{i}?", "fault": fault} for i, fault in enumerate(faults)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(workspace, name, *args):
    run(
        *("train", "--device", "cpu", "--actor.model_name_or_path", "model", "--env.name", "./my_env.py:Digits"),
        *("--data.prompt_dataset", f"{name}.jsonl", "--data.max_len", 64, "--rollout.max_new_tokens", 8),
        *("--rollout.batch_size", 8, "--rollout.n_samples_per_prompt", 4, "--logger.run_dir", f"runs/{name}"),
        *args,
        cwd=workspace,
    )
    return workspace / "runs" / name


def test_the_reward_rises_on_two_ranks_and_the_export_is_the_trained_policy(workspace):
    write_prompts(workspace / "learn.jsonl", [""] * 64)
    run_dir = train(
        *(workspace, "learn", "--actor.num_gpus_per_node", 2, "--train.num_episodes", 10, "--train.max_steps", 30),
        *("--algo.advantage.estimator", "grpo", "--actor.adam.lr", 3e-3),
    )
    history = steps(run_dir)
    assert [x["step"] for x in history] == list(range(1, 31))
    first = sum(x["rollout/reward_mean"] for x in history[:5]) / 5
    last = sum(x["rollout/reward_mean"] for x in history[-5:]) / 5
    assert last > first + 0.2
    assert max(x["staleness/max"] for x in history) == 1
    assert {"policy_version", "train/policy_loss", "train/grad_norm", "mismatch/k3", "timing/step"} <= history[0].keys()

    rollout = json.loads((run_dir / "rollouts.jsonl").read_text().splitlines()[-1])
    segment = rollout["segments"][0]
    assert len(segment["ids"]) == len(segment["mask"]) == len(segment["logprobs"])
    before = AutoModelForCausalLM.from_pretrained(workspace / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(run_dir / "hf").state_dict()
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


def test_faults_of_environments_are_excluded_and_counted_and_the_run_goes_on(workspace):
    faults = ["raise", "sleep", "nan", "int", "bool", "", "", ""] * 3
    write_prompts(workspace / "faults.jsonl", faults)
    run_dir = train(
        *(workspace, "faults", "--env.turn_timeout", 1, "--env.retries", 0, "--train.force_sync_mode"),
        *("--algo.advantage.estimator", "reinforce_baseline", "--rollout.temperature", 0.7),
    )
    history = steps(run_dir)
    totals = Counter()
    for line in history:
        for reason in ("env_error", "env_timeout", "invalid_reward"):
            totals[reason] += line[f"rollout/excluded/{reason}"]
    # Three prompts of each fault, four rollouts of each prompt; what is left are 15 prompts.
    assert totals == {"env_error": 12, "env_timeout": 12, "invalid_reward": 12}
    assert sum(x["rollout/num_rollouts"] for x in history) == 15 * 4
    assert sum(x["rollout/dropped_groups"] for x in history) == 9
    assert all(math.isfinite(x["train/grad_norm"]) for x in history)
    # Strictly on-policy: the engine and the trainer agree on every token, before and after refits.
    assert len(history) == 2
    assert max(x["staleness/max"] for x in history) == 0
    assert max(x["mismatch/abs_max"] for x in history) <= 1e-4
