"""The transformer layers of a stage: in one native call, or kernel by kernel."""

from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.kernels import path
from headrace.kernels.attention import paged_attention, rotate_and_write
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.elementwise import add_rms_norm, rms_norm, silu_and_multiply
from headrace.kernels.kv_cache import KvCache
from headrace.kernels.linear import Linear
from headrace.protocol.model_config import ModelConfig


@dataclass(frozen=True)
class Layer:
    """One transformer layer; q, k and v are one product, gate and up another.

    window: positions that it attends to, None for all.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None = None


@dataclass
class LayerWork:
    """Layers, and what they keep from step to step: room for what they pass on, which all share."""

    config: ModelConfig
    layers: list[Layer]
    _room: list[torch.Tensor] = field(default_factory=list, init=False)
    # What the native code knows of the layers, and the caches that it was told.
    _stack: Any = field(default=None, init=False)
    _stack_caches: list[KvCache] = field(default_factory=list, init=False)

    def room(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Tensors [T, ...] for as many tokens as like [T, hidden] has, and of its dtype.

        normed, q k v, attended, gate and up, their product, and a layer's output.
        """
        tokens = len(like)
        if not self._room or len(self._room[0]) < tokens:
            layer = self.layers[0]
            products = layer.qkv, layer.attention_out, layer.gate_up, layer.down
            widths = [like.shape[1]]
            for before, after in zip(products[::2], products[1::2], strict=True):
                widths += [before.out_features, after.in_features]
            self._room = [like.new_empty(tokens, width) for width in (*widths, like.shape[1])]
        return [tensor[:tokens] for tensor in self._room]

    def native_stack(self, caches: list[KvCache], dtype: torch.dtype) -> Any:
        """The layers for the native code, or None if some kernel of theirs is not native."""
        if self._stack_caches is not caches:
            self._stack, self._stack_caches = self._new_stack(caches, dtype), caches
        return self._stack

    def _new_stack(self, caches: list[KvCache], dtype: torch.dtype) -> Any:
        config = self.config
        products = [(x.qkv, x.attention_out, x.gate_up, x.down) for x in self.layers]
        if not all(p.native for four in products for p in four) or config.head_dim % 16:
            return None
        windows = {layer.window for layer in self.layers}
        # One call has one window.
        if len(windows) > 1:
            return None
        assert path.native is not None
        stack = path.native.LayerStack(
            config.num_heads,
            windows.pop() or 0,
            config.head_dim**-0.5,
            config.rms_norm_epsilon,
            caches[0].block_size,
            caches[0].block_rows,
            config.num_kv_heads,
            config.head_dim,
            dtype == torch.bfloat16,
        )
        for layer, cache in zip(self.layers, caches, strict=True):
            stack.add(
                layer.attention_norm.data_ptr(),
                layer.qkv.addresses(),
                layer.attention_out.addresses(),
                layer.mlp_norm.data_ptr(),
                layer.gate_up.addresses(),
                layer.down.addresses(),
                cache.keys.data_ptr(),
                cache.values.data_ptr(),
            )
        return stack


def run_layers(
    work: LayerWork,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    batch: AttentionBatch,
    caches: list[KvCache],
) -> torch.Tensor:
    """Take activations x [T, hidden] through all layers, in place; returns x.

    cos, sin: float32 [positions, head_dim / 2]. caches: one per layer, the same list every time.
    """
    room = work.room(x)
    stack = work.native_stack(caches, x.dtype)
    if stack is None:
        return _run_by_kernel(work, x, room, cos, sin, batch, caches)
    assert path.native is not None
    assert x.is_contiguous()
    path.native.run_layers(
        stack,
        x.data_ptr(),
        *[tensor.data_ptr() for tensor in room],
        cos.data_ptr(),
        sin.data_ptr(),
        batch.positions.data_ptr(),
        batch.cache_index.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.shape[1],
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        len(x),
        len(batch.query_lens),
    )
    return x


def _run_by_kernel(
    work: LayerWork,
    x: torch.Tensor,
    room: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    batch: AttentionBatch,
    caches: list[KvCache],
) -> torch.Tensor:
    config, epsilon = work.config, work.config.rms_norm_epsilon
    normed, qkv, attended, gate_up, inner, delta = room
    by_head = attended.view(len(x), config.num_heads, config.head_dim)
    added: torch.Tensor | None = None
    for layer, cache in zip(work.layers, caches, strict=True):
        if added is None:
            rms_norm(x, layer.attention_norm, epsilon, normed)
        else:
            add_rms_norm(x, added, layer.attention_norm, epsilon, normed)
        heads = layer.qkv(normed, qkv).view(len(x), -1, config.head_dim)
        rotate_and_write(heads, cos, sin, cache, batch)
        paged_attention(heads, cache, batch, config.head_dim**-0.5, layer.window, None, by_head)
        added = layer.attention_out(attended, delta)
        add_rms_norm(x, added, layer.mlp_norm, epsilon, normed)
        added = layer.down(silu_and_multiply(layer.gate_up(normed, gate_up), inner), delta)
    assert added is not None
    return x.add_(added)
