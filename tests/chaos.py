"""Faults at random moments under load: `python tests/chaos.py --minutes 10 --seed 1`.

Streams run all the time, and some are given up by their client; stages are killed, stopped, made to
raise in a layer or while they load, have a link shut down under them, or are frozen together with
their engine. First, middle and last stage, while they compute, load and recover; before, engines
are started while stages are killed or stopped, and the last of them is used. Every answer is
compared with that of an engine that nobody disturbed: tokens, text, and why it ended.

Prints faults by kind and stage, requests, lost, wrong, and the longest pause of a stream; exit code
1 if any request was lost or wrong, if slots or blocks are in use in the end, or if processes or
files are left after it. --pause: one kill of the last stage under --streams streams, and how long
that paused them.
"""

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path
from random import Random

import psutil

from chaos_load import Account, Case, ask_on, make_cases, stream
from disturbance import Disturbance, Harm, send, start_disturbed
from faults import Faults, planted
from headrace import AsyncLLM
from leftovers import files_left, processes_left
from tiny_checkpoints import write_tiny_gguf
from unattended import end_in_time

# After the last fault, for the streams that still run.
_END_S = 120.0
# Beside the faults: starts, and all that must end.
_SPARE_S = 600.0


async def chaos(
    engine: AsyncLLM,
    cases: list[Case],
    options: argparse.Namespace,
    faults: Faults,
    harm: Harm,
    random: Random,
) -> Account:
    """Run the load, and the faults beside it."""
    account, ended = Account(), asyncio.Event()
    disturbance = Disturbance(engine, faults, random, harm)
    clients = [
        asyncio.create_task(
            ask_on(engine, cases, account, Random(random.random()), harm.now, ended)
        )
        for _ in range(options.streams)
    ]
    await disturbance.run(60 * options.minutes)
    ended.set()
    _, late = await asyncio.wait(clients, timeout=_END_S)
    for client in late:
        client.cancel()
    for result in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return account


async def pause(
    engine: AsyncLLM, cases: list[Case], options: argparse.Namespace, harm: Harm
) -> Account:
    """Kill the last stage while all streams are in their middle."""
    account = Account()
    single = [case for case in cases if case.params.n == 1 and not case.params.stop]
    streams = [
        asyncio.create_task(stream(engine, single[n % len(single)], account, harm.now))
        for n in range(options.streams)
    ]
    while engine.snapshot.num_running < options.streams:
        await asyncio.sleep(0.05)
    steps = engine.snapshot.steps
    while engine.snapshot.steps < steps + options.tokens // 2:
        await asyncio.sleep(0.01)
    send(engine._running.processes._processes[-1].process.pid, signal.SIGKILL)
    harm.note("kill", "last")
    await asyncio.gather(*streams)
    return account


async def in_use(engine: AsyncLLM) -> list[str]:
    """What is in use though nobody asks, once there was time for it to come back."""
    for _ in range(100):
        seen = engine.snapshot
        used = {"slots": seen.slots_used, "blocks": seen.blocks_used, "steps": seen.steps_in_flight}
        if not any(used.values()):
            break
        await asyncio.sleep(0.1)
    return [f"{count} {name} are in use while nobody asks" for name, count in used.items() if count]


async def run(options: argparse.Namespace, model: str, faults: Faults) -> list[str]:
    """Everything, and the report; gives what was not as it must be."""
    cases, harm, random = make_cases(model, options.tokens), Harm(), Random(options.seed)
    left: list[str] = []

    def start() -> AsyncLLM:
        return AsyncLLM(
            model,
            dtype="float32",
            max_num_seqs=64,
            pipeline_parallel_size=options.stages,
            max_restarts=1_000_000,
            stall_timeout=options.stall_timeout,
        )

    if options.pause:
        with start() as engine:
            account = await pause(engine, cases, options, harm)
    else:
        for _ in range(options.starts - 1):
            (await start_disturbed(start, options.stages, random, harm)).close()
        with await start_disturbed(start, options.stages, random, harm) as engine:
            account = await chaos(engine, cases, options, faults, harm, random)
            left = await in_use(engine)
    recovery = engine.recovery
    print(f"seed {options.seed}; restarts: {recovery.restarts}, in {recovery.seconds:.1f} s")
    print(f"{harm}\nfaults: {harm.faults.total()}, {account}")
    return account.lost + account.wrong + left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="default: a tiny checkpoint")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--stall-timeout", type=float, default=5.0)
    parser.add_argument("--pause", action="store_true")
    options = parser.parse_args()
    end_in_time(60 * options.minutes + _SPARE_S)
    # Paths of sockets are limited to a hundred characters.
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        planted_in, temporary = Path(folder) / "planted", Path(folder) / "tmp"
        planted_in.mkdir()
        temporary.mkdir()
        os.environ["PYTHONPATH"] = str(planted_in)
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        model = options.model or str(write_tiny_gguf(planted_in / "tiny.gguf", max_positions=1024))
        problems = asyncio.run(run(options, model, planted(planted_in)))
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        left = [*processes_left(children), *files_left(temporary)]
        problems += [f"{thing} is left after the engine's end" for thing in left]
    for problem in problems:
        print(f"WRONG: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
