"""The Llama family: Llama 2 and 3, Mistral, SmolLM2."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.elementwise import embed, rms_norm
from headrace.kernels.kv_cache import KvCache
from headrace.kernels.linear import Linear
from headrace.model.layers import Layer, LayerWork, run_layers
from headrace.model.rope import rotation_tables
from headrace.model.weights import TensorSource
from headrace.protocol.model_config import ModelConfig, StageShare


@dataclass
class LlamaStage:
    """The part of the model that one stage holds.

    embedding [vocab, hidden] is there on the first stage only, final_norm and head on the last.
    cos, sin: float32 [max_model_len, head_dim / 2].
    """

    config: ModelConfig
    dtype: torch.dtype
    layers: list[Layer]
    cos: torch.Tensor
    sin: torch.Tensor
    embedding: torch.Tensor | None
    final_norm: torch.Tensor | None
    head: Linear | None
    _work: LayerWork = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._work = LayerWork(self.config, self.layers)

    @property
    def num_layers(self) -> int:
        """Layers that this stage holds."""
        return len(self.layers)

    @property
    def samples(self) -> bool:
        """Whether this part ends in logits."""
        return self.head is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held."""
        tensors = [self.embedding, self.final_norm]
        products = [self.head]
        for layer in self.layers:
            tensors += [layer.attention_norm, layer.mlp_norm]
            products += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
        return sum(t.nbytes for t in tensors if t is not None) + sum(
            p.nbytes for p in products if p is not None
        )

    def forward(
        self, inputs: torch.Tensor, batch: AttentionBatch, caches: list[KvCache]
    ) -> torch.Tensor:
        """Run the stage's layers on T tokens.

        inputs: ids int64 [T] on the first stage, else activations [T, hidden], overwritten. caches:
        one per layer. Returns activations [T, hidden].
        """
        x = inputs
        if self.embedding is not None:
            # Not one of the buffers that stay: it becomes the activations, and may travel long.
            x = self.embedding.new_empty(len(inputs), self.config.hidden_size)
            embed(inputs, self.embedding, x)
        return run_layers(self._work, x, self.cos, self.sin, batch, caches)

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, [rows, vocab], of the given rows [rows, hidden]."""
        assert self.final_norm is not None
        assert self.head is not None
        normed = torch.empty_like(activations)
        rms_norm(activations, self.final_norm, self.config.rms_norm_epsilon, normed)
        return self.head(normed, normed.new_empty(len(normed), self.head.out_features))


def load_llama(
    config: ModelConfig,
    share: StageShare,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[float], None],
) -> LlamaStage:
    """Load one stage's weights and nothing else; calls progress with the fraction done.

    Raises ModelError for tensors that are missing or of the wrong shape.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    total = share.end_layer - share.first_layer + 2

    def vector(name: str) -> torch.Tensor:
        return source.load(name, (hidden,)).to(device, dtype)

    def product(names: list[str], outs: list[int], width: int, biased: bool) -> Linear:
        """One product from the given tensors, stacked along the outputs.

        biased: adds the biases that are there, zeros for the others, as transformers does.
        """
        shapes = list(zip(names, outs, strict=True))
        weight = torch.cat([source.load(f"{n}.weight", (out, width)) for n, out in shapes])
        bias = None
        if biased and any(source.has(f"{n}.bias") for n in names):
            bias = torch.cat(
                [
                    source.load(f"{n}.bias", (out,)) if source.has(f"{n}.bias")
                    else torch.zeros(out, dtype=weight.dtype)
                    for n, out in shapes
                ]
            ).to(device)  # fmt: skip
        return Linear(weight.to(device), bias, dtype)

    def layer(number: int) -> Layer:
        at = f"model.layers.{number}"
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        inner = config.intermediate_size
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            attention_norm=vector(f"{at}.input_layernorm.weight"),
            qkv=product(
                [f"{attention}.{p}_proj" for p in "qkv"],
                [queries, keys, keys],
                hidden,
                config.attention_bias,
            ),
            attention_out=product(
                [f"{attention}.o_proj"], [hidden], queries, config.attention_bias
            ),
            mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
            gate_up=product(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, config.mlp_bias
            ),
            down=product([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias),
            window=config.window_of(number),
        )

    embedding = None
    if share.embeds:
        embedding = source.load("model.embed_tokens.weight", (vocab, hidden)).to(device, dtype)
    progress(1 / total)
    layers = []
    for number in range(share.first_layer, share.end_layer):
        layers.append(layer(number))
        progress((len(layers) + 1) / total)
    final_norm = head = None
    if share.samples:
        final_norm = vector("model.norm.weight")
        name = "model.embed_tokens" if config.tied_head else "lm_head"
        head = product([name], [vocab], hidden, biased=False)
    factors = None
    if source.has("rope_freqs.weight"):
        factors = source.load("rope_freqs.weight", (config.head_dim // 2,)).float()
    cos, sin = rotation_tables(config.rope, config.head_dim, max_model_len, factors)
    progress(1.0)
    return LlamaStage(
        config=config,
        dtype=dtype,
        layers=layers,
        cos=cos.to(device),
        sin=sin.to(device),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
    )
