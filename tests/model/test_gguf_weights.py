"""GGUF files of a tiny model: the same logits as from the safetensors it came from."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.checkpoint.config import config_from_gguf, config_from_huggingface
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.errors import ModelError
from headrace.kernels.batch import AttentionBatch
from headrace.model.rope import inverse_frequencies
from headrace.protocol.model_config import ModelConfig
from stage_models import load_stage
from tiny_checkpoints import write_tiny_llama

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp's converter orders q and k: the halves of each head interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def convert(model: Path, path: Path, kind: gguf.GGMLQuantizationType, **metadata: Any) -> Path:
    """Write the directory's tensors as a GGUF file; metadata replaces or adds keys."""
    config = config_from_huggingface(model)
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.rope.dimension_count": config.head_dim,
        **metadata,
    }
    for key, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_layer_norm_rms_eps(config.rms_norm_epsilon)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    writer.add_token_merges([])
    for name, tensor in load_file(model / "model.safetensors").items():
        array = tensor.float().numpy()
        if name in TOP:
            target = TOP[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            part, end = rest.rsplit(".", 1)
            target = f"blk.{layer}.{LAYER[part]}.{end}"
            if "q_proj" in part:
                array = permuted(array, config.num_heads)
            if "k_proj" in part:
                array = permuted(array, config.num_kv_heads)
        stored = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else kind
        data = gguf.quants.quantize(array, stored)
        writer.add_tensor(target, data, raw_shape=data.shape, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(files: ModelFiles, config: ModelConfig) -> torch.Tensor:
    """Of ten tokens in one go, [10, vocab]."""
    model = load_stage(files, config)
    model.allocate(num_blocks=1, block_size=16)
    places = torch.arange(10)
    batch = AttentionBatch(
        places, places, torch.tensor([[0]]), torch.tensor([0, 10]), torch.tensor([10]), [10], [10]
    )
    with torch.inference_mode():
        return model.logits(model.forward(places * 7 + 3, batch))


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
    config = config_from_gguf(read_gguf(file))
    expected = logits(locate_model(str(model)), config_from_huggingface(model))
    found = logits(locate_model(str(file)), config)
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
    expected = logits(locate_model(str(model)), config_from_huggingface(model))
    found = logits(locate_model(str(file)), config_from_gguf(read_gguf(file)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "gemma9"}, "gemma9 is not supported; supported are llama"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling longrope is not supported"),
        ({"llama.rope.dimension_count": 4}, "only part of each head"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
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
        config_from_gguf(read)


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
    scale = inverse_frequencies(config_from_gguf(read).rope, 8)[1]
    assert scale == pytest.approx(temperature * (1.0 if factor is None else factor))


def test_rope_scaling_in_the_metadata_is_followed(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file = convert(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    read = read_gguf(file)
    read.metadata.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    plain = inverse_frequencies(config_from_gguf(read_gguf(file)).rope, 8)[0]
    stretched = inverse_frequencies(config_from_gguf(read).rope, 8)[0]
    torch.testing.assert_close(stretched, plain / 2)
