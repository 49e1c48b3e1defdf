"""A critic in the training ranks: exact values, a loss that falls, and one checkpoint with the policy."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from molt_core.config.rl import CriticAdamConfig, CriticConfig
from molt_core.config.shared import AdamConfig, FsdpConfig, ModelConfig
from molt_core.contract import Segment, Turn
from molt_core.errors import ConfigError
from molt_core.testing.tiny import make_tiny_checkpoint
from molt_core.training.group import TrainGroup
from molt_core.training.rows import ObjectiveSpec, TrainRow

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("critic"), layers=2, hidden_size=64, intermediate=128)


def start(checkpoint: Path, ranks: int, critic: bool = True) -> TrainGroup:
    return TrainGroup.start(
        # A large eps, because AdamW's first step is lr x g / (|g| + eps): rounding must not count where g is about 0.
        ModelConfig(model_name_or_path=str(checkpoint), num_gpus_per_node=ranks, adam=AdamConfig(lr=1e-3, eps=1e-4)),
        FsdpConfig(),
        device="cpu",
        num_optimizer_steps=20,
        objective=ObjectiveSpec(loss="ppo"),
        critic=CriticConfig(
            model_name_or_path=str(checkpoint),
            adam=CriticAdamConfig(lr=3e-3, eps=1e-4),
            lr_scheduler="linear",
            lr_warmup_ratio=0.0,
            value_clip=0.5,
        )
        if critic
        else None,
        num_critic_steps=40,
    )


@pytest.fixture(scope="module")
def groups(checkpoint, tmp_path_factory):
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1")
    with ThreadPoolExecutor() as pool:
        started = list(pool.map(lambda ranks: start(checkpoint, ranks), (1, 2)))
    initial = tmp_path_factory.mktemp("initial")
    started[0].save(initial, {"step": 0})
    yield started, initial
    for group in started:
        group.close()
    ray.shutdown()


def make_rows() -> list[TrainRow]:
    """Four rows; the return of a token is 1 in the first two rows and -1 in the others."""
    rng = np.random.default_rng(3)
    rows = []
    for i in range(4):
        turns = []
        for _ in range(1 + i % 2):
            prompt, action = (rng.integers(0, 256, rng.integers(2, 7)).tolist() for _ in range(2))
            turns.append(Turn(prompt, action, [-5.0] * len(action), [0] * len(action)))
        segment = Segment.from_turns(turns)
        returns = np.full(len(segment.ids) - 1, 1.0 if i < 2 else -1.0, np.float32)
        rows.append(replace(TrainRow.of_segment(segment, i), group=i, advantage=returns))
    return rows


def actions(rows: list[TrainRow], values: list[np.ndarray]) -> np.ndarray:
    """Entries on the action tokens of all rows, of arrays of T-1 or T."""
    return np.concatenate(
        [v[: row.length - 1][row.source.action_mask[1:]] for row, v in zip(rows, values, strict=True)]
    )


def weights_of(group: TrainGroup) -> dict[str, np.ndarray]:
    import ray

    return {name: np.array(value) for chunk in ray.get(group.weights()) for name, value in chunk}


def test_values_are_a_random_projection_of_transformers_hidden_states(groups, checkpoint):
    import torch
    from transformers import AutoModelForCausalLM

    (one, two), initial = groups
    rows = make_rows()
    for group in (one, two):
        group.load(initial)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).model
    # The head of seed 42, as it is documented: normal, of the model's initializer_range.
    head = torch.empty(1, 64).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(42))
    found = [group.values(rows, max_tokens=max_tokens) for group, max_tokens in ((one, 1000), (two, 30))]
    for i, row in enumerate(rows):
        with torch.no_grad():
            hidden = model(input_ids=torch.from_numpy(row.source.ids).long()[None]).last_hidden_state[0]
        for values in found:
            assert values[i].shape == (row.length,)
            np.testing.assert_allclose(values[i], (hidden @ head[0]).numpy(), atol=1e-5)


def test_the_value_loss_and_its_gradient_do_not_depend_on_ranks_and_micro_batches(groups):
    (one, two), initial = groups
    rows = make_rows()
    results = []
    for group, cut in ((one, {"max_tokens": 1000}), (one, {"micro_batch_size": 1}), (two, {"max_tokens": 30})):
        group.load(initial)
        policy = weights_of(group)
        before = actions(rows, group.values(rows))
        metrics = group.update_critic([rows[:2], rows[2:]] * 3, **cut)
        after = actions(rows, group.values(rows))
        assert metrics["critic/optimizer_steps"] == 6
        assert metrics["critic/clip_ratio"] > 0
        returns = actions(rows, [row.advantage for row in rows])
        assert ((after - returns) ** 2).mean() < 0.7 * ((before - returns) ** 2).mean()
        assert all((policy[name] == value).all() for name, value in weights_of(group).items())
        results.append((metrics, after))
    for metrics, after in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=1e-5, rel=1e-4)
        np.testing.assert_allclose(after, results[0][1], atol=1e-4)
    first = one.load(initial) and one.update_critic([rows])
    returns = actions(rows, [row.advantage for row in rows])
    assert first["critic/value_loss"] == pytest.approx((0.5 * (before - returns) ** 2).mean(), rel=1e-5)


def test_policy_and_critic_go_on_together_from_one_checkpoint_on_any_number_of_ranks(groups, tmp_path):
    (one, two), initial = groups
    rows = make_rows()
    one.load(initial)
    one.update_critic([rows] * 2)
    one.update([rows])
    one.save(tmp_path, {"step": 1})
    expected = {**one.update_critic([rows] * 2), **one.update([rows])}
    assert expected["critic/lr"] == pytest.approx(3e-3 * (38 + 37) / 2 / 40)  # steps 3 and 4 of 40 of a linear schedule
    values, weights = actions(rows, one.values(rows)), weights_of(one)
    for group in (two, one):
        assert group.load(tmp_path) == {"step": 1}
        found = {**group.update_critic([rows] * 2), **group.update([rows])}
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-4)
        np.testing.assert_allclose(actions(rows, group.values(rows)), values, atol=1e-4)
        for name, value in weights_of(group).items():
            np.testing.assert_allclose(value, weights[name], atol=1e-5)


def test_a_checkpoint_without_the_critic_is_refused_as_a_whole(groups, tmp_path):
    (one, two), initial = groups
    shutil.copytree(initial, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "critic")
    for group in (one, two):
        group.load(initial)
        group.update([make_rows()])
        before = weights_of(group)
        with pytest.raises(ConfigError, match="holds no critic"):
            group.load(tmp_path / "half")
        assert all((before[name] == value).all() for name, value in weights_of(group).items())


def test_a_value_that_is_not_finite_skips_the_step(groups):
    (one, two), initial = groups
    for group in (one, two):
        group.load(initial)
        rows = [replace(row, advantage=3e38) for row in make_rows()]
        before = actions(rows, group.values(rows))
        metrics = group.update_critic([rows])
        assert (metrics["critic/skipped_steps"], metrics["critic/optimizer_steps"]) == (1, 0)
        assert (actions(rows, group.values(rows)) == before).all()
