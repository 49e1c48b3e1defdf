"""The tiny checkpoint in transformers."""

import pytest

from molt_core.testing.tiny import VOCAB_SIZE, make_tiny_checkpoint

pytestmark = pytest.mark.integration


def test_checkpoint_loads_generates_and_depends_on_its_seed_only(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    paths = [
        make_tiny_checkpoint(tmp_path / name, seed=seed, layers=1) for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    ]
    assert torch.equal(torch.random.get_rng_state(), before)

    models = [AutoModelForCausalLM.from_pretrained(path) for path in paths]
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    ids = torch.tensor([tokenizer.encode("hi")])
    logits = [model(ids).logits for model in models]
    assert logits[0].shape == (1, 2, VOCAB_SIZE)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    config = models[0].generation_config
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    out = models[0].generate(ids, max_new_tokens=4)
    assert tokenizer.decode(out[0]).startswith("hi")
