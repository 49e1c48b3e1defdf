"""Scoring with AutoModel's model in this process: numbers as transformers', memory without the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from molt_core.config.shared import AdamConfig, FsdpConfig, ModelConfig
from molt_core.contract import Segment, Turn
from molt_core.errors import ConfigError
from molt_core.testing.tiny import make_tiny_checkpoint
from molt_core.training import policy as policy_module
from molt_core.training.mesh import Rank, init_process_group
from molt_core.training.optimizers import build_optimizer, build_scheduler
from molt_core.training.packing import MicroBatch, collate
from molt_core.training.policy import Policy, build_model
from molt_core.training.state import load_state, save_state

pytestmark = pytest.mark.integration

RANK = Rank(0, 1, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="module")
def model(checkpoint):
    import torch.distributed as dist

    init_process_group(0, 1, "cpu", dist.HashStore())
    yield build_model(ModelConfig(model_name_or_path=str(checkpoint)), FsdpConfig(), RANK)
    dist.destroy_process_group()


def segments() -> list[Segment]:
    rng = np.random.default_rng(0)
    turns = [[(3, 4)], [(2, 5), (4, 3)], [(6, 1)]]
    return [
        Segment.from_turns(
            [Turn(rng.integers(0, 256, p), rng.integers(0, 256, a), [-1.0] * a, [0] * a) for p, a in conversation]
        )
        for conversation in turns
    ]


def together(rows: list[Segment]) -> MicroBatch:
    return collate(rows, [0.0] * len(rows), [1.0] * len(rows), 256)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers_at_the_temperature(model, checkpoint, temperature):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = segments()
    scores, entropies = Policy(model, RANK, temperature).score(together(rows), entropy=True)
    for i, row in enumerate(rows):
        ids = torch.from_numpy(row.ids).long()[None]
        logp = (reference(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        expected = logp.gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(row.action_mask[1:])
        width = len(row.ids) - 1
        torch.testing.assert_close(scores[i, :width][mask], expected[mask], atol=1e-5, rtol=0)
        entropy = -(logp.exp() * logp).sum(-1)
        torch.testing.assert_close(entropies[i, :width][mask], entropy[mask], atol=1e-5, rtol=0)
        assert not scores[i, :width][~mask].any()


def test_a_padded_row_has_the_log_probs_and_gradients_that_it_has_alone(model):
    policy, rows = Policy(model, RANK), segments()

    def gradients(batches: list[MicroBatch]) -> tuple[list[torch.Tensor], torch.Tensor]:
        scores = [policy.score(batch)[0] for batch in batches]
        sum(s.sum() for s in scores).backward()
        grad = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return [s.detach() for s in scores], grad

    padded, grad_padded = gradients([together(rows)])
    alone, grad_alone = gradients([together([row]) for row in rows])
    for i, values in enumerate(alone):
        torch.testing.assert_close(padded[0][i, : values.shape[1]], values[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(grad_padded, grad_alone, atol=1e-4, rtol=1e-4)


def test_no_logits_of_the_whole_batch_are_made_or_kept(model, monkeypatch):
    monkeypatch.setattr(policy_module, "HEAD_ROWS", 4)
    policy, batch = Policy(model, RANK), together(segments())
    vocabulary = model.config.vocab_size
    assert batch.index.numel() > 3 * 4
    weight = policy._head.weight
    saved: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != weight.data_ptr():
            saved.append(tuple(tensor.shape))
        return tensor

    made: list[int] = []
    handle = policy._head.register_forward_hook(lambda module, inputs, output: made.append(output.numel()))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores, _ = policy.score(batch)
    handle.remove()
    assert made == [batch.index.numel()]  # one number per action token leaves the head
    assert len(saved) > 10
    assert not [shape for shape in saved if vocabulary in shape]
    scores.sum().backward()
    assert torch.isfinite(weight.grad).all()
    model.zero_grad()


def test_an_entropy_has_a_gradient_only_where_it_is_asked_for(model):
    policy, batch = Policy(model, RANK), together(segments())

    def gradient(**options) -> torch.Tensor:
        _, entropy = policy.score(batch, entropy=True, **options)
        entropy.sum().backward()
        grad = policy._head.weight.grad.clone()
        model.zero_grad()
        return grad

    assert not gradient().any()
    assert gradient(entropy_grad=True).any()


def test_a_micro_batch_without_rows_runs_and_has_zero_gradients(model):
    scores, _ = Policy(model, RANK).score(collate([], [], [], 256))
    scores.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()


def test_a_model_that_changes_its_logits_behind_the_head_is_refused(model):
    handle = model.register_forward_hook(lambda module, args, output: output.__setitem__("logits", output.logits * 2))
    with pytest.raises(ConfigError, match="soft capping"):
        Policy(model, RANK)
    handle.remove()
    Policy(model, RANK)


def test_weights_have_the_names_of_the_checkpoint_without_the_tied_head(model, checkpoint):
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")
    assert json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"]
    weights = dict(Policy(model, RANK).hf_weights(torch.float32))
    assert weights.keys() == stored.keys() - {"lm_head.weight"}
    assert all(torch.equal(weights[name], stored[name]) for name in weights)


def test_saving_changes_nothing_and_loading_restores_the_random_state(model, tmp_path):
    config = ModelConfig(adam=AdamConfig(lr=0.1), lr_scheduler="linear", lr_warmup_ratio=0.0)

    def train(save: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 3)
        optimizer = build_optimizer(layer.parameters(), config.adam)
        scheduler = build_scheduler(optimizer, config, 10)
        if save:
            save_state(tmp_path, layer, optimizer, scheduler, RANK, {})
        layer(torch.rand(2, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        if save:
            assert load_state(tmp_path, layer, optimizer, scheduler, RANK) == {}
            assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [0.1]
            layer.zero_grad()
            layer(torch.rand(2, 3)).square().sum().backward()
            optimizer.step()
        return layer.weight.detach()

    torch.testing.assert_close(train(save=True), train(save=False), atol=0, rtol=0)


def test_a_checkpoint_that_is_not_there_is_a_config_error(model, tmp_path):
    with pytest.raises(ConfigError, match="model_name_or_path"):
        build_model(ModelConfig(model_name_or_path=str(tmp_path / "absent")), FsdpConfig(), RANK)
