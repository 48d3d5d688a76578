"""Text comes out piece by piece exactly as it would in one go, and no later than it must."""

import re
from collections.abc import Iterator
from itertools import product, zip_longest

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from headrace.checkpoint.locate import locate_model
from headrace.engine.detokenizer import Detokenizer

SMOLLM2 = tokenizer_from_gguf(read_gguf(locate_model("smollm2").path))
SMOLLM2_DETOKENIZER = Detokenizer(SMOLLM2)
ANY_BYTES = st.lists(st.integers(0, 255), max_size=12)


def byte_level(*before: decoders.Decoder) -> Tokenizer:
    """A token a byte, a few of several, and added ones of every sort; ids 0 to 255 are bytes."""
    letters = bytes_to_unicode()
    several = [b" the", b"\xe6\x9d", b"\xb1x", b"\x80\xf0", b"\xed\xa0", b"\xef\xbf\xbd", b"\xe6"]
    words = ["".join(letters[byte] for byte in word) for word in several if len(word) > 1]
    vocabulary = {token: n for n, token in enumerate([*map(letters.get, range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_tokens([AddedToken(t) for t in ("two words", "é", "日本", "\ufffd", "<tool>")])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = (
        decoders.Sequence([*before, decoders.ByteLevel()]) if before else decoders.ByteLevel()
    )
    return tokenizer


def sentencepiece(*after: decoders.Decoder) -> Tokenizer:
    """Pieces with a space mark, and a token a byte, ids 0 to 255, for everything else."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁the", "▁cat", "s", "▁", "▁▁▁", "é", "\ufffd", "<0xZZ>", "<0x+F>"]
    vocabulary = {token: number for number, token in enumerate([*byte_tokens, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_tokens(["<tool>", "two words", "▁tool"])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *after])
    return tokenizer


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    tokens = [
        "▁a",
        "▁",
        "b",
        "##c",
        "##",
        ".",
        " .",
        "é</w>",
        "f</w>",
        "|",
        "<pad>",
        "",
        "<0x41>",
        "\ufffd",
    ]
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, "b"))
    tokenizer.add_special_tokens(["<s>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


PLAIN_BYTES = byte_level()
LLAMA2 = sentencepiece(decoders.Strip(" ", 1, 0))
TOKENIZERS = {
    "byte level": PLAIN_BYTES,
    "byte level, rewritten before": byte_level(
        decoders.Replace(Regex(r"\Aé\z"), "Ã©"), decoders.Sequence([decoders.Replace("t", "æ")])
    ),
    "SentencePiece": LLAMA2,
    "SentencePiece, spaces kept": sentencepiece(),
    "SentencePiece, three spaces stripped": sentencepiece(decoders.Strip(" ", 3, 0)),
    "Metaspace": words(decoders.Metaspace()),
    "Metaspace after bytes": words(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    ),
    "WordPiece": words(decoders.WordPiece()),
    "Fuse": words(decoders.Fuse()),
    "no decoder": words(None),
    "BPEDecoder": words(decoders.BPEDecoder()),
    "CTC": words(decoders.CTC()),
}
DETOKENIZERS = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def id_of(tokenizer: Tokenizer, content: str) -> int:
    token = tokenizer.token_to_id(content)
    assert token is not None
    return token


def whole(tokenizer: Tokenizer, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def streamed(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], str]:
    stream = detokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    return pieces, stream.finish()


def spoils_whole_characters(tokenizer: Tokenizer, tokens: list[int]) -> bool:
    """Whether a run of byte tokens begins with whole characters and turns out not to be text.

    Decoded at once it is all U+FFFD; in a stream the characters are out before the bad byte comes.
    """
    contents = [tokenizer.id_to_token(token) for token in tokens]
    runs, run = [], bytearray()
    for content in [c for c in contents if c not in ("<s>", "</s>", None)] + ["end"]:
        byte = re.fullmatch("<0x([+0-9A-Fa-f][0-9A-Fa-f])>", content)
        if byte:
            run.append(int(byte[1], 16))
        else:
            runs.append(bytes(run))
            run.clear()
    return any(r.decode(errors="ignore").encode() != r and _begins_whole(r) for r in runs)


def _begins_whole(data: bytes) -> bool:
    return any(data[:n].decode(errors="ignore").encode() == data[:n] for n in range(1, 5))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_any_tokens_add_up_to_the_whole_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    # What is neither a byte nor beyond the vocabulary is rare among all ids, so it comes again.
    tokens_of_all_kinds = st.integers(0, size + 1) | st.integers(max(0, size - 20), size - 1)

    @given(st.lists(tokens_of_all_kinds, max_size=20))
    @settings(max_examples=50, deadline=None)
    def check(tokens: list[int]) -> None:
        assume(not spoils_whole_characters(tokenizer, tokens))
        pieces, rest = streamed(DETOKENIZERS[name], tokens)
        assert "".join(pieces) + rest == whole(tokenizer, tokens)

    check()


READERS = {
    name: Detokenizer(tokenizer, skip_special_tokens=False)
    for name, tokenizer in TOKENIZERS.items()
}
# Where a token's own text does not depend on the tokens around it.
READABLE = [name for name in TOKENIZERS if name not in ("BPEDecoder", "CTC")]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answer_is_the_continuation_of_its_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    tokens_of_all_kinds = st.integers(0, size + 1) | st.integers(max(0, size - 20), size - 1)

    @given(st.lists(tokens_of_all_kinds, max_size=16), st.lists(tokens_of_all_kinds, max_size=8))
    @settings(max_examples=100, deadline=None)
    def check(prompt: list[int], answer: list[int]) -> None:
        assume(not spoils_whole_characters(tokenizer, prompt + answer))
        before = "".join(map(DETOKENIZERS[name].stream().push, prompt))
        stream = DETOKENIZERS[name].stream(prompt)
        text = "".join(map(stream.push, answer)) + stream.finish()
        assert before + text == whole(tokenizer, prompt + answer)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_copy_goes_on_by_itself(name: str) -> None:
    size = TOKENIZERS[name].get_vocab_size()
    tokens = st.lists(st.integers(0, size - 1), max_size=8)

    @given(tokens, tokens, tokens)
    @settings(max_examples=50, deadline=None)
    def check(prompt: list[int], one: list[int], other: list[int]) -> None:
        begun = DETOKENIZERS[name].stream(prompt)
        streams = [begun.copy() for _ in range(2)]
        texts = ["", ""]
        # In turns, so that what they shared would show.
        for pair in zip_longest(one, other):
            for place, token in enumerate(pair):
                if token is not None:
                    texts[place] += streams[place].push(token)
        alone = [DETOKENIZERS[name].stream(prompt) for _ in range(2)]
        for text, stream, own, answer in zip(texts, streams, alone, (one, other), strict=True):
            assert text + stream.finish() == "".join(map(own.push, answer)) + own.finish()

    check()


@pytest.mark.parametrize("prompt", [[], ["<s>"], ["<s>", "▁"]])
def test_the_first_space_of_a_text_is_the_first_one_after_a_prompt_without_text(
    prompt: list[str],
) -> None:
    the, cat = id_of(LLAMA2, "▁the"), id_of(LLAMA2, "▁cat")
    ids = [id_of(LLAMA2, content) for content in prompt]
    stream = DETOKENIZERS["SentencePiece"].stream(ids)
    first = " the" if "▁" in prompt else "the"
    assert [stream.push(the), stream.push(cat)] == [first, " cat"]
    stream = DETOKENIZERS["SentencePiece"].stream([*ids, cat])
    assert stream.push(the) == " the"


def test_only_the_end_of_a_prompt_is_looked_at() -> None:
    class Once(list[int]):
        """A prompt whose first tokens nobody may look at."""

        def __reversed__(self) -> Iterator[int]:
            for token in super().__reversed__():
                assert token != 0, "the beginning was looked at"
                yield token

    for name, end in [("byte level", [65, 66, 67]), ("SentencePiece", [257, 0xE6])]:
        stream = DETOKENIZERS[name].stream(Once([0] * 10 + end))
        assert stream.push(65) in ("A", "\ufffdA", "")


@pytest.mark.parametrize("name", READABLE)
def test_what_tokens_read_like_and_their_bytes_add_up_to_the_text(name: str) -> None:
    tokenizer, reader = TOKENIZERS[name], READERS[name]
    size = tokenizer.get_vocab_size()
    tokens_of_all_kinds = st.integers(0, size + 1) | st.integers(max(0, size - 20), size - 1)

    @given(st.lists(tokens_of_all_kinds, min_size=1, max_size=12))
    @settings(max_examples=100, deadline=None)
    def check(tokens: list[int]) -> None:
        # After something that is a text already, or the beginning would lose its space.
        before = id_of(tokenizer, "s" if "Sentence" in name else "b")
        stream = reader.stream([before])
        pieces = [stream.push(token) for token in tokens]
        text = "".join(pieces) + stream.finish()
        data = b"".join(map(reader.bytes_of, tokens))
        readings = [reader.text_of(token) for token in tokens]
        assert [len(reading) > 0 for reading in readings] == [
            len(reader.bytes_of(token)) > 0 for token in tokens
        ]
        whole_text = tokenizer.decode([before, *tokens], skip_special_tokens=False)
        alone = tokenizer.decode([before], skip_special_tokens=False)
        if "\ufffd" not in text:
            assert alone + text == whole_text
            assert data.decode() == text
        if "\ufffd" not in "".join(readings):
            assert "".join(readings) == text

    check()


def test_no_two_pieces_of_a_sentencepiece_vocabulary_read_alike_for_want_of_a_space() -> None:
    reader = READERS["SentencePiece"]
    pieces = [token for token in range(256, LLAMA2.get_vocab_size()) if token != 0x20]
    readings = [reader.text_of(token) for token in pieces]
    # A piece that is written like another one's byte or mark is that text.
    assert len(set(readings)) == len(readings)
    assert reader.text_of(id_of(LLAMA2, "▁the")) == " the"
    assert reader.text_of(id_of(LLAMA2, "<s>")) == "<s>"
    assert reader.text_of(0xE6) == "\ufffd"
    assert reader.bytes_of(0xE6) == b"\xe6"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_three_tokens_of_different_sorts_add_up_to_the_whole_text(name: str) -> None:
    size = TOKENIZERS[name].get_vocab_size()
    sorts = {*range(max(0, size - 14), size), *{0x0A, 0x20, 0xE6, 0x9D}.intersection(range(size))}
    for tokens in product(sorted(sorts), repeat=3):
        if spoils_whole_characters(TOKENIZERS[name], list(tokens)):
            continue
        pieces, rest = streamed(DETOKENIZERS[name], list(tokens))
        assert "".join(pieces) + rest == whole(TOKENIZERS[name], list(tokens)), tokens


def test_a_space_that_only_the_end_of_a_text_loses_is_kept_inside_it() -> None:
    # Not among the others because tokenizers itself panics when nothing is there to be stripped.
    tokenizer = sentencepiece(decoders.Strip(" ", 0, 1))
    detokenizer = Detokenizer(tokenizer)
    some = [id_of(tokenizer, content) for content in ("s", "▁", "▁the", "▁▁▁", "<0x20>", "<0xE6>")]
    for tokens in product(some, repeat=4):
        if spoils_whole_characters(tokenizer, list(tokens)):
            continue
        pieces, rest = streamed(detokenizer, list(tokens))
        assert "".join(pieces) + rest == whole(tokenizer, list(tokens)), tokens


@given(st.lists(ANY_BYTES | st.text(max_size=4).map(lambda text: list(text.encode())), max_size=6))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["byte level", "SentencePiece"])
def test_bytes_are_read_as_the_decoder_reads_them(name: str, parts: list[list[int]]) -> None:
    tokens = [byte for part in parts for byte in part]
    assume(not spoils_whole_characters(TOKENIZERS[name], tokens))
    pieces, rest = streamed(DETOKENIZERS[name], tokens)
    assert "".join(pieces) + rest == whole(TOKENIZERS[name], tokens)


def test_every_beginning_of_a_character_followed_by_every_byte_is_read_as_in_one_go() -> None:
    stream = Detokenizer(PLAIN_BYTES).stream()
    beginnings = [[], [0xC3], [0xE0], [0xE6], [0xED], [0xEF], [0xE6, 0x9D], [0xF0], [0xF4]]
    for beginning in [*beginnings, [0xF0, 0x9F], [0xF4, 0x8F], [0xF0, 0x9F, 0x8F], [0xF5], [0x80]]:
        for byte in range(256):
            tokens = [*beginning, byte, ord("a")]
            text = "".join(map(stream.push, tokens))
            assert text == whole(PLAIN_BYTES, tokens)


# Tokens that are part of a character, special ones, and any others, in even shares.
PARTS = [n for n in range(49152) if "\ufffd" in SMOLLM2.decode([n])]
tokens_of_smollm2 = st.sampled_from(PARTS) | st.integers(0, 16) | st.integers(0, 49151)


@given(st.lists(tokens_of_smollm2, max_size=30))
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_tokens_of_smollm2_add_up_to_the_whole_text(tokens: list[int]) -> None:
    pieces, rest = streamed(SMOLLM2_DETOKENIZER, tokens)
    assert "".join(pieces) + rest == whole(SMOLLM2, tokens)


def test_each_token_of_smollm2_alone_and_after_others_has_its_text() -> None:
    detokenizer = Detokenizer(SMOLLM2)
    first = SMOLLM2.encode("東").ids[0]
    for token in range(SMOLLM2.get_vocab_size()):
        # The second time it is known already, and it follows part of a character.
        for tokens in ([token], [first, token]):
            stream = detokenizer.stream()
            text = "".join(map(stream.push, tokens)) + stream.finish()
            assert text == whole(SMOLLM2, tokens), token


def test_special_tokens_between_the_bytes_of_a_character_do_not_split_it() -> None:
    (end,) = SMOLLM2.encode("<|im_end|>").ids
    first, *others = SMOLLM2.encode("東").ids
    pieces, rest = streamed(SMOLLM2_DETOKENIZER, [end, end, end, end, first, end, *others])
    assert "".join(pieces) == "東"
    assert rest == ""


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_comes_out_whole_characters_at_a_time_and_at_once(text: str) -> None:
    stream = SMOLLM2_DETOKENIZER.stream()
    tokens = SMOLLM2.encode(text).ids
    out = ""
    for number, token in enumerate(tokens):
        out += stream.push(token)
        so_far = whole(SMOLLM2, tokens[: number + 1])
        # Only the unfinished character at the end is missing.
        assert so_far in (out, out + "\ufffd")
    assert out + stream.finish() == whole(SMOLLM2, tokens)


@given(st.lists(st.sampled_from(["▁the", "▁cat", "s", "é", "▁", "東", "\n", "👩"])))
@settings(max_examples=100, deadline=None)
def test_characters_in_byte_tokens_come_out_with_their_last_byte(parts: list[str]) -> None:
    stream = DETOKENIZERS["SentencePiece"].stream()
    tokens: list[int] = []
    out = ""
    for part in parts:
        known = LLAMA2.token_to_id(part)
        own = list(part.encode()) if known is None else [known]
        for token in own[:-1]:
            assert stream.push(token) == ""
        out += stream.push(own[-1])
        tokens += own
        assert out == whole(LLAMA2, tokens)


def test_an_invalid_byte_spoils_what_is_not_out_yet() -> None:
    s, the = id_of(LLAMA2, "s"), id_of(LLAMA2, "▁the")
    pieces, rest = streamed(
        DETOKENIZERS["SentencePiece"], [s, 0xE6, 0x9D, 0xB1, 0x0A, 0xFF, 0x0A, the, 0x0A]
    )
    assert pieces == ["s", "", "", "東", "\n", "", "", "\ufffd" * 2 + " the", "\n"]
    assert rest == ""


@pytest.mark.parametrize("text", ["東京タワー", "👩‍👩‍👧‍👦 family", "naïve café"])
def test_a_sequence_cut_inside_a_character_shows_what_is_left_at_the_end(text: str) -> None:
    tokens = SMOLLM2.encode(text).ids[:-1]
    pieces, rest = streamed(SMOLLM2_DETOKENIZER, tokens)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + rest == whole(SMOLLM2, tokens)


def test_streams_of_one_detokenizer_do_not_mix() -> None:
    detokenizer = Detokenizer(PLAIN_BYTES)
    one, other = detokenizer.stream(), detokenizer.stream()
    assert [one.push(0xC3), other.push(0xE6), one.push(0xA9), other.push(0x9D)] == ["", "", "é", ""]
    assert [one.finish(), other.finish(), other.finish()] == ["", "\ufffd", ""]


def test_decoders_of_no_known_kind_do_not_split_characters() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    text = "naïve 東京 👩‍👩‍👧"
    pieces, rest = streamed(Detokenizer(tokenizer), list(text.encode()))
    assert [piece for piece in pieces if piece] == list(text)
    assert rest == ""


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("SentencePiece", [0, 1, 7, 8, 256, 257] * 50), ("BPEDecoder", [7, 8] * 50 + [13] * 100)],
)
def test_what_is_decoded_at_once_does_not_grow_with_the_text(
    name: str, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def decode(detokenizer: Detokenizer, contents: list[str]) -> str:
        lengths.append(len(contents))
        return str(TOKENIZERS[name].decoder.decode(contents))

    monkeypatch.setattr(Detokenizer, "_decode", decode)
    pieces, rest = streamed(Detokenizer(TOKENIZERS[name]), tokens)
    assert "".join(pieces) + rest == whole(TOKENIZERS[name], tokens)
    # Eight at most: four that may be one character after four that were.
    assert 2 <= max(lengths) <= 8
