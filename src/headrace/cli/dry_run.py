"""`headrace serve --dry-run`: what would be started, and how."""

import json
import sys
from typing import Any

from rich.console import Console

from headrace.config import EngineConfig
from headrace.deployment.description import describe
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.plan_table import print_plan
from headrace.deployment.resolve import resolve


def print_deployment(config: EngineConfig, *, as_json: bool) -> None:
    """Decide everything on this machine and print it; nothing is started. What cannot be known
    before other hosts have joined is said on standard error.

    Raises what resolve() and read_model() raise.
    """
    deployment = resolve(config, read_model(config), read_machine())
    decided = describe(deployment)
    if config.distributed_executor_backend == "ray":
        print(
            "this is for this host alone: which nodes Ray gives, what they have, and what the "
            "lines between them can do, is known once it starts; stages and layers are then placed "
            "anew",
            file=sys.stderr,
        )
    elif config.nnodes > 1:
        print(
            f"this is for this host alone: what the other {config.nnodes - 1} of --nnodes "
            f"{config.nnodes} have, and what the lines between them can do, is known once they "
            "have joined; stages and layers are then placed anew",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(decided, indent=2))
        return
    print_plan(deployment, sys.stdout)
    console = Console(soft_wrap=True, highlight=False)
    del decided["ranks"]
    for name, value in decided.items():
        # What is None is not wanted, or turns out when it starts.
        if value is not None:
            console.print(f"{name}: {_in_words(value)}", markup=False)


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        known = {name: inner for name, inner in value.items() if inner is not None}
        return ", ".join(f"{name} {_in_words(inner)}" for name, inner in known.items()) or "none"
    return str(value)
