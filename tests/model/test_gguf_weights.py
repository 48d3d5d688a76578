"""GGUF files of a tiny model: the same logits as from the safetensors it came from."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_conversion import convert
from headrace.bench.model_shape import shape_of
from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.errors import ModelError
from headrace.kernels.batch import AttentionBatch
from headrace.model.read import model_from_gguf
from headrace.model.rope import inverse_frequencies
from headrace.protocol.model_config import RopeConfig
from stage_models import load_stage, read_model, whole
from tiny_checkpoints import write_tiny_llama


def rope_of(file: GgufFile) -> RopeConfig:
    return shape_of(whole(model_from_gguf(file))).rope


def logits(path: Path) -> torch.Tensor:
    """Of ten tokens in one go, [10, vocab]."""
    files = locate_model(str(path))
    stage = load_stage(files, read_model(files))
    stage.allocate(num_blocks=1, block_size=16)
    places = torch.arange(10)
    batch = AttentionBatch(
        places, places, torch.tensor([[0]]), torch.tensor([0, 10]), torch.tensor([10]), [10], [10]
    )
    with torch.inference_mode():
        return stage.logits(stage.forward(places * 7 + 3, batch))


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["untied", "tied", "biases"],
)
def test_a_gguf_file_gives_the_logits_of_the_directory_it_came_from(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = write_tiny_llama(tmp_path / "model", **options)
    file = convert(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    expected = logits(model)
    found = logits(file)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_give_the_logits_of_their_dequantized_values(
    tmp_path: Path, name: str
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    model = write_tiny_llama(tmp_path / "model", intermediate_size=64, num_hidden_layers=1)
    file = convert(model, tmp_path / "model.gguf", kind)
    # Quantization goes by row, so the order of rows does not matter to it.
    weights = load_file(model / "model.safetensors")
    for key, tensor in weights.items():
        if tensor.dim() == 2:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            assert not np.array_equal(rounded, tensor.numpy())
            weights[key] = torch.from_numpy(rounded)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    expected = logits(model)
    found = logits(file)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "gemma9"}, "gemma9 is not supported; supported are llama"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling longrope is not supported"),
        ({"llama.rope.dimension_count": 4}, "only part of each head"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "9 experts are more than the 8"),
        ({"llama.expert_count": 8}, "expert_used_count is missing"),
        ({"split.count": 3}, "split GGUF"),
        ({"llama.attention.head_count_kv": 3}, "cannot share"),
        ({"llama.block_count": "four"}, "not of type int"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file = convert(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    read = read_gguf(file)
    read.metadata.update(metadata)
    with pytest.raises(ModelError, match=reason):
        model_from_gguf(read)


def test_factors_of_phi3s_frequencies_of_another_number_are_refused(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", architecture="Phi3", pad_token_id=None)
    read = read_gguf(convert(model, tmp_path / "model.gguf"))
    for length in ("long", "short"):
        read.tensors[f"rope_factors_{length}.weight"] = read.tensors["output_norm.weight"]
    with pytest.raises(ModelError, match="tensor rope_factors_short"):
        model_from_gguf(read)


@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
@pytest.mark.parametrize(("kind", "temperature"), [("yarn", 1 + 0.1 * math.log(4)), ("linear", 1)])
def test_the_attention_factor_multiplies_as_in_llama_cpp(
    tmp_path: Path, kind: str, temperature: float, factor: float | None
) -> None:
    """llama-context.cpp: yarn_attn_factor *= hparams.rope_attn_factor, of any kind of scaling."""
    model = write_tiny_llama(tmp_path / "model")
    read = read_gguf(convert(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32))
    read.metadata.update({"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0})
    if factor is not None:
        read.metadata["llama.rope.scaling.attn_factor"] = factor
    scale = inverse_frequencies(rope_of(read), 8, 128)[1]
    assert scale == pytest.approx(temperature * (1.0 if factor is None else factor))


def test_rope_scaling_in_the_metadata_is_followed(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file = convert(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    read = read_gguf(file)
    read.metadata.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    plain = inverse_frequencies(rope_of(read_gguf(file)), 8, 128)[0]
    stretched = inverse_frequencies(rope_of(read), 8, 128)[0]
    torch.testing.assert_close(stretched, plain / 2)
