"""The built-in environment: one prompt, one answer, no judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from molt_core.agents.env import Action, Env, EnvContext, Message, Result


class SingleTurn(Env):
    """Ask the prompt, take one answer, reward 0. For estimators that need no reward, or with ``reward.name``.

    The prompt is the column ``messages`` (chat messages; an answer of the assistant at their end is left out), or else
    ``prompt`` or ``question`` (one user message).
    """

    columns = ("messages|prompt|question",)
    gives_reward = False

    async def reset(self, row: Mapping[str, Any], ctx: EnvContext) -> Sequence[Message] | str:
        """The prompt of the row as messages."""
        if "messages" not in row:
            return [{"role": "user", "content": str(row["prompt"] if "prompt" in row else row["question"])}]
        messages = list(row["messages"])
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise ValueError("the column messages has no message before the assistant's")
        return messages

    async def step(self, action: Action, ctx: EnvContext) -> Result:
        """End the rollout."""
        return Result(terminated=True)
