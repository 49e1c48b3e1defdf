"""Which tokenizers mean the same by a token id."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from molt_core.chat.vocabulary import vocabulary_difference
from molt_core.testing.tiny import TURN_START, VOCAB_SIZE, make_tiny_tokenizer


@pytest.fixture
def save(tmp_path):
    def write(name: str, change=lambda tokenizer: None, vocab_size: int = VOCAB_SIZE) -> str:
        tokenizer = make_tiny_tokenizer()
        change(tokenizer)
        tokenizer.save_pretrained(tmp_path / name)
        Qwen3Config(vocab_size=vocab_size).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return write


def test_equal_tokenizers_do_not_differ_whatever_their_chat_template_and_padding(save):
    def other(tokenizer):
        tokenizer.chat_template = "{{ messages }}"
        tokenizer.pad_token = TURN_START

    assert vocabulary_difference(save("student"), save("teacher", other, VOCAB_SIZE + 64)) == ""


def test_a_token_more_a_special_token_another_end_and_fewer_outputs_are_named(save):
    student = save("student")
    more = save("more", lambda t: t.add_tokens(["<tool>"]))
    assert (
        vocabulary_difference(student, more) == f"token '<tool>' has the id none in one and {VOCAB_SIZE} in the other"
    )
    plain, special = (
        save(f"special{flag}", lambda t, flag=flag: t.add_tokens(["<tool>"], special_tokens=flag))
        for flag in (False, True)
    )
    assert "special tokens differ" in vocabulary_difference(plain, special)
    end = save("end", lambda t: setattr(t, "eos_token", TURN_START))
    assert "end a sequence differ: ['<|im_end|>'] and ['<|im_start|>']" in vocabulary_difference(student, end)
    assert vocabulary_difference(student, save("few", vocab_size=VOCAB_SIZE - 1)) == "320 ids against 319"
