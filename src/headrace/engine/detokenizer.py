"""Tokens turned into text as they come, in the end as if they were decoded all at once.

Three ways, by what the tokenizer's decoder looks at:
- bytes (GPT-2, Llama 3, Qwen, SmolLM2): every token stands for bytes, and text is their UTF-8;
- tokens (SentencePiece, WordPiece, Metaspace): a token's text depends on no other token, save
  that the beginning of a text is special and that byte tokens count by the run;
- anything else: a token's text depends on the tokens around it.
The first two cost a look-up a token in the common case.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tokenizers import Tokenizer, decoders

_Value = TypeVar("_Value")

# The letters that stand for bytes in byte-level vocabularies (bytes_to_unicode in GPT-2's
# encoder.py): printable Latin-1 characters for themselves, the others numbered from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(_OTHERS)
}

_BYTE_TOKEN = re.compile(r"<0x[+0-9A-Fa-f][0-9A-Fa-f]>")
_INCOMPLETE = "\ufffd"
# A character has at most four bytes, hence at most so many tokens.
_MOST_TOKENS_OF_CHARACTER = 4
# Bytes that an unfinished character may have.
_MOST_UNFINISHED = 3
# Decoders that look at one token at a time and at whether it is the first (ByteFallback: and at
# runs of byte tokens).
_TOKEN_DECODERS = frozenset({"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip"})
# Any text that no decoder changes: what is decoded after it is not the beginning.
_BEFORE = ["a"]


class TextStream(Protocol):
    """The text of one sequence after its prompt. All that `push` and `finish` return, joined, is
    the whole text."""

    def push(self, token: int) -> str:
        """The text that this token completed; never part of a character."""

    def finish(self) -> str:
        """What is left when the sequence ends: bytes of an unfinished character as U+FFFD."""

    def copy(self) -> "TextStream":
        """Another sequence's, that goes on from here by itself."""


