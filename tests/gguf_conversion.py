"""Model directories as GGUF files, as llama.cpp's converter writes them, by the gguf package."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tiny_checkpoints import add_byte_tokenizer

Array = np.ndarray[Any, Any]
# GGUF's word for what transformers calls otherwise.
_NAMES = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
}  # fmt: skip
# Those whose queries' and keys' rows the converter reorders.
_PERMUTED = ("llama", "granite", "smollm3")


def permuted(weights: Array, heads: int) -> Array:
    """Rows as the converter orders a Llama's q and k: the halves of each head interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def convert(
    model: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    experts: gguf.GGMLQuantizationType | None = None,
    quantized: Mapping[str, tuple[gguf.GGMLQuantizationType, Array]] | None = None,
    **metadata: Any,
) -> Path:
    """Write the directory's tensors as a GGUF file; metadata replaces or adds keys.

    kind: of matrices; experts: of those of experts, None for the same. quantized: of some matrices
    another kind, and their rows in it, uint8, in the directory's order.
    """
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
    if config.vocab_size == 300:
        add_byte_tokenizer(writer)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    architecture = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {key: t.float().numpy() for key, t in load_file(model / "model.safetensors").items()}
    for key, given in _stacked(tensors).items():
        array = given
        own = (quantized or {}).get(key)
        if own is not None:
            array = own[1]
        if name in _PERMUTED and "q_proj" in key:
            array = permuted(array, config.num_attention_heads)
        if name in _PERMUTED and "k_proj" in key:
            array = permuted(array, config.num_key_value_heads)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        # As the converter does it, of a gate's one row, too.
        array = array.squeeze()
        is_vector = array.ndim == 1 or key.endswith("bias")
        stored = gguf.GGMLQuantizationType.F32 if is_vector else kind
        if experts is not None and array.ndim == 3:
            stored = experts
        data = array
        if own is None:
            data = gguf.quants.quantize(array, stored)
        else:
            stored = own[0]
        target = names.get_name(key, (".weight", ".bias"))
        assert target is not None
        writer.add_tensor(target, data, raw_shape=data.shape, raw_dtype=stored)
    if name == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        for length in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(tensors: dict[str, Array]) -> dict[str, Array]:
    """Experts' tensors as one of all, and GPT-OSS's under names that say what they are."""
    found: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for key, array in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", key):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
        elif key.endswith("sinks"):
            found[f"{key}.weight"] = array
        elif ".experts." in key:
            name, ending = (
                key.removesuffix("_bias"),
                ".bias" if key.endswith("_bias") else ".weight",
            )
            rows = array if ending == ".bias" else array.swapaxes(1, 2)
            if name.endswith("gate_up_proj"):
                found[name.replace("gate_up", "gate") + ending] = rows[:, ::2]
                found[name.replace("gate_up", "up") + ending] = rows[:, 1::2]
            else:
                found[name + ending] = rows
        else:
            found[key] = array
    for key, own in experts.items():
        # The mapping has its names after another converter's.
        mapped = key.replace("block_sparse_moe.experts", "feed_forward.experts")
        mapped = mapped.replace("model.layers", "layers") if mapped != key else mapped
        found[mapped] = np.stack([own[number] for number in range(len(own))])
    return found


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
    if name == "granite":
        values |= {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    if hasattr(config, "num_experts_per_tok"):
        count = config.num_local_experts if hasattr(config, "num_local_experts") else None
        values["expert_count"] = count or config.num_experts
        values["expert_used_count"] = config.num_experts_per_tok
    if hasattr(config, "moe_intermediate_size"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if hasattr(config, "shared_expert_intermediate_size"):
        width = config.shared_expert_intermediate_size
        values["expert_shared_feed_forward_length"] = width
    if name == "gpt-oss":
        values |= {
            "attention.sliding_window": config.sliding_window,
            "expert_feed_forward_length": config.intermediate_size,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        stretch = config.max_position_embeddings / original
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        values["rope.scaling.attn_factor"] = factor
    if name == "phi3":
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return {f"{name}.{key}": value for key, value in values.items()}
