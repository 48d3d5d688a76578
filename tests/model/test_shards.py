"""Programs cut for shards: everything is somewhere, nothing is anywhere twice."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.locate import locate_model
from headrace.errors import UsageError
from headrace.model.shards import heads_of, shard_program
from headrace.protocol.program import AllReduce, Experts, Gather, Linear, Program
from headrace.protocol.ranks import dealt
from headrace.protocol.stored_tensor import StoredTensor, cut_to
from stage_models import read_model, small_mistral, whole
from tiny_checkpoints import write_tiny_llama


@given(st.integers(1, 10_000), st.integers(1, 16), st.sampled_from([1, 32]))
def test_a_width_is_dealt_whole_in_order_and_evenly(size: int, count: int, unit: int) -> None:
    parts = [dealt(size, shard, count, unit) for shard in range(count)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(first % unit == 0 for first, _ in parts if first < size)
    units = [-(-(end - first) // unit) for first, end in parts]
    assert max(units) - min(units) <= 1


def test_gpt_oss_has_its_90_blocks_dealt_whole() -> None:
    parts = [dealt(2880, shard, 4, 32) for shard in range(4)]
    assert [(end - first) // 32 for first, end in parts] == [22, 23, 22, 23]


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_each_head_of_queries_is_one_shards_beside_the_keys_that_it_attends_to(
    kv_heads: int, group: int, count: int
) -> None:
    heads = kv_heads * group
    try:
        shards = [heads_of(heads, kv_heads, shard, count) for shard in range(count)]
    except UsageError:
        assert -(-count // kv_heads) > group
        return
    queries = [head for shard in shards for head in range(*shard.queries)]
    assert queries == list(range(heads))
    counted = [key for shard in shards if shard.counts for key in range(*shard.keys)]
    assert counted == list(range(kv_heads))
    for shard in shards:
        (first, end), keys = shard.queries, range(*shard.keys)
        assert first < end
        assert {head // group for head in range(first, end)} == set(keys)
        # Each key's head of a shard has as many queries, or attention would pair others.
        assert (end - first) % len(keys) == 0


def sizes(program: Program) -> int:
    """Numbers of all products' weights."""
    total = 0
    for operation in (*program.operations, *program.head):
        if isinstance(operation, Linear):
            total += operation.weight.outs * operation.weight.ins
        if isinstance(operation, Experts):
            each = operation.gate_up, operation.down
            total += operation.count * sum(matrix.outs * matrix.ins for matrix in each)
    return total


@pytest.mark.parametrize("architecture", ["Llama", "Mixtral", "GptOss"])
def test_shards_hold_a_models_weights_once(tmp_path: Path, architecture: str) -> None:
    model = read_model(locate_model(str(write_tiny_llama(tmp_path, architecture=architecture))))
    program = whole(model)
    parts = [shard_program(program, shard, 2) for shard in range(2)]
    routers = sum(
        operation.weight.outs * operation.weight.ins
        for operation in program.operations
        if isinstance(operation, Linear) and operation.label == "router"
    )
    assert sum(map(sizes, parts)) == sizes(program) + routers
    assert [p.caches[0].kv_heads for p in parts] == [1, 1]


def test_all_shards_add_up_at_the_same_places() -> None:
    program = small_mistral()
    first, second = (
        [
            (at, operation)
            for at, operation in enumerate((*part.operations, *part.head))
            if isinstance(operation, AllReduce | Gather)
        ]
        for part in (shard_program(program, shard, 2) for shard in range(2))
    )
    assert first == second
    # The embedding, two a layer, and the scores.
    assert len(first) == 1 + 2 * 3 + 1


def test_one_shard_runs_the_program_as_it_is() -> None:
    program = small_mistral()
    assert shard_program(program, 0, 1) is program


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="3 is too many shards for a layer of 2 heads"):
        shard_program(small_mistral(), 0, 3)


def test_a_cut_keeps_what_the_files_have() -> None:
    tensor = StoredTensor("w", (8, 6), paired_heads=4)
    part = cut_to(tensor, 0, [(2, 4), (4, 6), (7, 7)])
    assert (part.shape, part.paired_heads, part.stored) == ((4, 6), 2, tensor.stored)
    assert part.cut is not None
    assert part.cut.ranges == ((2, 6),)
    assert cut_to(tensor, 1, [(0, 3), (3, 6)]) is tensor
