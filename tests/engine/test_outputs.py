"""Text comes out piece by piece exactly as it would in one go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from headrace.checkpoint.locate import locate_model
from headrace.engine.outputs import TextStream

SMOLLM2 = tokenizer_from_gguf(read_gguf(locate_model("smollm2").path))


def sentencepiece_like() -> Tokenizer:
    """Pieces with a leading space mark, and a token a byte for everything else."""
    words = ["▁the", "▁cat", "s", "▁", "é", "<s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate([*words, *byte_tokens])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


SPM = sentencepiece_like()


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> tuple[list[str], str]:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    return pieces, stream.finish()


# Tokens that are part of a character, special ones, and any others, in even shares.
PARTS = [n for n in range(49152) if "\ufffd" in SMOLLM2.decode([n])]
tokens_of_smollm2 = st.sampled_from(PARTS) | st.integers(0, 16) | st.integers(0, 49151)


@given(st.lists(tokens_of_smollm2, max_size=30))
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_tokens_add_up_to_the_whole_text(tokens: list[int]) -> None:
    pieces, rest = streamed(SMOLLM2, tokens)
    whole = SMOLLM2.decode(tokens, skip_special_tokens=True)
    if "\ufffd" not in whole:
        assert "".join(pieces) + rest == whole


def test_special_tokens_between_the_bytes_of_a_character_do_not_split_it() -> None:
    (end,) = SMOLLM2.encode("<|im_end|>").ids
    first, *others = SMOLLM2.encode("東").ids
    pieces, rest = streamed(SMOLLM2, [end, end, end, end, first, end, *others])
    assert "".join(pieces) + rest == "東"


@given(st.lists(st.integers(0, SPM.get_vocab_size() - 1), max_size=30))
@settings(max_examples=300, deadline=None)
def test_byte_fallback_tokens_add_up_to_the_whole_text(tokens: list[int]) -> None:
    pieces, rest = streamed(SPM, tokens)
    whole = SPM.decode(tokens, skip_special_tokens=True)
    # A byte that spoils a run of bytes makes the decoder take back characters that are out.
    if "\ufffd" not in whole:
        assert "".join(pieces) + rest == whole


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_piece_holds_part_of_a_character(text: str) -> None:
    tokens = SMOLLM2.encode(text).ids
    whole = SMOLLM2.decode(tokens, skip_special_tokens=True)
    pieces, rest = streamed(SMOLLM2, tokens)
    if "\ufffd" not in whole:
        assert all("\ufffd" not in piece for piece in [*pieces, rest])


@pytest.mark.parametrize("text", ["東京タワー", "👩‍👩‍👧‍👦 family", "naïve café"])
def test_a_sequence_cut_inside_a_character_shows_what_is_left_at_the_end(text: str) -> None:
    tokens = SMOLLM2.encode(text).ids[:-1]
    pieces, rest = streamed(SMOLLM2, tokens)
    assert "".join(pieces) + rest == SMOLLM2.decode(tokens, skip_special_tokens=True)
