"""Runs many seeds of the simulation: `python tests/simulate.py SEEDS [FIRST]`.

A seed that fails is told with the last events, and replays with `simulate.py 1 SEED`. Then comes
the table of planted faults, and last: seeds, steps, seconds, failures. Exit code 1 on failures.
"""

import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from mutants import table
from simulator import simulate

_AT_ONCE = 25


@dataclass(frozen=True)
class Outcome:
    """Of some seeds: how many steps they took, and an account of each that failed."""

    seeds: int
    steps: int
    failures: list[str]


def run(seeds: range) -> Outcome:
    torch.set_num_threads(1)
    steps, failures = 0, []
    for seed in seeds:
        try:
            steps += len(simulate(seed).plans)
        except Exception as error:
            failures.append("".join(traceback.format_exception(error)))
    return Outcome(len(seeds), steps, failures)


def outcomes(first: int, count: int) -> Iterator[Outcome]:
    parts = [
        range(start, min(start + _AT_ONCE, first + count))
        for start in range(first, first + count, _AT_ONCE)
    ]
    # Fresh processes: torch's threads do not survive a fork.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        yield from workers.map(run, parts)


def main() -> int:
    count = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    started = time.monotonic()
    seeds = steps = failures = 0
    told = 0
    for outcome in outcomes(first, count):
        seeds += outcome.seeds
        steps += outcome.steps
        failures += len(outcome.failures)
        for account in outcome.failures:
            print(account, flush=True)
        if seeds - told >= 1000:
            told = seeds
            print(f"{seeds} seeds, {time.monotonic() - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    if count > 1:
        for line in table():
            print(line, flush=True)
    print(f"{seeds} seeds, {steps} steps, {seconds:.1f} s, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
