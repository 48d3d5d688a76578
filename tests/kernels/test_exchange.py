"""Shards that add up in shared memory: the same bits for all, whatever the size, and no wait that
cannot end."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from headrace.kernels.exchange import Check, Exchange, memory_size
from headrace.kernels.path import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="native kernels were not built")
_T = TypeVar("_T")


def late(shard: int, waited_s: float) -> None:
    assert waited_s < 30, f"shard {shard} does not come"


@contextmanager
def joined(count: int, check: Check = late, spin_s: float = 0.0) -> Iterator[list[Exchange]]:
    memory = os.memfd_create("sums")
    os.ftruncate(memory, memory_size(count))
    exchanges = [Exchange() for _ in range(count)]
    for shard, exchange in enumerate(exchanges):
        exchange.join(memory, shard, count, spin_s=spin_s, check=check)
    os.close(memory)
    yield exchanges
    for exchange in exchanges:
        exchange.leave()


def at_once(work: Callable[[int], _T], count: int) -> list[_T]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


# Less than a vector, more than a round holds, and rounds that are not full.
@pytest.mark.parametrize("size", [1, 7, 1000, 65536, 700_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3])
def test_all_have_the_sum_in_the_shards_order(size: int, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    sums = [part.clone() for part in parts]
    with joined(count) as exchanges:
        at_once(lambda shard: exchanges[shard].all_reduce(sums[shard]), count)
    for own in sums:
        assert torch.equal(own, expected.to(dtype))


@pytest.mark.parametrize("spin_s", [0.0, 200e-6])
def test_rounds_that_follow_each_other_are_not_mixed_up(spin_s: float) -> None:
    rounds = 2000

    def run(shard: int) -> list[float]:
        found = []
        for number in range(rounds):
            x = torch.full((3 + number % 5,), float(number * (shard + 1)))
            exchanges[shard].all_reduce(x)
            found.append(float(x[-1]))
        return found

    with joined(2, spin_s=spin_s) as exchanges:
        first, second = at_once(run, 2)
    assert first == second == [3.0 * number for number in range(rounds)]


# Wider than a round holds, rows of which many fit, and shards of unlike widths.
@pytest.mark.parametrize(
    ("rows", "widths"), [(1, (3, 5)), (70, (64, 32, 96)), (3, (300_000, 200_001)), (9, (0, 4))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_shard_has_all_parts_side_by_side(
    rows: int, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [torch.randn(rows, width).to(dtype) for width in widths]
    outs = [torch.zeros(rows, sum(widths), dtype=dtype) for _ in widths]
    with joined(len(widths)) as exchanges:
        at_once(lambda n: exchanges[n].gather(parts[n], widths, outs[n]), len(widths))
    assert torch.equal(outs[0], torch.cat(parts, dim=1))
    assert not outs[1].any()


# Fewer than there are shards, not a multiple of them, and more than a round holds.
@pytest.mark.parametrize("size", [1, 7, 600_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3])
def test_parts_that_each_has_one_of_are_put_together_on_all(
    size: int, dtype: torch.dtype, count: int
) -> None:
    whole = torch.randn(size).to(dtype)
    outs = [torch.zeros(size, dtype=dtype) for _ in range(count)]
    with joined(count) as exchanges:
        parts = [exchange.part_of(whole).clone() for exchange in exchanges]
        assert [len(part) for part in parts] == [e.part_size(size) for e in exchanges]
        at_once(lambda n: exchanges[n].gather_parts(parts[n], outs[n]), count)
    assert sum(map(len, parts)) == size
    for out in outs:
        assert torch.equal(out, whole)


def test_what_is_raised_while_another_is_waited_for_ends_the_wait() -> None:
    asked: list[tuple[int, float]] = []

    def gone(shard: int, waited_s: float) -> None:
        asked.append((shard, waited_s))
        raise ConnectionError("it is gone")

    with joined(2, gone) as exchanges, pytest.raises(ConnectionError, match="it is gone"):
        exchanges[1].all_reduce(torch.ones(4))
    ((shard, waited_s),) = asked
    assert shard == 0
    assert waited_s > 0
