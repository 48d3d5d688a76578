"""Whatever a file's bytes are, it is read or refused, with memory in proportion to its size."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.checkpoint.tokenizer import tokenizer_of_gguf
from headrace.config import EngineConfig
from headrace.deployment.start import launch
from headrace.errors import ModelError, StartError, UsageError
from headrace.model.read import model_from_gguf
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

# Beside some 100 KiB of file: what Python and numpy take for headers of that size, many times over.
MOST_BYTES = 32 << 20


def load_here(path: Path) -> None:
    """Load all of a model, though for a short context."""
    files = locate_model(str(path))
    if files.kind == "gguf":
        tokenizer_of_gguf(read_gguf(files.path))
    model = read_model(files)
    with np.errstate(all="ignore"):
        load_stage(files, model, max_model_len=min(model.sizes.max_positions, 128))


def load(model: Path) -> bool:
    """Whether the model was taken; else it was refused, in one line, and with little memory."""
    tracemalloc.start()
    refusal = ""
    try:
        load_here(model)
    except (ModelError, UsageError) as error:
        refusal = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert "\n" not in refusal
    assert peak < MOST_BYTES
    return not refusal


@st.composite
def damages(draw: st.DrawFn, size: int) -> Callable[[bytes], bytes]:
    """Some bytes replaced, mostly by numbers that are too large, or the end cut off."""
    if draw(st.integers(0, 9)) == 0:
        length = draw(st.integers(0, size - 1))
        return lambda whole: whole[:length]
    position = draw(st.integers(0, size - 1))
    new = draw(
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from(
                [b"\xff", b"\x7f", b"\0", b"9", b"\xff" * 4, b"\0\0\0\x80", b"\xff" * 8]
            ),
        )
    )
    return lambda whole: whole[:position] + new + whole[position + len(new) :]


GENTLY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@GENTLY
@given(data=st.data())
def test_a_damaged_gguf_file_is_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole, damaged = tmp_path / "whole.gguf", tmp_path / "damaged.gguf"
    if not whole.exists():
        write_tiny_gguf(whole)
        assert load(whole)
    first = min(tensor.offset for tensor in read_gguf(whole).tensors.values())
    damaged.write_bytes(data.draw(damages(first))(whole.read_bytes()))
    load(damaged)


@GENTLY
@given(data=st.data())
def test_a_damaged_directory_is_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        write_tiny_llama(folder, max_shard_size="30KB")
        assert load(folder)
    names = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        sorted(folder.glob("model-*.safetensors"))[0].name,
    ]
    file = folder / data.draw(st.sampled_from(names))
    whole = file.read_bytes()
    try:
        file.write_bytes(data.draw(damages(min(len(whole), 4000)))(whole))
        load(folder)
    finally:
        file.write_bytes(whole)


NUMBERS = [
    10**30,
    4 * 10**9,
    400_000_000,
    70_000,
    0,
    -1,
    1.5,
    float("nan"),
    "x",
    None,
    True,
    [],
    {},
]


@pytest.mark.parametrize("field", [
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
    "num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings",
    "rope_parameters", "architectures", "model_type", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "eos_token_id", "dtype", "hidden_act", "num_labels", "layer_types",
])  # fmt: skip
def test_no_value_of_a_field_costs_more_than_an_error(tmp_path: Path, field: str) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    file = folder / "config.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    for value in NUMBERS:
        file.write_text(json.dumps(whole | {field: value}), encoding="utf-8")
        load(folder)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "model.gguf")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.block_count", 4_000_000_000, "tensor blk.4.attn_norm.weight is missing"),
        ("llama.block_count", 3, "tensor 'blk.3."),
        ("llama.embedding_length", 1 << 35, "token_embd.weight has shape [300, 32]"),
        ("llama.feed_forward_length", 1 << 35, "ffn_gate.weight has shape [48, 32]"),
        ("llama.attention.head_count", 1 << 31, "head_dim is 0"),
        ("llama.attention.key_length", 1 << 20, "attn_q.weight has shape [32, 32]"),
        ("llama.attention.value_length", 4, "values shorter than keys"),
        ("llama.context_length", 1 << 62, "max_positions is"),
        ("llama.rope.freq_base", float("nan"), "rope theta is nan"),
        ("llama.rope.scaling.attn_factor", 0.0, "rope scale is 0.0"),
        ("llama.attention.layer_norm_rms_epsilon", float("inf"), "rms_norm_epsilon is inf"),
        ("llama.attention.causal", False, "generates no text"),
        ("llama.attn_logit_softcapping", 50.0, "llama.attn_logit_softcapping (50.0) is not known"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor (0.5) is not known"),
        ("general.type", "adapter", "an adapter (LoRA)"),
        ("general.type", "imatrix", "an importance matrix"),
        ("general.architecture", "clip", "an image or audio encoder (mmproj)"),
        ("split.count", 3, "one part of a split GGUF file"),
    ],
)
def test_metadata_that_cannot_be_right_are_named(
    tiny_file: Path, key: str, value: Any, reason: str
) -> None:
    file = read_gguf(tiny_file)
    file.metadata[key] = value
    with pytest.raises(ModelError) as caught:
        model_from_gguf(file)
    assert reason in str(caught.value)


def test_a_later_part_of_a_split_file_is_called_one(tiny_file: Path) -> None:
    file = read_gguf(tiny_file)
    file.metadata.clear()
    file.metadata.update({"split.no": 1, "split.count": 3})
    with pytest.raises(ModelError, match=r"split.no 1, counted from 0"):
        model_from_gguf(file)


def test_a_tensor_too_many_is_named(tiny_file: Path) -> None:
    file = read_gguf(tiny_file)
    file.tensors["blk.0.attn_q_norm.weight"] = file.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(ModelError, match=r"'blk.0.attn_q_norm.weight' is none of a Llama"):
        model_from_gguf(file)


def sentencepiece(file: GgufFile, tokens: list[str]) -> GgufFile:
    file.metadata.update(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        }
    )
    return file


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["a", "b" * 1_000_000], "a piece of 1000000 characters"),
        (["a" * length for length in range(1, 400)], "can be joined in more than"),
    ],
)
def test_vocabularies_whose_pieces_take_too_much_work_are_refused(
    tiny_file: Path, tokens: list[str], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        tokenizer_of_gguf(sentencepiece(read_gguf(tiny_file), tokens))


def test_tensors_that_overlap_are_refused(tiny_file: Path, tmp_path: Path) -> None:
    """Or a small file could describe any amount of weights."""
    tensors = read_gguf(tiny_file).tensors
    offset = sorted(tensor.offset for tensor in tensors.values())[1]
    start = min(tensor.offset for tensor in tensors.values())
    contents = tiny_file.read_bytes()
    written = (offset - start).to_bytes(8, "little")
    assert contents[:start].count(written) == 1
    (tmp_path / "model.gguf").write_bytes(contents.replace(written, bytes(8), 1))
    with pytest.raises(ModelError, match=r"overlap; the file is damaged"):
        read_gguf(tmp_path / "model.gguf")


def test_a_context_beyond_memory_is_one_line_that_says_how_much_fits(tmp_path: Path) -> None:
    """By the file's own words, and before any stage starts."""
    file = write_tiny_gguf(tmp_path / "model.gguf", max_positions=4_000_000_000)
    with pytest.raises(StartError) as caught:
        launch(EngineConfig(model=str(file)))
    words = str(caught.value)
    assert "--max-model-len 4000000000 takes" in words
    fitting = int(words.partition("room for less than ")[2].partition(":")[0])
    assert 1000 < fitting < 4_000_000_000


def test_linear_scaling_lengthens_the_context_and_yarn_does_not(tiny_file: Path) -> None:
    file = read_gguf(tiny_file)
    file.metadata["llama.rope.scaling.factor"] = 4.0
    assert model_from_gguf(file).sizes.max_positions == 512
    file.metadata["llama.rope.scaling.type"] = "yarn"
    assert model_from_gguf(file).sizes.max_positions == 128


def test_old_and_foreign_gguf_files_are_told_apart(tiny_file: Path, tmp_path: Path) -> None:
    whole = tiny_file.read_bytes()
    path = tmp_path / "model"
    for version, words in ((b"\1\0\0\0", "GGUF version 1"), (b"\0\0\0\3", "big-endian GGUF file")):
        path.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(ModelError, match=words):
            read_gguf(locate_model(str(path)).path)
    assert gguf.GGUF_VERSION == 3
