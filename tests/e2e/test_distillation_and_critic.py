"""`molt train` with more than one model: a teacher without a reward, a critic with a head start."""

from __future__ import annotations

import json

import pytest
import torch
from programs import run, steps
from transformers import AutoModelForCausalLM

from molt_core.testing.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.e2e

SMALL = {"hidden_size": 64, "layers": 2, "intermediate": 128}

ENV = '''
from molt_core import Env, Result

class Digits(Env):
    """The share of sampled tokens that are digits, in two turns; the second one is cut by the limit on turns."""
    columns = ("question",)

    async def reset(self, row, ctx):
        self.turns = 0
        return [{"role": "user", "content": row["question"]}]

    async def step(self, action, ctx):
        self.turns += 1
        share = sum(48 <= i < 58 for i in action.ids) / len(action.ids)
        return Result(reward=share, observation="go on")
'''


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A student, and a teacher of another seed that has seen a few digits."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_checkpoint(folder / "student", seed=0, **SMALL)
    path = make_tiny_checkpoint(folder / "teacher", seed=1, **SMALL)
    teacher = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(48, 58, (16, 24), generator=generator)
        teacher(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    teacher.save_pretrained(path)
    rows = "".join(json.dumps({"question": f"{i}?"}) + "\n" for i in range(64))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "digits.py").write_text(ENV)
    return folder


def train(workspace, name, *args):
    run(
        *(
            "train",
            "--device",
            "cpu",
            "--actor.model_name_or_path",
            "student",
            "--data.prompt_dataset",
            "prompts.jsonl",
        ),
        *("--data.max_len", 64, "--rollout.max_new_tokens", 8, "--logger.run_dir", f"runs/{name}"),
        *("--train.num_episodes", 100, *args),
        cwd=workspace,
    )
    return steps(workspace / "runs" / name)


def test_a_student_moves_towards_its_teacher_without_any_reward(workspace):
    history = train(
        *(
            workspace,
            "distill",
            "--algo.advantage.estimator",
            "on_policy_distill",
            "--ref.model_name_or_path",
            "teacher",
        ),
        *("--rollout.batch_size", 16, "--rollout.n_samples_per_prompt", 8, "--train.max_steps", 20),
        *("--actor.adam.lr", 1e-2, "--train.force_sync_mode"),
    )
    kl = [x["train/kl"] for x in history]
    assert len(kl) == 20
    assert sum(kl[-3:]) / 3 < kl[0] / 2
    assert {x["train/kl_coef"] for x in history} == {1.0}
    assert {x["rollout/reward_mean"] for x in history} == {0.0}


def test_a_critic_trains_alone_first_and_is_resumed_with_the_policy(workspace):
    common = (
        *("--algo.advantage.estimator", "gae", "--env.name", "./digits.py:Digits", "--env.max_turns", 2),
        *("--rollout.batch_size", 4, "--rollout.n_samples_per_prompt", 4, "--actor.adam.lr", 3e-3),
        *("--actor.freezing_steps", 2, "--critic.adam.lr", 3e-3, "--critic.max_epochs", 2),
        *("--algo.kl.init_coef", 0.01, "--algo.kl.target", 0.001, "--algo.kl.horizon", 64, "--ckpt.save_steps", 1),
        *("--ckpt.path", "checkpoints", "--no-algo.kl.use_loss"),
    )
    history = train(workspace, "critic", *common, "--train.max_steps", 3)
    assert [x["policy_version"] for x in history] == [0, 0, 0]
    assert ["train/policy_loss" in x for x in history] == [False, False, True]
    assert all(x["critic/optimizer_steps"] == 2 and x["staleness/max"] == 0 for x in history)
    # Before the first update of the policy it is the reference itself.
    assert [abs(x["train/kl"]) < 1e-6 for x in history] == [True, True, True]
    # It stays while the policy does.
    assert [x["train/kl_coef"] for x in history] == [0.01, 0.01, 0.01]

    history = train(workspace, "critic2", *common, "--train.max_steps", 5, "--ckpt.load_enable")
    assert [(x["step"], x["policy_version"]) for x in history] == [(4, 1), (5, 2)]
    # Far below the target in the third step: -0.2 x 16 rollouts / 64.
    assert history[0]["train/kl_coef"] == pytest.approx(0.01 * 0.95)
    assert abs(history[0]["train/kl"]) > 1e-6
    assert all(x["staleness/max"] <= 1 for x in history)
