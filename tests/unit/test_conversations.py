"""Conversations for supervised training."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.chat.template import ChatTemplate
from molt_core.data.conversations import cut_conversations, read_conversations
from molt_core.errors import ConfigError
from molt_core.testing.tiny import make_tiny_tokenizer

TEMPLATE = ChatTemplate(None, make_tiny_tokenizer())
CUT_OFF = (list(range(1, 10)), [False] * 6 + [True] * 3)
CUT_INSIDE = (list(range(1, 9)), [False] * 5 + [True] * 3)


def write(tmp_path, *rows):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(user: str, reply: str):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]


def test_a_row_whose_answer_is_cut_off_is_dropped_and_reported_once(caplog):
    with caplog.at_level(logging.WARNING, logger="molt"):
        kept = cut_conversations([CUT_OFF, CUT_INSIDE, CUT_OFF], 6)
    (segment,) = kept.segments
    assert segment.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert segment.action_mask.tolist() == [False] * 5 + [True]
    assert (kept.num_dropped, kept.num_cut) == (2, 1)
    assert len(caplog.records) == 1
    assert "2 have no assistant token within 6 tokens and are dropped; 1 are cut" in caplog.records[0].getMessage()


def test_nothing_left_to_train_is_an_error():
    with pytest.raises(ConfigError, match="none of the 2 conversations has an assistant token within the first 6"):
        cut_conversations([CUT_OFF, CUT_OFF], 6)


def test_a_row_that_fits_exactly_is_whole(caplog):
    kept = cut_conversations([CUT_OFF], 9)
    assert (kept.segments[0].num_actions, kept.num_dropped, kept.num_cut) == (3, 0, 0)
    assert not caplog.records


pairs = st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=12)


@given(st.lists(pairs, max_size=6), st.integers(1, 12))
def test_every_row_is_kept_or_counted(rows, max_len):
    encoded = [([i for i, _ in row], [False, *(on for _, on in row[1:])]) for row in rows]
    trainable = [(ids, mask) for ids, mask in encoded if any(mask[:max_len])]
    if not trainable:
        with pytest.raises(ConfigError):
            cut_conversations(encoded, max_len)
        return
    kept = cut_conversations(encoded, max_len)
    assert len(kept.segments) + kept.num_dropped == len(rows)
    for segment, (ids, mask) in zip(kept.segments, trainable, strict=True):
        assert segment.ids.tolist() == ids[:max_len]
        assert segment.action_mask.tolist() == mask[:max_len]


def test_a_file_of_chats_becomes_segments(tmp_path):
    path = write(tmp_path, {"chat": chat("Hi", "Yo")}, {"chat": chat("A", "B")})
    kept = read_conversations(path, TEMPLATE, max_len=100, messages_key="chat")
    ids, mask = TEMPLATE.supervised(chat("Hi", "Yo"))
    first = kept.segments[0]
    assert first.ids.tolist() == ids
    assert first.action_mask.tolist() == mask
    assert first.ids[first.action_mask].tolist() == [*b"Yo", 258]
    assert len(kept.segments) == 2
    assert np.array_equal(first.versions, np.where(mask, 0, -1))


def test_last_turn_only_and_max_samples_are_passed_on(tmp_path):
    row = {"messages": chat("a", "first") + chat("b", "last")}
    path = write(tmp_path, row, {"messages": "never read"})
    kept = read_conversations(path, TEMPLATE, max_len=100, max_samples=1, last_turn_only=True)
    (segment,) = kept.segments
    assert segment.ids[segment.action_mask].tolist() == [*b"last", 258]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "Hi"}, "line 2: column 'messages' must be a list"),
        ({"messages": []}, "line 2: column 'messages' must be a list"),
        ({"messages": ["Hi"]}, "line 2: message 0 is not an object with a role"),
        ({"text": "Hi"}, "line 2: no column 'messages'"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        read_conversations(write(tmp_path, {"messages": chat("a", "b")}, row), TEMPLATE, max_len=100)


def test_a_file_without_assistant_messages_is_an_error(tmp_path):
    path = write(tmp_path, {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(ConfigError, match=r"chats\.jsonl: none of the 1 conversations"):
        read_conversations(path, TEMPLATE, max_len=100)
