"""Figures for people: rounded, in tables."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table


def rounded(value: Any) -> Any:
    """The same with numbers of four digits: more would be noise."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table with the keys as headings."""
    table = Table()
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_number(value) for value in row.values()))
    Console(width=None if Console().is_terminal else 160).print(table)


def print_answer(
    answer: dict[str, Any], as_json: bool, for_people: Callable[[dict[str, Any]], None]
) -> None:
    """A bench's answer, rounded: as one line of JSON, or as for_people prints it."""
    shown = rounded(answer)
    print(json.dumps(shown), flush=True) if as_json else for_people(shown)


def print_spread(answer: dict[str, Any], figures: Iterable[str]) -> None:
    """A row for each figure: its median, its least and its most."""
    print_rows(
        [
            {
                "figure": name,
                "median": answer[name],
                "least": answer[f"{name}_min"],
                "most": answer[f"{name}_max"],
            }
            for name in figures
        ]
    )


def print_where(answer: dict[str, Any]) -> None:
    """The machine and the versions of a bench's answer, in a line."""
    machine = answer["machine"]
    names = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
    features = " ".join(machine["features"])
    print(
        f"{machine['cpu']}, {machine['cores']} cores ({features}), "
        f"{machine['memory_gib']} GiB; {names}"
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows on standard error what runs, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
