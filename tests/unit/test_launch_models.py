"""What launching makes of the models around the policy. What it refuses is in test_refusals."""

from __future__ import annotations

import json

import pytest

from molt_core.config import RLConfig
from molt_core.launch import check_train, critic_config, objective_spec
from molt_core.plugins import load_plugins
from molt_core.testing.tiny import make_tiny_checkpoint

PLUGINS = load_plugins()
DISTILL = {"advantage": {"estimator": "on_policy_distill"}}
GAE = {"advantage": {"estimator": "gae"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    for name in ("actor", "ref"):
        make_tiny_checkpoint(folder / name, hidden_size=32, layers=1, heads=1, kv_heads=1, intermediate=32)
    (folder / "prompts.jsonl").write_text(json.dumps({"question": "1+1="}) + "\n")
    (folder / "env.py").write_text("from molt_core import Env\nclass E(Env):\n    pass\n")
    return folder


def check(folder, **sections):
    actor = {"model_name_or_path": str(folder / "actor")}
    data = {"prompt_dataset": folder / "prompts.jsonl"}
    config = RLConfig.model_validate({"device": "cpu", "actor": actor, "data": data, **sections})
    return config, check_train(config, PLUGINS)


def test_distilling_needs_no_environment_and_loads_its_teacher(folder):
    config, inputs = check(folder, algo=DISTILL, ref={"model_name_or_path": str(folder / "ref")})
    assert inputs.total_steps == 1
    assert objective_spec(config, PLUGINS.resolve("estimator", "on_policy_distill").needs).kl is None


def test_the_critic_starts_from_the_actor_unless_it_has_a_checkpoint_of_its_own(folder):
    config, _ = check(folder, algo=GAE, env={"name": f"{folder}/env.py:E"}, critic={"value_clip": 0.1})
    critic = critic_config(config)
    assert (critic.model_name_or_path, critic.value_clip, critic.adam.lr) == (str(folder / "actor"), 0.1, 5e-6)
    config, _ = check(
        folder, algo=GAE, env={"name": f"{folder}/env.py:E"}, critic={"model_name_or_path": str(folder / "ref")}
    )
    assert critic_config(config).model_name_or_path == str(folder / "ref")
