"""Counts the tokens of a request as its deltas pass."""

from collections.abc import Sequence

from headrace.engine.outputs import OutputDelta
from headrace.serving.responses import PromptTokensDetails, Usage


class TokenCount:
    """prompt_tokens: of all prompts, each counted once however many completions it has."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def take(self, number: int, deltas: Sequence[OutputDelta]) -> None:
        """Count what came for the prompt of this number."""
        for delta in deltas:
            self._completion_tokens += delta.token is not None
            if delta.index == 0:
                self._cached[number] = delta.cached_tokens

    def usage(self, completion_tokens: int | None = None) -> Usage:
        """completion_tokens: where what was computed is not what was asked for."""
        if completion_tokens is None:
            completion_tokens = self._completion_tokens
        return Usage(
            self._prompt_tokens,
            completion_tokens,
            self._prompt_tokens + completion_tokens,
            PromptTokensDetails(sum(self._cached.values())),
        )
