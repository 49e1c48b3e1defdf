"""Whether two checkpoints mean the same by a token id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from molt_core.chat.template import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vocabulary_difference(student: str, teacher: str, trust_remote_code: bool = False) -> str:
    """The first difference that matters when ``teacher`` scores the tokens of ``student``; "" if there is none.

    Compared are the ids of all tokens, which of them are special, which begin and end a sequence, and that the teacher
    has an output for every id that the student can sample. How texts are split into tokens is of no concern.
    """
    from transformers import AutoConfig

    one, other = (load_tokenizer(path, trust_remote_code) for path in (student, teacher))
    vocab, other_vocab = one.get_vocab(), other.get_vocab()
    if vocab != other_vocab:
        token = min(t for t in vocab.keys() | other_vocab.keys() if vocab.get(t) != other_vocab.get(t))
        return f"token {token!r} has the id {_id(vocab, token)} in one and {_id(other_vocab, token)} in the other"
    for name, mine, its in zip(_special(one), _special(one).values(), _special(other).values(), strict=True):
        if mine != its:
            return f"the {name} differ: {mine} and {its}"
    sizes = [
        AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config().vocab_size
        for path in (student, teacher)
    ]
    if sizes[1] < sizes[0]:
        return f"{sizes[0]} ids against {sizes[1]}"
    return ""


def _id(vocab: dict[str, int], token: str) -> str:
    return str(vocab[token]) if token in vocab else "none"


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[str | None]]:
    marked = sorted(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {
        "special tokens": [str(token) for token in marked],
        "tokens that begin a sequence": [tokenizer.bos_token],
        "tokens that end a sequence": [tokenizer.eos_token],
    }
