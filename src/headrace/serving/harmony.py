"""Answers in harmony, GPT-OSS's chat format, taken apart: what is reasoning and what is said.

An answer is messages, each of a header, with a channel, and a text:

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>words

The analysis channel is for nobody to see as an answer. Source:
https://github.com/openai/harmony/blob/main/docs/format.md
"""

import re
from dataclasses import dataclass, field

from tokenizers import Tokenizer

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_MARKERS = (
    "<|start|>", _CHANNEL, "<|constrain|>", _MESSAGE, "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_LONGEST = max(map(len, _MARKERS))


def speaks_harmony(tokenizer: Tokenizer) -> bool:
    """Whether a model's answers have channels."""
    return all(tokenizer.token_to_id(marker) is not None for marker in (_CHANNEL, _MESSAGE))


@dataclass
class HarmonyText:
    """One answer, as it comes. It is in a text or, after a marker, in a header."""

    _held: str = ""
    _in_header: bool = False
    _in_channel: bool = False
    _channel: list[str] = field(default_factory=list)

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """What is to be shown of reasoning and of the answer, once this much more came.

        The beginning of what may be a marker waits for the rest, unless this was the last.
        """
        shown: tuple[list[str], list[str]] = [], []
        left = self._held + text
        while (marker := _MARKER.search(left)) is not None:
            self._take(left[: marker.start()], shown)
            self._pass(marker.group())
            left = left[marker.end() :]
        whole = len(left) if last else len(left) - _beginning_of_marker(left)
        self._take(left[:whole], shown)
        self._held = left[whole:]
        return "".join(shown[0]), "".join(shown[1])

    def _pass(self, marker: str) -> None:
        self._in_channel = marker == _CHANNEL
        if self._in_channel:
            self._channel.clear()
        self._in_header = marker != _MESSAGE

    def _take(self, text: str, shown: tuple[list[str], list[str]]) -> None:
        if self._in_channel:
            self._channel.append(text)
        elif not self._in_header:
            name = "".join(self._channel).split()
            shown[name[:1] != ["analysis"]].append(text)


def _beginning_of_marker(text: str) -> int:
    """Characters at the end that a marker may begin with."""
    for size in range(min(_LONGEST - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in _MARKERS):
            return size
    return 0
