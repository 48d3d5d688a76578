"""The tensors that a Llama-family model has: names, shapes, and whether a file holds them all."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from headrace.errors import ModelError
from headrace.protocol.model_config import ModelConfig

# Names inside a layer: Hugging Face to GGUF
# (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py).
_GGUF_LAYER_NAMES = {
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
_GGUF_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight becomes blk.3.ffn_up.weight."""
    if name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"


def needed_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face's names and shapes of a model's weights, layer by layer, biases apart."""
    hidden, vocab, inner = config.hidden_size, config.vocab_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_head:
        yield "lm_head.weight", (vocab, hidden)
    for number in range(config.num_layers):
        at = f"model.layers.{number}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)


def check_tensors(
    path: Path,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    name_in_file: Callable[[str], str] = str,
) -> list[str]:
    """Hold a configuration against the tensors that are really there, before anything believes it.

    shapes: of all tensors, by their names in the file; name_in_file: from Hugging Face's. Returns
    the names of tensors that the model does not use. Raises ModelError for the first tensor that
    is missing or of another shape, so the work is bounded by what the file holds.
    """
    used = set()
    for name, shape in needed_tensors(config):
        stored = name_in_file(name)
        if stored not in shapes:
            raise ModelError(f"model {path}: tensor {stored} is missing")
        check_shape(path, stored, shapes[stored], shape)
        used.add(stored)
        bias = stored.removesuffix(".weight") + ".bias"
        biased = config.attention_bias if ".self_attn." in name else config.mlp_bias
        if len(shape) == 2 and ".layers." in name and biased and bias in shapes:
            check_shape(path, bias, shapes[bias], shape[:1])
            used.add(bias)
    return [name for name in shapes if name not in used]


def check_shape(path: Path, name: str, found: tuple[int, ...], configured: tuple[int, ...]) -> None:
    """Raises ModelError if a tensor has another shape than the configuration asks for."""
    if tuple(found) != configured:
        raise ModelError(
            f"model {path}: tensor {name} has shape {list(found)}, "
            f"the configuration asks for {list(configured)}"
        )
