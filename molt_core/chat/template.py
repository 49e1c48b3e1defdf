"""Chat templates: prompts, the tokens between two turns, and which tokens the assistant wrote.

Everything is read off the tokenizer's own Jinja template, by rendering it and looking at where a mark comes out.
"""

from __future__ import annotations

import json
import logging
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from molt_core.agents.env import Message
from molt_core.chat.spans import overlap_mask
from molt_core.component import Component
from molt_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("molt")

_USER, _ASSISTANT, _NEXT = "\ue000", "\ue001", "\ue002"
"""Contents of probe messages: private-use characters, which no template writes."""
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face checkpoint; ``ConfigError`` if there is none at ``path``."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"no tokenizer can be loaded from {str(path)!r}, give a checkpoint with one: {reason[0]}"
        ) from error


@dataclass(frozen=True)
class _Layout:
    """What probes tell about a template.

    ``as_parts``: it wants content as a list of parts. ``scaffold``: the end of the generation prompt that finished
    turns do not have, such as an opened ``<think>``. ``headers``: by the next message's role, the text from the end of
    an assistant turn (terminator included in the turn) to that message's content; None for the end of the conversation.
    ``terminators``: ids of the special tokens that end an assistant turn; empty for a template without any.
    """

    as_parts: bool
    scaffold: str
    headers: Mapping[str | None, str]
    terminators: tuple[int, ...]


