"""The tiny tokenizer: ids that can be derived by hand."""

from hypothesis import given
from hypothesis import strategies as st

from molt_core.testing.tiny import VOCAB_SIZE, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


def test_a_byte_is_its_own_id_and_special_tokens_follow():
    assert TOKENIZER.encode("Aé\n", add_special_tokens=True) == [65, 0xC3, 0xA9, 10]
    assert TOKENIZER.encode("<|endoftext|><|im_start|><|im_end|>") == [256, 257, 258]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, len(TOKENIZER)) == (256, 258, VOCAB_SIZE)


@given(st.text())
def test_text_round_trips(text):
    assert TOKENIZER.decode(list(text.encode())) == text


def test_every_id_decodes():
    assert all(TOKENIZER.decode([i]) for i in range(VOCAB_SIZE))


def test_chat_template_is_chatml_with_every_role():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "tool")]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n"
    )