class Detokenizer:
    """What the streams of all sequences share; made once, and fast whatever the vocabulary.

    Streams give exactly what `tokenizer.decode(tokens, skip_special_tokens)` gives for all tokens
    of a sequence: ids without a token have no text, nor have special tokens if they are skipped,
    and invalid UTF-8 is replaced by U+FFFD. When text is held back:
    - bytes: while they may be the beginning of a character, so three at most;
    - SentencePiece's byte tokens (<0xE6>): until the run of them is whole characters; otherwise
      until another kind of token ends it. Decoded at once, one invalid byte would also make U+FFFD
      of the whole characters before it in its run; here they are out by then, and stay;
    - decoders of the last kind: while the text ends in U+FFFD, for four tokens at most. Each piece
      is decoded after the piece before it, which is exact for BPEDecoder and CTC; decoders that
      look further back than that may give other text than they do in one go.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._skipped = frozenset(
            token.content for token in added if token.special and skip_special_tokens
        )
        self._decoder: decoders.Decoder | None = tokenizer.decoder
        chain = _chain(self._decoder)
        kinds = [str(link["type"]) for link in chain]
        self._spelled_in_bytes = kinds[-1:] == ["ByteLevel"] and set(kinds[:-1]) <= {"Replace"}
        self._token_by_token = _looks_at_single_tokens(chain)
        self._has_byte_tokens = "ByteFallback" in kinds
        # What comes before ByteLevel rewrites the letters of single tokens.
        self._rewrite: decoders.Decoder | None = None
        if self._spelled_in_bytes and chain[:-1]:
            self._rewrite = decoders.Sequence([])
            rewrite = {"type": "Sequence", "decoders": chain[:-1]}
            self._rewrite.__setstate__(json.dumps(rewrite).encode())
        self._contents = _Remembered(self._content_of)
        self._bytes = _Remembered(self._bytes_of)
        self._texts: _Remembered[str | None]
        if self._spelled_in_bytes:
            self._texts = _Remembered(self._text_of_bytes)
        else:
            self._texts = _Remembered(self._text_inside)
        self._readings = _Remembered(lambda token: self.bytes_of(token).decode("utf-8", "replace"))

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """The text of a new sequence: what its tokens add to the text of its prompt.

        So the first space is there unless the prompt has no text, and a character that the prompt
        began belongs to what comes after it. Costs the prompt's last few tokens, as a rule, but all
        if they are blank: completions of one prompt copy the first one's.
        """
        if self._spelled_in_bytes:
            return _ByteStream(self._texts, self._bytes, self._unfinished_bytes(prompt))
        stream = _TokenStream(self._texts, self._contents, self._decode, self._token_by_token)
        if self._token_by_token:
            inside, end = self._end_after_text(prompt)
            if inside:
                stream.begin_inside()
        else:
            end = self._last_tokens(prompt, 2 * _MOST_TOKENS_OF_CHARACTER)
        for token in end:
            stream.push(token)
        return stream

    def text_of(self, token: int) -> str:
        """How a token reads inside a text, after another one; part of a character as U+FFFD."""
        return self._readings[token]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, maybe part of a character; the UTF-8 of how it reads
        if it stands for text."""
        if self._spelled_in_bytes:
            return self._bytes[token]
        text = self._texts[token]
        return bytes([self._byte_of(token)]) if text is None else text.encode()

    def _unfinished_bytes(self, prompt: Sequence[int]) -> bytes:
        """Those at the prompt's end that may be the beginning of a character."""
        tail = b""
        for token in reversed(prompt):
            tail = self._bytes[token] + tail
            if len(tail) >= _MOST_UNFINISHED:
                break
        # Where the bytes before are missing, what is left of their character is no beginning.
        return tail[utf_8_decode(tail, "replace")[1] :]

    def _end_after_text(self, prompt: Sequence[int]) -> tuple[bool, list[int]]:
        """Whether some token of the prompt is text that no decoder takes for a text's beginning,
        and the tokens after the last of those."""
        end: list[int] = []
        for token in reversed(prompt):
            text = self._texts[token]
            if text is not None and text.strip():
                return True, end[::-1]
            end.append(token)
        return False, end[::-1]

    def _last_tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """The prompt's last tokens that have a part in its text."""
        end: list[int] = []
        for token in reversed(prompt):
            if len(end) == count:
                break
            if self._contents[token] is not None:
                end.append(token)
        return end[::-1]

    def _decode(self, contents: list[str]) -> str:
        if self._decoder is None:
            return " ".join(contents)
        text: str = self._decoder.decode(contents)
        return text

    def _content_of(self, token: int) -> str | None:
        """How the vocabulary writes the token; None if it has no part in the text."""
        content: str | None = self._tokenizer.id_to_token(token)
        return None if content in self._skipped else content

    def _byte_of(self, token: int) -> int:
        """What a byte token spells."""
        content = self._contents[token]
        assert content is not None
        return int(content[3:5], 16)

    def _bytes_of(self, token: int) -> bytes:
        content = self._contents[token]
        if content is None:
            return b""
        letters: str = self._rewrite.decode([content]) if self._rewrite else content
        try:
            return bytes([_BYTE_OF_LETTER[letter] for letter in letters])
        except KeyError:
            # An added token is plain text if one of its characters is no letter for a byte.
            return letters.encode()

    def _text_of_bytes(self, token: int) -> str | None:
        """The token's text when no character is unfinished; None if it leaves one unfinished."""
        data = self._bytes[token]
        text, used = utf_8_decode(data, "replace")
        return text if used == len(data) else None

    def _text_inside(self, token: int) -> str | None:
        """The token's text after another token; None for byte tokens, which count by the run."""
        content = self._contents[token]
        if content is None:
            return ""
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(content):
            return None
        return self._decode([*_BEFORE, content])[len(self._decode(_BEFORE)) :]


