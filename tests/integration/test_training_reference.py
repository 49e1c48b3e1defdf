"""A reference model in the training ranks: exact, frozen, and the same on one rank and two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from molt_core.config.shared import AdamConfig, FsdpConfig, ModelConfig
from molt_core.contract import Segment, Turn
from molt_core.testing.tiny import make_tiny_checkpoint
from molt_core.training.group import TrainGroup
from molt_core.training.rows import ObjectiveSpec, TrainRow

pytestmark = pytest.mark.integration

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("checkpoints")
    small = {"layers": 2, "hidden_size": 64, "intermediate": 128}
    return tuple(make_tiny_checkpoint(tmp / str(seed), seed=seed, **small) for seed in (0, 1))


@pytest.fixture(scope="module")
def groups(checkpoints):
    """One rank and two, whose reference is another model; the loss is nothing but a KL of k3."""
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1")

    def start(ranks: int) -> TrainGroup:
        return TrainGroup.start(
            ModelConfig(
                model_name_or_path=str(checkpoints[0]), num_gpus_per_node=ranks, adam=AdamConfig(lr=1e-4, eps=1e-4)
            ),
            FsdpConfig(),
            device="cpu",
            num_optimizer_steps=20,
            temperature=TEMPERATURE,
            objective=ObjectiveSpec(loss="ppo", kl="k3"),
            reference=str(checkpoints[1]),
        )

    with ThreadPoolExecutor() as pool:
        started = list(pool.map(start, (1, 2)))
    yield started
    for group in started:
        group.close()
    ray.shutdown()


def make_rows() -> list[TrainRow]:
    rng = np.random.default_rng(3)
    rows = []
    for i in range(4):
        turns = []
        for _ in range(1 + i % 2):
            prompt, action = (rng.integers(0, 256, rng.integers(2, 7)).tolist() for _ in range(2))
            turns.append(Turn(prompt, action, [-5.0] * len(action), [0] * len(action)))
        rows.append(replace(TrainRow.of_segment(Segment.from_turns(turns), i), group=i))
    return rows


def logprobs(path, segment: Segment) -> np.ndarray:
    """transformers' own, (T-1,)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(segment.ids).long()[None]
    with torch.no_grad():
        logp = (model(input_ids=ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, ids[0, 1:, None])[:, 0].numpy()


def test_the_token_kl_is_the_difference_of_two_models_of_transformers(groups, checkpoints):
    rows = make_rows()
    found = [group.token_kl(rows, "k1", max_tokens=40) for group in groups]
    for i, row in enumerate(rows):
        segment = row.source
        d = np.where(segment.action_mask[1:], logprobs(checkpoints[0], segment) - logprobs(checkpoints[1], segment), 0)
        assert np.abs(d).max() > 0.1
        for values in found:
            np.testing.assert_allclose(values[i], d, atol=2e-5)
    k3 = groups[0].token_kl(rows, "k3")
    np.testing.assert_allclose(k3[0], np.exp(-found[0][0]) + found[0][0] - 1, atol=1e-5)


def of_reference(group: TrainGroup, rows: list[TrainRow]) -> np.ndarray:
    """The reference's log-probs on all actions, from the policy's and the difference."""
    pairs = zip(group.logprobs(rows), group.token_kl(rows, "k1"), strict=True)
    return np.concatenate([logp - kl for logp, kl in pairs])


def test_a_kl_in_the_loss_is_measured_before_the_update_and_shrinks_whatever_the_ranks(groups):
    rows = make_rows()

    def mean_kl(group: TrainGroup) -> float:
        pairs = zip(group.token_kl(rows, "k3"), rows, strict=True)
        return float(np.concatenate([kl[row.source.action_mask[1:]] for kl, row in pairs]).mean())

    before, still = mean_kl(groups[0]), of_reference(groups[0], rows)
    results = [group.update([rows[:2], rows[2:]] * 2, recompute_old=True, kl_coef=1.0) for group in groups]
    for metrics in results[1:]:
        assert metrics == pytest.approx(results[0], abs=1e-5, rel=1e-4)
    assert results[0]["train/optimizer_steps"] == 4
    for group in groups:
        after = mean_kl(group)
        assert after < 0.99 * before
        assert group.update([rows], kl_coef=1.0)["train/kl"] == pytest.approx(after, rel=1e-4)
        np.testing.assert_allclose(of_reference(group, rows), still, atol=1e-5)


def test_a_reference_that_is_the_policy_itself_has_a_kl_of_exactly_zero(checkpoints, groups):
    for ranks in (1, 2):
        group = TrainGroup.start(
            ModelConfig(model_name_or_path=str(checkpoints[0]), num_gpus_per_node=ranks),
            FsdpConfig(),
            device="cpu",
            num_optimizer_steps=1,
            objective=ObjectiveSpec(loss="ppo"),
            reference=str(checkpoints[0]),
        )
        try:
            assert all((kl == 0).all() for kl in group.token_kl(make_rows(), "k1"))
        finally:
            group.close()
