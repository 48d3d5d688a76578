"""Configurations of strangers: what published ones say is taken, what nobody knows is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.published import LLAMA, PHI3, PUBLISHED
from headrace.checkpoint.locate import locate_model
from headrace.errors import ModelError
from headrace.model.architectures import ARCHITECTURES
from headrace.model.decoder import Decoder
from headrace.model.read import describe_huggingface, model_from_huggingface
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import Program
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama


def read(raw: dict[str, Any]) -> tuple[Decoder, Program, str, tuple[int, ...]]:
    """Sizes, program, dtype, and end-of-text tokens."""
    architecture = next(a for a in ARCHITECTURES if a.model_type == raw["model_type"])
    said = describe_huggingface(Path("model"), raw, architecture, {})
    program = said.design.program(StageShare(0, said.design.decoder.num_layers, True, True))
    return said.design.decoder, program, said.dtype, said.eos_token_ids


@pytest.mark.parametrize(("raw", "context"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_configurations_as_published_are_taken(raw: dict[str, Any], context: int) -> None:
    config, *_ = read(raw)
    assert config.max_positions == context
    assert config.hidden_size == raw["hidden_size"]
    assert config.head_dim == raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("residual_multiplier", 0.22),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("use_qk_norm", True),
        ("per_layer_config", {"0": {"hidden_size": 8}}),
        ("layer_types", ["sliding_attention"] * 32),
        ("num_labels", 10**9),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "mrope_section": [16, 24, 24]}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
    ],
)
def test_a_field_that_may_change_the_model_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        read(LLAMA | {field: value})
    named = next(iter(value.keys() - {"type", "factor"})) if field == "rope_scaling" else field
    assert named in str(caught.value)
    assert "is not known and may change what the model computes" in str(caught.value)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_is_off_is_taken(value: object) -> None:
    assert read(LLAMA | {"attn_logit_softcapping": value}) == read(LLAMA)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config", "quantization"])
@pytest.mark.parametrize(
    ("value", "method"),
    [
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"bits": 4, "group_size": 64}, "4 bits"),
        ([{"quant_method": "gptq"}], "of an unnamed kind"),
        ("awq", "of an unnamed kind"),
    ],
)
def test_every_word_for_quantized_weights_is_understood(
    field: str, value: object, method: str
) -> None:
    with pytest.raises(ModelError, match=rf"are quantized \({method}\) according to its {field}"):
        read(LLAMA | {field: value})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0],
                           "long_factor": [1.0, 2.0]}}, "longrope has 1 factors, heads of 128"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [0.0],
                           "long_factor": [1.0]}}, "rope short_factor 0 is 0"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope factor is nan"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor"),
        ({"rope_theta": -1.0}, "rope theta is -1"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "cannot stretch"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_epsilon is nan"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
        ({"hidden_size": 10**30, "num_attention_heads": 1}, "hidden_size is 1000"),
        ({"max_position_embeddings": 0}, "max_positions is 0"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"torch_dtype": "int8"}, "dtype int8 is not supported"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(LLAMA | fields)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"partial_rotary_factor": 0.75}, "(partial_rotary_factor 0.75) is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
         "rope_parameters.partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64}}, "long_factor"),
        # Which transformers refuses, too.
        ({"rope_scaling": {"type": "su"} | FACTORS}, "longrope"),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
)  # fmt: skip
def test_what_is_not_supported_of_phi3_is_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(PHI3 | fields)
    assert reason in str(caught.value)


def test_without_a_window_phi3_says_none_or_0() -> None:
    assert read(PHI3 | {"sliding_window": 0}) == read(PHI3 | {"sliding_window": None})
    assert read(PHI3 | {"sliding_window": 2047}) != read(PHI3)


@pytest.mark.parametrize(
    ("published", "fields", "reason"),
    [
        ("Mixtral-8x7B-Instruct-v0.1", {"num_experts_per_tok": 9}, "9 experts are more than the 8"),
        ("Mixtral-8x7B-Instruct-v0.1", {"num_local_experts": 0}, "number of experts is 0"),
        ("Qwen1.5-MoE-A2.7B-Chat", {"shared_expert_intermediate_size": 0},
         "shared_expert_intermediate_size is 0"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("Qwen3-30B-A3B", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("OLMoE-1B-7B-0924-Instruct", {"clip_qkv": 8.0}, "clip_qkv 8.0) are not supported"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported"),
        ("granite-3.3-2b-instruct", {"logits_scaling": 0.0}, "logits multiplier is 0"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 36 layers"),
    ],
)  # fmt: skip
def test_what_is_not_supported_of_a_family_is_named(
    published: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(PUBLISHED[published][0] | fields)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields))


def index(folder: Path, name: str) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder.parent / "outside.safetensors")
    where = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(where))


def index_of_numbers(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": 3}}')


def only_a_gguf_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    write_tiny_gguf(folder / "model.gguf")


def a_pipe(folder: Path) -> None:
    """Which nobody ever writes to."""
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


DIRECTORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "more layers than tensors": (
        lambda folder: edit(folder, num_hidden_layers=10**9),
        "tensor model.layers.4.input_layernorm.weight is missing",
    ),
    "a vocabulary of another size": (
        lambda folder: edit(folder, vocab_size=10**9),
        "embed_tokens.weight has shape [300, 32], the configuration asks for [1000000000, 32]",
    ),
    "more heads than tensors": (
        lambda folder: edit(folder, head_dim=10**6),
        "q_proj.weight has shape [32, 32], the configuration asks for [4000000, 32]",
    ),
    "an index to outside": (lambda folder: index(folder, "../outside.safetensors"), "outside the"),
    "an index to the root": (
        lambda folder: index(folder, f"{folder.parent}/outside.safetensors"),
        "outside the",
    ),
    "an index to nothing": (lambda folder: index(folder, "\0"), "is missing"),
    "an index that is none": (
        index_of_numbers,
        "is not a safetensors index",
    ),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin) are pickled, a format that can run code",
    ),
    "an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "holds an adapter (LoRA)",
    ),
    "an adapter alone": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "holds an adapter (LoRA)",
    ),
    "old GPTQ weights": (
        lambda folder: (folder / "quantize_config.json").write_text('{"bits": 4}'),
        "quantized by GPTQ (quantize_config.json)",
    ),
    "a GGUF file only": (
        only_a_gguf_file,
        "give one of them, such as",
    ),
    "code of its own": (
        lambda folder: edit(folder, model_type="zzz", auto_map={"AutoConfig": "own.C"}),
        "needs code of its own, auto_map, which is never run",
    ),
    "a classifier": (
        lambda folder: edit(folder, architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification is not supported",
    ),
    "deep nesting": (
        lambda folder: (folder / "config.json").write_text("[" * 10**6),
        "nests too deeply",
    ),
    "a configuration that is too large": (
        lambda folder: (folder / "config.json").open("r+b").truncate(1 << 40),
        "more than 67108864 are not plausible",
    ),
    "a pipe": (
        a_pipe,
        "has no config.json",
    ),
}


@pytest.mark.parametrize(("change", "reason"), DIRECTORIES.values(), ids=DIRECTORIES.keys())
def test_a_directory_that_cannot_be_right_is_named_in_one_line(
    tmp_path: Path, change: Callable[[Path], object], reason: str
) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    change(folder)
    with pytest.raises(ModelError) as caught:
        model_from_huggingface(locate_model(str(folder)).path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_of_links_to_blobs_is_read(tmp_path: Path) -> None:
    snapshot = write_tiny_llama(tmp_path / "snapshots" / "main")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    expected = model_from_huggingface(snapshot).sizes
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../../blobs") / str(number))
    assert model_from_huggingface(snapshot).sizes == expected


def test_the_dtype_is_the_weights_where_the_configuration_names_none(tmp_path: Path) -> None:
    import torch

    folder = write_tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    edit(folder, dtype=None)
    assert model_from_huggingface(folder).sizes.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.bin", b"PK\3\4", "pickled weights, which can run code, are not read"),
        ("model", b"\x80\x02}q\0", "pickled weights, which can run code, are not read"),
        ("old.bin", b"tjgg\3\0\0\0", "a GGML file from before GGUF"),
        ("model.safetensors", b"\x40\0\0\0\0\0\0\0{", "give the directory that holds it"),
        ("model.gguf", b"GG", "a single file must be a GGUF file"),
    ],
)
def test_files_that_are_no_gguf_get_words_of_their_own(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        locate_model(str(tmp_path / name))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["sha256-9ab0", "M.GGUF", "model"])
def test_a_gguf_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    write_tiny_gguf(tmp_path / "model.gguf").rename(tmp_path / name)
    assert locate_model(str(tmp_path / name)).kind == "gguf"
