"""Model directories as GGUF files, as llama.cpp's converter writes them, by the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

Array = np.ndarray[Any, Any]
# GGUF's word for what transformers calls otherwise.
_NAMES = {"mistral": "llama", "gemma3_text": "gemma3"}


def permuted(weights: Array, heads: int) -> Array:
    """Rows as the converter orders a Llama's q and k: the halves of each head interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def convert(
    model: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **metadata: Any,
) -> Path:
    """Write the directory's tensors as a GGUF file; metadata replaces or adds keys."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    name = _NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    for key, value in (_metadata(name, config) | metadata).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    writer.add_token_merges([])
    architecture = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, tensor in load_file(model / "model.safetensors").items():
        array = tensor.float().numpy()
        if name == "llama" and "q_proj" in key:
            array = permuted(array, config.num_attention_heads)
        if name == "llama" and "k_proj" in key:
            array = permuted(array, config.num_key_value_heads)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        stored = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else kind
        data = gguf.quants.quantize(array, stored)
        target = names.get_name(key, (".weight", ".bias"))
        assert target is not None
        writer.add_tensor(target, data, raw_shape=data.shape, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(name: str, config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if name in ("llama", "phi3"):
        width = head_dim or config.hidden_size // config.num_attention_heads
        values["rope.dimension_count"] = width
    if head_dim:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if name.startswith(("gemma", "phi")):
        values["attention.sliding_window"] = config.sliding_window or 0
    if name == "gemma3":
        values["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if name == "gemma2":
        values["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
    if name.startswith("gemma") and config.final_logit_softcapping:
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if name == "phi3":
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return {f"{name}.{key}": value for key, value in values.items()}