class ChatTemplate(Component):
    """The default adapter, for every tokenizer with a Jinja chat template.

    Rendered text carries the special tokens that it needs, so it is encoded without adding any. Special tokens that
    are spelled out in the content of a message that the assistant did not write stay plain text.
    """

    kind = "chat-template"

    def __init__(self, config: BaseModel | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config)
        self.tokenizer = tokenizer
        special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special_ids = special
        self._special = re.compile("|".join(re.escape(s) for s in sorted(special, key=len, reverse=True)) or r"(?!)")

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation that the assistant is to continue."""
        messages, literals = self._prepare(messages)
        text = self._render(messages, tools, prompt=True)
        self._require_rendered(messages, tools, prompt=True)
        return self._encode(text, literals)[0]

    def raw_prompt_ids(self, text: str) -> list[int]:
        """Token ids of plain text without a template, with the special tokens that the tokenizer adds by itself."""
        return list(self.tokenizer.encode(text, add_special_tokens=True))

    def next_turn_ids(self, action_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Token ids to append after a sampled action: the rest of its turn, the new messages, the generation prompt.

        The turn's terminator comes first unless the action ends with a stop token. Nothing of the action is tokenised
        again, and the result never holds a start-of-text token.
        """
        new_messages, literals = self._prepare(new_messages)
        probe = self._shape([_message("user", _USER), _message("assistant", _ASSISTANT)])
        text = self._render([*probe, *new_messages], prompt=True).partition(_ASSISTANT)[2]
        self._require_rendered([*probe, *new_messages], prompt=True, after=_ASSISTANT)
        ended = bool(action_ids) and action_ids[-1] in self.stop_token_ids
        terminator = self._special.search(text) if ended and self._layout.terminators else None
        if terminator:
            text = text[terminator.end() :]
        ids = self._encode(text, literals)[0]
        # Where a turn ends with the opener of the next one, the model may have sampled that opener.
        return ids[1:] if ended and not terminator and ids[:1] == [action_ids[-1]] else ids

    def action_text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an assistant turn: of the template, the generation config and the tokenizer."""
        ids = set(self._layout.terminators) if self.tokenizer.chat_template else set()
        ids.update(_generation_eos(self.tokenizer.name_or_path))
        if self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(ids))

    def supervised(
        self,
        messages: Sequence[Message],
        last_turn_only: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation (T,), and which of them the assistant wrote (T,), for supervised training.

        The assistant wrote what the template renders for its messages after the generation prompt, the terminator
        included where the template has one. ``ConfigError`` where the template does not show where a turn begins or
        ends.
        """
        messages, literals = self._prepare(messages)
        text = self._render(messages, tools)
        self._require_rendered(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if last_turn_only:
            turns = turns[-1:]
        spans = [self._turn_span(messages, i, text, tools) for i in turns]
        ids, offsets = self._encode(text, literals)
        mask = overlap_mask(offsets, spans)
        mask[:1] = False  # nothing predicts the first token
        return ids, mask.tolist()

    def _turn_span(self, messages: list[Message], i: int, text: str, tools: Any) -> tuple[int, int]:
        """Characters [start, end) of ``text`` that assistant message ``i`` wrote."""
        prompt = self._render(messages[:i], tools, prompt=True)
        start, bridge = 0, prompt
        for j in reversed(range(i)):
            point = self._anchor(messages, j, text, tools)
            prompt_point = self._anchor(messages[:i], j, prompt, tools, prompt=True)
            if point is not None and prompt_point is not None:
                start, bridge = point, prompt[prompt_point:]
                break
        if not text.startswith(bridge, start):
            bridge = bridge.removesuffix(self._layout.scaffold)
        if not text.startswith(bridge, start):
            raise ConfigError(
                f"the chat template does not show where assistant message {i} begins, rewrite or drop the row"
            )
        start += len(bridge)
        return start, self._turn_end(messages, i, text, tools, start)

    def _turn_end(self, messages: list[Message], i: int, text: str, tools: Any, start: int) -> int:
        """Where in ``text`` assistant message ``i``, which begins at ``start``, ends."""
        end, role, heads = len(text), None, {""}
        for j in range(i + 1, len(messages)):
            point = self._anchor(messages, j, text, tools)
            if point is not None and point >= start:
                content, role = _text_of(messages[j]), messages[j]["role"]
                head = content[: _middle(role, content)]
                end, heads = point, {head, head.lstrip()}  # templates may strip a content
                break
        if role in self._layout.headers:
            for head in heads:
                if text.endswith(self._layout.headers[role] + head, start, end):
                    return end - len(self._layout.headers[role] + head)
        stops = {s for s, token_id in self._special_ids.items() if token_id in self.stop_token_ids}
        ends = [m.end() for m in self._special.finditer(text, start, end) if m[0] in stops]
        if not ends:
            raise ConfigError(
                f"the chat template does not show where assistant message {i} ends, rewrite or drop the row"
            )
        return ends[-1]

    def _anchor(self, messages: list[Message], j: int, text: str, tools: Any, prompt: bool = False) -> int | None:
        """Where the middle of message ``j``'s content is in ``text``; None if ``text`` does not hold it once."""
        mark = next(chr(c) for c in _PRIVATE_USE if chr(c) not in text)
        before, found, after = self._render(self._marked(messages, j, mark), tools, prompt).partition(mark)
        return len(before) if found and before + after == text else None

    def _require_rendered(
        self, messages: list[Message], tools: Any = None, prompt: bool = False, after: str = ""
    ) -> None:
        """``ConfigError`` for an outside message or a tool call that the template leaves out.

        With ``after``, only the messages behind the one with that content are checked, and only the text behind it.
        """
        first = next((j + 1 for j, m in enumerate(messages) if after and _text_of(m) == after), 0)
        for j, message in enumerate(messages[first:], first):
            if message["role"] == "assistant":
                calls = message.get("tool_calls") or ()
                named = [[*calls[:k], _named(call, _NEXT), *calls[k + 1 :]] for k, call in enumerate(calls)]
                variants = [[*messages[:j], {**message, "tool_calls": c}, *messages[j + 1 :]] for c in named]
            else:
                variants = [self._marked(messages, j, _NEXT)]
            for variant in variants:
                rendered = self._render(variant, tools, prompt)
                if _NEXT not in rendered[rendered.find(after) :]:
                    what = "a tool call" if message["role"] == "assistant" else f"the role {message['role']!r}"
                    raise ConfigError(f"the chat template leaves out {what}, use a template that renders it")

    def _marked(self, messages: list[Message], j: int, mark: str) -> list[Message]:
        """The conversation with ``mark`` put into the middle of message ``j``'s content.

        The middle, because templates strip the ends of a content and look at how it begins and ends.
        """
        content = _text_of(messages[j])
        at = _middle(messages[j]["role"], content)
        marked = self._shape([{**messages[j], "content": content[:at] + mark + content[at:]}])
        return [*messages[:j], *marked, *messages[j + 1 :]]

    @cached_property
    def _layout(self) -> _Layout:
        user = _message("user", _USER)
        as_parts = _USER not in self._render([user])
        shape = _as_parts if as_parts else list[Message]
        user, reply = shape([user, _message("assistant", _ASSISTANT)])
        if _USER not in self._render([user]) or _ASSISTANT not in self._render([user, reply]):
            raise ConfigError("the chat template renders no message content, use a checkpoint with another template")

        generation = self._render([user], prompt=True).partition(_USER)[2]
        closings: dict[str | None, str] = {None: self._render([user, reply]).partition(_ASSISTANT)[2]}
        openings = [self._render([user, reply]).partition(_USER)[2]]
        for role in ("user", "tool", "system", "assistant"):
            try:
                rendered = self._render([user, reply, *shape([_message(role, _NEXT)])])
            except ConfigError:  # not every template has every role
                continue
            closing, found, _ = rendered.partition(_ASSISTANT)[2].partition(_NEXT)
            if found:
                closings[role] = closing
                openings.append(rendered.partition(_USER)[2])

        terminators: set[int] = set()
        headers = dict(closings)
        if self._special.search(closings[None]):
            for following, closing in closings.items():
                terminator = self._special.search(closing)
                if terminator:
                    terminators.add(self._special_ids[terminator[0]])
                    headers[following] = closing[terminator.end() :]
        return _Layout(as_parts, self._scaffold(generation, openings), headers, tuple(sorted(terminators)))

    def _scaffold(self, generation: str, openings: list[str]) -> str:
        """What ``generation`` has beyond its common beginning with ``openings``, counted in whole tokens."""
        common = len(os.path.commonprefix([generation, *openings]))  # noqa: RUF071  characters are what is compared
        ends = [end for _, end in self._encode(generation, {})[1] if end <= common]
        return generation[max(ends, default=0) :]

    def _prepare(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Messages in the template's form, with the special tokens in foreign content replaced by marks.

        Returns the marks, one character each, with the text that each stands for.
        """
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ConfigError(f"message {i} is not an object with a role, give chat messages in the OpenAI form")
        foreign = [m for m in messages if m["role"] != "assistant"]
        spelled = {s for m in foreign for s in self._special.findall(_text_of(m))}
        literals: dict[str, str] = {}
        if spelled:
            everything = json.dumps(list(messages), ensure_ascii=False, default=str)
            # From the far end, so that _anchor's marks stay free.
            free = (chr(c) for c in reversed(_PRIVATE_USE) if chr(c) not in everything)
            literals = dict(zip(free, sorted(spelled), strict=False))
            marks = {literal: mark for mark, literal in literals.items()}
            messages = [
                m if m["role"] == "assistant" else {**m, "content": self._mark(m.get("content"), marks)}
                for m in messages
            ]
        return self._shape(messages), literals

    def _mark(self, content: Any, marks: Mapping[str, str]) -> Any:
        if isinstance(content, str):
            return self._special.sub(lambda found: marks.get(found[0], found[0]), content)
        if isinstance(content, list):
            return [
                {**p, "text": self._mark(p["text"], marks)} if isinstance(p, dict) and "text" in p else p
                for p in content
            ]
        return content

    def _shape(self, messages: Sequence[Message]) -> list[Message]:
        return _as_parts(messages) if self._layout.as_parts else list(messages)

    def _render(self, messages: Sequence[Message], tools: Any = None, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template: use a checkpoint with one, "
                "or let the environment give its prompts as plain strings"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=prompt
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise ConfigError(f"the chat template cannot render messages with the roles [{roles}]: {error}") from error

    def _encode(self, text: str, literals: Mapping[str, str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and their character ranges in ``text``; marks of ``literals`` become the tokens of the plain text."""
        if not self.tokenizer.is_fast:
            raise ConfigError("the tokenizer does not report character ranges, use a checkpoint with a fast tokenizer")
        pieces = re.split(f"([{''.join(literals)}])", text) if literals else [text]
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for piece in pieces:
            plain = piece in literals
            out = self.tokenizer(
                literals.get(piece, piece),
                add_special_tokens=False,
                return_offsets_mapping=True,
                split_special_tokens=plain,
            )
            ids += out["input_ids"]
            offsets += [(at, at + 1) if plain else (at + a, at + b) for a, b in out["offset_mapping"]]
            at += len(piece)
        return ids, offsets


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _named(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A tool call, in the OpenAI form or bare, with another function name."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}


def _as_parts(messages: Sequence[Message]) -> list[Message]:
    """The same messages with string contents as a list of one text part."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else dict(m)
        for m in messages
    ]


def _text_of(message: Message) -> str:
    """The text of a message's content: the string, or its text parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    return content if isinstance(content, str) else ""


def _middle(role: str, content: str) -> int:
    """An index inside a content that a template keeps: its middle, or its end for the assistant, whose beginning may
    be reasoning that the template drops."""
    body = content.strip()
    lead = len(content) - len(content.lstrip())
    return lead + (len(body) if role == "assistant" else len(body) // 2)


def _generation_eos(name: str) -> list[int]:
    """End-of-turn ids of a checkpoint's generation config; none, with a warning, if it has no such file."""
    if not name:
        return []
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):
        logger.warning("%s has no generation config: its stop tokens are those of the template and the tokenizer", name)
        return []
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
