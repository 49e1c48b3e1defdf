"""Refits of a mixture of experts, whose weights vLLM repacks for its CPU kernels."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from molt_core.rollout.actors import WeightsIncompleteError
from molt_core.rollout.engine import EngineRequest, EngineSettings
from molt_core.rollout.refit import refit
from molt_core.rollout.remote import start_engines
from molt_core.testing.tiny import VOCAB_SIZE

pytestmark = pytest.mark.integration

PROMPTS = [[65 + i, 66, 67] for i in range(6)]


def make_policy(seed):
    """A random mixture of experts with weights large enough for the experts to matter."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).eval()


def checkpoint(model, folder):
    """The tensors under their names in a checkpoint: one per expert."""
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    return list(load_file(folder / "model.safetensors").items())


async def check(engine, model, version):
    import torch

    requests = [EngineRequest(prompt, 16, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    for prompt, done in zip(PROMPTS, await asyncio.gather(*map(engine.generate, requests)), strict=True):
        assert set(done.versions) == {version}
        ids = torch.tensor([[*prompt, *done.ids]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0], -1)
        expected = scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


def test_experts_are_exact_after_every_refit_and_a_missing_expert_is_noticed(tmp_path):
    import ray

    policies = [make_policy(seed) for seed in range(3)]
    tensors = [checkpoint(model, tmp_path / str(version)) for version, model in enumerate(policies)]

    async def scenario():
        (engine,) = start_engines(EngineSettings(str(tmp_path / "0"), "cpu", "float32", max_len=64), 1)
        await check(engine, policies[0], 0)
        for version in (1, 2):
            await refit([engine], [ray.put(tensors[version])], version)
            await check(engine, policies[version], version)
        lost = "model.layers.1.mlp.experts.3.up_proj.weight"
        with pytest.raises(WeightsIncompleteError, match=r"layers\.1\.mlp\.experts"):
            await refit([engine], [ray.put([pair for pair in tensors[1] if pair[0] != lost])], 3)
        await engine.shutdown()

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    try:
        asyncio.run(scenario())
    finally:
        ray.shutdown()
