"""`headrace serve --dry-run`: what would be started, and how."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.config import EngineConfig
from headrace.deployment.description import describe
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.resolve import resolve


def print_deployment(config: EngineConfig, *, as_json: bool) -> None:
    """Decide everything on this machine and print it; nothing is started.

    Raises what resolve() and read_model() raise.
    """
    decided = describe(resolve(config, read_model(config), read_machine()))
    if as_json:
        print(json.dumps(decided, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    table = Table()
    for heading in ("rank", "stage", "shard", "layers", "cores", "threads"):
        table.add_column(heading, justify="right")
    for rank in decided.pop("ranks"):
        table.add_row(
            str(rank["rank"]),
            str(rank["stage"]),
            str(rank["shard"]),
            f"{rank['first_layer']} to {rank['end_layer'] - 1}",
            ", ".join(map(str, rank["cores"])) or "not pinned",
            str(rank["threads"]),
        )
    console.print(table)
    for name, value in decided.items():
        # What is None is not wanted, or turns out when it starts.
        if value is not None:
            console.print(f"{name}: {_in_words(value)}", markup=False)


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        known = {name: inner for name, inner in value.items() if inner is not None}
        return ", ".join(f"{name} {_in_words(inner)}" for name, inner in known.items()) or "none"
    return str(value)
