"""The Llama family: Llama 2 and 3, Mistral, SmolLM2."""

from collections.abc import Callable

from headrace.checkpoint.llama_tensors import gguf_name
from headrace.protocol.model_config import ModelConfig, StageShare
from headrace.protocol.program import (
    Add,
    Attention,
    CacheShape,
    Embed,
    GatedActivation,
    Linear,
    Matrix,
    Norm,
    Operation,
    Program,
    Rotate,
    StoredTensor,
    Vector,
)


def llama_program(config: ModelConfig, share: StageShare, gguf: bool) -> Program:
    """A stage's share. gguf: the names and the order of rows are those of a GGUF file."""
    name_of: Callable[[str], str] = gguf_name if gguf else str
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))

    def norm(name: str, out: str, delta: str | None) -> Norm:
        weight = Vector(StoredTensor(name_of(f"{name}.weight"), (hidden,)))
        return Norm("x", weight, config.rms_norm_epsilon, out, delta)

    def product(names: list[str], outs: list[int], ins: int, biased: bool) -> Matrix:
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if gguf else {}
        parts, biases = [], []
        for name, out in zip(names, outs, strict=True):
            paired = heads.get(name.rsplit(".", 1)[-1], 0)
            parts.append(StoredTensor(name_of(f"{name}.weight"), (out, ins), paired))
            if biased:
                bias = name_of(f"{name}.bias")
                biases.append(StoredTensor(bias, (out,), paired, optional=True))
        return Matrix(tuple(parts), tuple(biases))

    def layer(number: int, cache: int) -> list[Operation]:
        at = f"model.layers.{number}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        biased = config.attention_bias, config.mlp_bias
        of_heads = [f"{attention}.{part}_proj" for part in "qkv"]
        qkv = product(of_heads, [queries, keys, keys], hidden, biased[0])
        output = product([f"{attention}.o_proj"], [hidden], queries, biased[0])
        gates = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        gate_up = product(gates, [inner, inner], hidden, biased[1])
        down = product([f"{mlp}.down_proj"], [hidden], inner, biased[1])
        factors = None
        if gguf:
            name = "rope_freqs.weight"
            factors = StoredTensor(name, (config.head_dim // 2,), optional=True)
        heads, scale = config.num_heads, config.head_dim**-0.5
        return [
            norm(f"{at}.input_layernorm", "normed", "delta" if cache else None),
            Linear("normed", qkv, "qkv", "qkv"),
            Rotate("qkv", heads, config.rope, cache, factors),
            Attention("qkv", heads, cache, scale, "attended", config.window_of(number)),
            Linear("attended", output, "delta", "attention_out"),
            norm(f"{at}.post_attention_layernorm", "normed", "delta"),
            Linear("normed", gate_up, "gate_up", "gate_up"),
            GatedActivation("gate_up", "inner", "silu"),
            Linear("inner", down, "delta", "down"),
        ]

    operations: list[Operation] = []
    table = "model.embed_tokens"
    if share.embeds:
        operations.append(Embed(StoredTensor(name_of(f"{table}.weight"), (vocab, hidden))))
    for cache in range(share.num_layers):
        operations += layer(share.first_layer + cache, cache)
    operations.append(Add("x", "delta"))
    head: list[Operation] = []
    if share.samples:
        scores = product([table if config.tied_head else "lm_head"], [vocab], hidden, biased=False)
        head = [
            norm("model.norm", "normed", None),
            Linear("normed", scores, "logits", "head"),
        ]
    return Program(
        hidden_size=hidden,
        vocab_size=vocab,
        operations=tuple(operations),
        head=tuple(head),
        caches=(CacheShape(config.num_kv_heads, config.head_dim),) * share.num_layers,
        widths={
            "normed": hidden,
            "qkv": queries + 2 * keys,
            "attended": queries,
            "delta": hidden,
            "gate_up": 2 * inner,
            "inner": inner,
        },
    )
