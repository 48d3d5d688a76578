"""`headrace bench links`: what a message between two stages takes, by each backend."""

from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.printing import print_answer, print_rows, print_where, progress

# What fits a line: the spread of the rates is in the JSON.
_COLUMNS = ("us", "us_min", "us_max", "gb_per_s", "of_copy", "cores")


def links(
    rounds: Annotated[int, typer.Option(help="How often each case is measured.")] = 5,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """What a message from one process to another takes, by each backend that carries tensors."""
    # Only here: it brings in all of torch.
    from headrace.bench.links import measure_links

    options.check_range("--rounds", rounds, 1, 1000)
    with progress() as say:
        measured = measure_links(rounds, say)
    print_answer(measured, as_json, _print_figures)
    return 0


def _print_figures(answer: dict[str, Any]) -> None:
    print(
        "us: a message one way, half a round trip between two processes; GB/s: many messages one "
        "way, and its part of what a core copies in memory; cores: busy meanwhile at both ends "
        f"together. Medians of {answer['rounds']} rounds"
    )
    print_rows(
        [
            {"backend": case["backend"], "message": _size(case["size"])}
            | {name: case[name] for name in _COLUMNS}
            for case in answer["cases"]
        ]
    )
    copies = ", ".join(f"{_size(c['size'])} {c['gb_per_s']:.4g}" for c in answer["copy"])
    print(f"copying in memory, one core, GB/s: {copies}; a line of 10 Gb/s carries 1.25")
    print_where(answer)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
