"""Sequences whose keys and values lie in a paged cache between what must not matter."""

from dataclasses import dataclass

import torch

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.kv_cache import KvCache, new_cache, write

# A part of a step: a sequence, its first position, and how many positions from there.
Part = tuple[int, int, int]


@dataclass(frozen=True)
class Sequences:
    """qkv: of each sequence, [positions, heads + 2 kv_heads, head_dim]; tables: their blocks."""

    qkv: list[torch.Tensor]
    heads: int
    block_size: int
    tables: torch.Tensor

    @property
    def kv_heads(self) -> int:
        return (self.qkv[0].shape[1] - self.heads) // 2

    @property
    def head_dim(self) -> int:
        return self.qkv[0].shape[2]

    def cache(self, dtype: torch.dtype | None = None) -> KvCache:
        """A cache in which every place is infinite or no number: nobody has written it."""
        blocks = int(self.tables.max()) + 1
        cache = new_cache(
            blocks, self.block_size, self.kv_heads, self.head_dim,
            dtype or self.qkv[0].dtype, torch.device("cpu"),
        )  # fmt: skip
        for memory in (cache.keys, cache.values):
            memory.fill_(torch.nan)
            memory.view(-1)[::3] = torch.inf
            memory.view(-1)[1::3] = -torch.inf
        return cache

    def batch(self, parts: list[Part]) -> AttentionBatch:
        """A step of these parts."""
        positions = [torch.arange(start, start + count) for _, start, count in parts]
        rows = [row for row, _, _ in parts]
        contexts = [start + count for _, start, count in parts]
        counts = [count for *_, count in parts]
        places = [
            self.tables[row, at // self.block_size] * self.block_size + at % self.block_size
            for row, at in zip(rows, positions, strict=True)
        ]
        return AttentionBatch(
            positions=torch.cat(positions),
            cache_index=torch.cat(places),
            block_tables=self.tables[rows, : -(-max(contexts) // self.block_size)].contiguous(),
            query_starts=torch.tensor([0, *counts]).cumsum(0),
            context_lens=torch.tensor(contexts),
            query_lens=counts,
            context_list=contexts,
        )

    def tokens(self, parts: list[Part]) -> torch.Tensor:
        """Queries, keys and values of a step of these parts, a copy."""
        return torch.cat([self.qkv[row][start : start + count] for row, start, count in parts])

    def write(self, cache: KvCache, parts: list[Part]) -> None:
        """Put these parts' keys and values into the cache, as they are."""
        _, keys, values = self.tokens(parts).split([self.heads, *[self.kv_heads] * 2], dim=1)
        dtype = cache.keys.dtype
        write(cache, self.batch(parts).cache_index, keys.to(dtype), values.to(dtype))


def sequences(
    lengths: list[int],
    *,
    block_size: int,
    dtype: torch.dtype,
    kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 16,
    seed: int = 0,
) -> Sequences:
    """Random sequences of these lengths, their blocks mixed with one another and with nobody's."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    shape = heads + 2 * kv_heads, head_dim
    qkv = [torch.randn(n, *shape, generator=generator).to(dtype) for n in lengths]
    needed = [-(-n // block_size) for n in lengths]
    shuffled = torch.randperm(sum(needed) + 3, generator=generator)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int64)
    for row, blocks in enumerate(shuffled[: sum(needed)].split(needed)):
        tables[row, : len(blocks)] = blocks
    return Sequences(qkv, heads, block_size, tables)