class _Remembered(dict[int, _Value], Generic[_Value]):
    """What `compute` says of each token, asked once a token."""

    def __init__(self, compute: Callable[[int], _Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token: int) -> _Value:
        value = self[token] = self._compute(token)
        return value


class _ByteStream:
    """Text of tokens that stand for bytes."""

    __slots__ = ("_bytes", "_texts", "_unfinished")

    def __init__(
        self, texts: _Remembered[str | None], token_bytes: _Remembered[bytes], unfinished: bytes
    ) -> None:
        self._texts = texts
        self._bytes = token_bytes
        self._unfinished = unfinished

    def push(self, token: int) -> str:
        if not self._unfinished:
            text = self._texts[token]
            if text is not None:
                return text
        data = self._unfinished + self._bytes[token]
        # Without its third argument it leaves an unfinished character at the end alone.
        text, used = utf_8_decode(data, "replace")
        self._unfinished = data[used:]
        return text

    def finish(self) -> str:
        text = self._unfinished.decode("utf-8", "replace")
        self._unfinished = b""
        return text

    def copy(self) -> "_ByteStream":
        return _ByteStream(self._texts, self._bytes, self._unfinished)


class _TokenStream:
    """Text of tokens that are text themselves, decoded after a context whose text is out."""

    __slots__ = (
        "_contents",
        "_context",
        "_decode",
        "_done",
        "_held",
        "_inside",
        "_run",
        "_texts",
        "_token_by_token",
    )

    def __init__(
        self,
        texts: _Remembered[str | None],
        contents: _Remembered[str | None],
        decode: Callable[[list[str]], str],
        token_by_token: bool,
    ) -> None:
        self._texts = texts
        self._contents = contents
        self._decode = decode
        self._token_by_token = token_by_token
        # Whether tokens can be looked up: the beginning is over and nothing is held.
        self._inside = False
        self._context: list[str] = []
        # The length of the context's text.
        self._done = 0
        self._held: list[str] = []
        # What the byte tokens at the end of those held spell.
        self._run = bytearray()

    def push(self, token: int) -> str:
        if self._inside:
            text = self._texts[token]
            if text is not None:
                return text
        content = self._contents[token]
        if content is None:
            return ""
        self._inside = False
        self._held.append(content)
        if self._texts[token] is not None:
            self._run.clear()
            return self._decode_held()
        self._run.append(int(content[3:5], 16))
        if not self._token_by_token or not _is_text(self._run):
            return ""
        self._run.clear()
        return self._decode_held()

    def finish(self) -> str:
        self._run.clear()
        if not self._held:
            return ""
        text = self._decode([*self._context, *self._held])[self._done :]
        self._held = []
        return text

    def copy(self) -> "_TokenStream":
        other = _TokenStream(self._texts, self._contents, self._decode, self._token_by_token)
        other._inside, other._done = self._inside, self._done
        other._context, other._held = list(self._context), list(self._held)
        other._run = bytearray(self._run)
        return other

    def begin_inside(self) -> None:
        """Go on as after a text whose decoding can change no more."""
        self._context = _BEFORE
        self._done = len(self._decode(_BEFORE))
        self._held = []
        self._inside = True

    def _decode_held(self) -> str:
        text = self._decode([*self._context, *self._held])
        piece = text[self._done :]
        if self._token_by_token:
            # A beginning without text goes on: decoders may still strip what follows it.
            if piece:
                self.begin_inside()
            return piece
        if text.endswith(_INCOMPLETE) and len(self._held) < _MOST_TOKENS_OF_CHARACTER:
            return ""
        self._context = self._held
        self._done = len(self._decode(self._context))
        self._held = []
        return piece


def _is_text(data: bytearray) -> bool:
    """Whether it is UTF-8 without an unfinished character at its end."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _chain(decoder: decoders.Decoder | None) -> list[dict[str, Any]]:
    """The decoders that run one after another, as tokenizer.json describes them."""

    def flatten(link: dict[str, Any]) -> list[dict[str, Any]]:
        if link["type"] != "Sequence":
            return [link]
        return [inner for each in link["decoders"] for inner in flatten(each)]

    return [] if decoder is None else flatten(json.loads(decoder.__getstate__()))


def _looks_at_single_tokens(chain: list[dict[str, Any]]) -> bool:
    kinds = [link["type"] for link in chain]
    fuse = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    # Once the text is one piece, only taking spaces off its beginning leaves the rest as it was.
    return set(kinds[:fuse]) <= _TOKEN_DECODERS and all(
        link["type"] == "Strip" and link["content"] == " " and link["stop"] == 0
        for link in chain[fuse + 1 :]
    )
