"""`headrace bench kernels`: every native kernel against torch, with a model's shapes."""

from typing import Annotated, Any, cast

import typer

from headrace.checks import check_type
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, print_where, progress
from headrace.errors import UsageError

# What fits a line: the reference's spread is in the JSON.
_COLUMNS = (
    "kernel", "rows", "us", "us_min", "us_max", "gflop_per_s", "gb_per_s", "reference",
    "reference_us", "ratio",
)  # fmt: skip


@with_flags
def kernels(
    rows: Annotated[str, typer.Option(help="Numbers of rows (tokens of a step).")] = "1,8,32,256",
    rounds: Annotated[int, typer.Option(help="How often each kernel is measured.")] = 5,
    dtype: options.KernelDtype = options.MEASURED["dtype"],
    *,
    engine: Annotated[dict[str, Any], engine_flags("cpu_threads", model=options.MEASURED["model"])],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """What every native kernel takes with the model's shapes, and what torch takes."""
    # Only here: it brings in all of torch.
    from headrace.bench.kernels import measure_kernels
    from headrace.bench.roofline import Dtype

    counts = _parse_rows(rows)
    options.check_range("--rounds", rounds, 1, 1000)
    check_type("--dtype", dtype, Dtype)
    threads = engine["cpu_threads"]
    with progress() as say:
        measured = measure_kernels(engine["model"], cast(Any, dtype), counts, threads, rounds, say)
    print_answer(measured, as_json, _print_figures)
    return 0


def _parse_rows(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--rows must be numbers such as 1,8,32, not {text!r}") from None
    for count in counts:
        options.check_range("--rows", count, 1, 4096)
    return counts


def _print_figures(answer: dict[str, Any]) -> None:
    print(
        f"{answer['model']}, {answer['dtype']}, kernels {answer['kernels']}, threads: "
        f"{answer['threads']}; decode rows at {answer['context']} positions, a prompt's chunk of "
        f"{answer['chunk']}; medians of {answer['rounds']} rounds, the least and the most"
    )
    print_rows([{key: _shown(case[key]) for key in _COLUMNS} for case in answer["cases"]])
    print_where(answer)


def _shown(value: object) -> object:
    return "" if value is None else value
