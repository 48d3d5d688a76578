"""`headrace bench all-reduce`: what it takes the shards of a stage to add up."""

from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, print_where, progress


@with_flags
def all_reduce(
    rounds: Annotated[int, typer.Option(help="How often each size is measured.")] = 7,
    *,
    engine: Annotated[dict[str, Any], engine_flags(tensor_parallel_size=2)],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """What it takes the shards of a stage to add up, by the bytes that each has."""
    # Only here: it brings in all of torch.
    from headrace.bench.all_reduce import measure_all_reduce

    shards = engine["tensor_parallel_size"]
    options.check_range("--tensor-parallel-size", shards, 2, 64)
    options.check_range("--rounds", rounds, 1, 1000)
    with progress() as say:
        measured = measure_all_reduce(shards, rounds, say)
    print_answer(measured, as_json, _print_figures)
    return 0


def _print_figures(answer: dict[str, Any]) -> None:
    print(
        f"{answer['shards']} shards with a core each add up bfloat16 in shared memory; medians of "
        f"{answer['rounds']} rounds"
    )
    print_rows([{"bytes": each.pop("size"), **each} for each in answer["sums"]])
    print_where(answer)
