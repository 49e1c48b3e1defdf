"""An engine without a model: it answers from a script."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence

from molt_core.rollout.engine import Completion, EngineRequest

Answer = Callable[[EngineRequest], Completion | Awaitable[Completion]]


def completion(
    ids: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0, finish_reason: str = "stop"
) -> Completion:
    """A completion of one policy version; the log-probs are -1 unless given."""
    return Completion(
        tuple(ids), tuple([-1.0] * len(ids) if logprobs is None else logprobs), (version,) * len(ids), finish_reason
    )


class ScriptedEngine:
    """Returns the given completions in order, or whatever a function makes of the request (it may be a coroutine).

    ``requests`` holds what it was asked. It raises AssertionError when it is asked more often than it has answers, and
    when an answer is longer than the request allows.
    """

    def __init__(self, script: Sequence[Completion] | Answer) -> None:
        self.requests: list[EngineRequest] = []
        self._script = script

    async def generate(self, request: EngineRequest) -> Completion:
        self.requests.append(request)
        if callable(self._script):
            answer = self._script(request)
            result = await answer if inspect.isawaitable(answer) else answer
        else:
            assert len(self.requests) <= len(self._script), "the scripted engine has no answer left"
            result = self._script[len(self.requests) - 1]
        assert len(result.ids) <= request.max_tokens, "the scripted answer is longer than the request allows"
        return result
