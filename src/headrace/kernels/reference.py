"""The plain torch reference of every kernel: the meaning of the native ones, and their stand-in."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.kv_cache import KvCache, read, write


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounds_once: bool = False
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv 1910.07467).

    rounds_once: the weight multiplies in float32, too.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if rounds_once:
        return (weight.float() * wide).to(x.dtype)
    return weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired as Hugging Face stores them.

    x: [T, heads, head_dim]; cos, sin: float32 [T, head_dim / 2]. Computed in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def activate_and_multiply(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of the first half of the last dimension times the second half.

    activation: silu, gelu_tanh (arXiv 1606.08415, its approximation by tanh), or clamped_swiglu,
    GPT-OSS's, whose second half is clamped, and 1 added to it.
    """
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return F.gelu(gate, approximate="tanh") * up


def route(scores: torch.Tensor, chosen: int, normalized: bool) -> torch.Tensor:
    """See kernels.experts.route."""
    wide = scores.float()
    # topk() does not say which of equal ones it takes.
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    taken = torch.zeros_like(wide).scatter_(1, order, 1.0)
    powers = (wide - wide.amax(-1, keepdim=True)).exp()
    total = (powers * taken if normalized else powers).sum(-1, keepdim=True)
    return (powers * taken / total).to(scores.dtype)


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Callable[[int, torch.Tensor], torch.Tensor],
    down: Callable[[int, torch.Tensor], torch.Tensor],
    activation: str,
) -> torch.Tensor:
    """See kernels.experts.experts. gate_up, down: the products of an expert, given its number."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    taken = weights != 0
    for expert in taken.any(0).nonzero().flatten().tolist():
        rows = taken[:, expert].nonzero().flatten()
        inner = activate_and_multiply(gate_up(expert, x[rows]), activation)
        own = down(expert, inner).float() * weights[rows, expert, None].float()
        total.index_add_(0, rows, own)
    return total.to(x.dtype)


def embed(ids: torch.Tensor, table: torch.Tensor, scale: float, first: int = 0) -> torch.Tensor:
    """Rows of the table, times scale rounded to the table's type, as transformers does.

    first: the id of the table's first row; zeros for ids that it does not have.
    """
    held = ids - first
    outside = (held < 0) | (held >= len(table))
    rows = F.embedding(held.masked_fill(outside, 0), table).masked_fill(outside[:, None], 0)
    return rows if scale == 1 else rows * torch.tensor(scale, dtype=table.dtype)


def rounded_to_int8(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [T, ins] in float64 as quantized products take it: in blocks of so many inputs, rounded to
    multiples of the block's largest size / 127; where that is not finite none of them is."""
    blocks = x.float().unflatten(-1, (-1, block))
    top = blocks.abs().amax(-1, keepdim=True)
    # Smaller ones count as zeros.
    inverse = torch.where(top < 2.0**-100, 0.0, torch.full_like(top, 127.0) / top)
    whole = (blocks * inverse).round()
    rounded: torch.Tensor = (whole.double() * (top / 127).double()).flatten(-2)
    return rounded


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: int = 32
) -> torch.Tensor:
    """See kernels.quantized_linear.QuantizedLinear; weight [outs, ins]: the numbers that the packed
    ones stand for. In float64, where the native kernels add up blocks in float32."""
    y = rounded_to_int8(x, block) @ weight.double().T
    return y if bias is None else y + bias.double()


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in float32: between -cap and cap (arXiv 2408.00118, section 2)."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cache: KvCache,
    batch: AttentionBatch,
) -> None:
    """Rotate queries in place, and put rotated keys and values into the cache.

    qkv: [T, heads + 2 kv_heads, head_dim]; cos, sin: float32 [positions, head_dim / 2], or None.
    """
    heads = qkv.shape[1] - 2 * cache.kv_heads
    query, key, value = torch.split(qkv, [heads, cache.kv_heads, cache.kv_heads], dim=1)
    if cos is not None and sin is not None:
        cos, sin = cos[batch.positions], sin[batch.positions]
        query.copy_(rotate(query, cos, sin))
        key = rotate(key, cos, sin)
    write(cache, batch.cache_index, key, value)


def paged_attention(
    query: torch.Tensor,
    cache: KvCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """See kernels.attention.paged_attention."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = batch.query_starts.tolist()
    # Rows that are worked on at once are padded to the longest: by powers of two, no row is padded
    # to more than twice its length.
    singles: dict[int, list[int]] = {}
    for r, length in enumerate(batch.query_lens):
        if length == 1:
            singles.setdefault(batch.context_list[r].bit_length(), []).append(r)
    for rows in singles.values():
        tokens = [starts[r] for r in rows]
        longest = max(batch.context_list[r] for r in rows)
        tables = batch.block_tables[rows, : -(-longest // cache.block_size)]
        keys, values = read(cache, tables)
        lengths = batch.context_lens[rows, None]
        places = torch.arange(keys.shape[1], device=query.device)
        visible = places < lengths
        if sliding_window is not None:
            visible &= places >= lengths - sliding_window
        # Places behind a row's end belong to others, and a masked infinity would make a NaN.
        hidden = (places >= lengths)[:, :, None, None]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        output[tokens] = _attend(
            query[tokens].unsqueeze(1), keys, values, visible[:, None], scale, sinks, soft_cap
        ).squeeze(1)
    for r, length in enumerate(batch.query_lens):
        if length > 1:
            context = batch.context_list[r]
            table = batch.block_tables[r, : -(-context // cache.block_size)]
            keys, values = (x[None, :context] for x in read(cache, table))
            places = torch.arange(context, device=query.device)
            own = places[context - length :, None]
            visible = places <= own
            if sliding_window is not None:
                visible &= places > own - sliding_window
            chunk = slice(starts[r], starts[r + 1])
            attended = _attend(
                query[None, chunk], keys, values, visible[None], scale, sinks, soft_cap
            )
            output[chunk] = attended[0]
    return output


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """query [R, t, heads, D], keys and values [R, n, kv_heads, D], visible [R, t, n]."""
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    if sinks is None and soft_cap is None:
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2)
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = (query.float() * scale) @ keys.transpose(2, 3)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    positions = scores.shape[-1]
    if sinks is not None:
        # A sink takes part in the softmax as one more position, which has no value.
        extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :positions]
    return (weights @ values).to(query.dtype).transpose(1, 2)
