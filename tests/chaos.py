"""Faults at random moments under load: `python tests/chaos.py --minutes 10 --seed 1`.

Streams run all the time; stages are killed, stopped, or made to raise in a layer, while they
compute, load and recover. Every answer is compared with that of an engine that nobody disturbed.
Prints faults, requests, lost, wrong, and the longest pause of a stream; exit code 1 if any request
was lost or wrong. --pause: one kill of the last stage under --streams streams, and how long that
paused them.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import Faults, planted
from headrace import LLM, AsyncLLM, SamplingParams
from headrace.errors import HeadraceError
from tiny_checkpoints import write_tiny_gguf

_PROMPTS = ["The mill wheel", "Water", "A headrace is", "Once upon a time there was a river that"]


@dataclass
class Report:
    """What came of it. pauses: the longest between two tokens of each stream, in seconds."""

    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    lost: int = 0
    wrong: int = 0
    pauses: list[float] = field(default_factory=list)


def choices(tokens: int) -> list[tuple[str, SamplingParams]]:
    """Requests, greedy and seeded, of which the load is made."""
    found = []
    for number, prompt in enumerate(_PROMPTS * 2):
        temperature = 0.0 if number < len(_PROMPTS) else 1.0
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=True
        )
        found.append((prompt, params))
    return found


async def stream(
    engine: AsyncLLM, prompt: str, params: SamplingParams, expected: list[int], report: Report
) -> None:
    """One request from its beginning to its end."""
    report.requests += 1
    tokens: list[int] = []
    at: float | None = None
    pause = 0.0
    try:
        async for output in engine.generate(prompt, params):
            now = time.monotonic()
            pause = max(pause, 0.0 if at is None else now - at)
            at, tokens = now, output.outputs[0].token_ids
            if output.finished and output.outputs[0].finish_reason == "error":
                report.lost += 1
                return
    except HeadraceError as error:
        print(f"lost: {error}")
        report.lost += 1
        return
    report.wrong += tokens != expected
    report.pauses.append(pause)


async def load(
    engine: AsyncLLM, expected: dict[int, list[int]], tokens: int, report: Report, end_at: float
) -> None:
    """One client: a request after the other until the end."""
    rng = random.Random(report.requests)
    while time.monotonic() < end_at:
        number = rng.randrange(len(expected))
        prompt, params = choices(tokens)[number]
        await stream(engine, prompt, params, expected[number], report)


async def disturb(
    engine: AsyncLLM, faults: Faults, rng: random.Random, report: Report, end_at: float
) -> None:
    """Faults until shortly before the end; some while the last one is being recovered from."""
    processes = engine._running.processes
    while (left := end_at - time.monotonic()) > 0:
        gap = rng.choice([0.3, rng.uniform(1, 3), rng.uniform(5, 12)])
        await asyncio.sleep(min(gap, left))
        ranks = list(processes._processes)
        victim = rng.choice(ranks)
        kind = rng.choice(["kill", "kill", "kill", "stop", "raise"])
        while_recovering = engine.recovery.cause is not None
        if kind == "raise":
            faults.fail_once(victim.number)
        elif kind == "stop":
            if while_recovering:
                continue
            os.kill(victim.process.pid, signal.SIGSTOP)
        else:
            os.kill(victim.process.pid, signal.SIGKILL)
        report.faults[f"{kind}{' while recovering' if while_recovering else ''}"] += 1


async def chaos(options: argparse.Namespace, model: str, faults: Faults) -> Report:
    """Run the load, and the faults beside it."""
    report, rng = Report(), random.Random(options.seed)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64}
    with LLM(model, **settings) as llm:
        asked = choices(options.tokens)
        outputs = llm.generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)
        expected = {number: o.outputs[0].token_ids for number, o in enumerate(outputs)}
    with AsyncLLM(
        model,
        pipeline_parallel_size=options.stages,
        max_restarts=1_000_000,
        stall_timeout=options.stall_timeout,
        **settings,
    ) as engine:
        if options.pause:
            await pause(engine, expected, options, report)
        else:
            end_at = time.monotonic() + 60 * options.minutes
            clients = [
                load(engine, expected, options.tokens, report, end_at)
                for _ in range(options.streams)
            ]
            await asyncio.gather(*clients, disturb(engine, faults, rng, report, end_at))
        print(f"restarts: {engine.recovery.restarts}, seconds: {engine.recovery.seconds:.1f}")
    return report


async def pause(
    engine: AsyncLLM, expected: dict[int, list[int]], options: argparse.Namespace, report: Report
) -> None:
    """Kill the last stage while all streams are in their middle."""
    asked = choices(options.tokens)
    streams = [
        asyncio.ensure_future(
            stream(engine, *asked[n % len(asked)], expected[n % len(asked)], report)
        )
        for n in range(options.streams)
    ]
    while engine.snapshot.num_running < options.streams:
        await asyncio.sleep(0.05)
    steps = engine.snapshot.steps
    while engine.snapshot.steps < steps + options.tokens // 2:
        await asyncio.sleep(0.01)
    os.kill(engine._running.processes._processes[-1].process.pid, signal.SIGKILL)
    report.faults["kill of the last stage"] += 1
    await asyncio.gather(*streams)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="default: a tiny checkpoint")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--stall-timeout", type=float, default=5.0)
    parser.add_argument("--pause", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults = planted(Path(folder))
        os.environ["PYTHONPATH"] = folder
        tiny = Path(folder) / "tiny.gguf"
        model = options.model or str(write_tiny_gguf(tiny, max_positions=1024))
        report = asyncio.run(chaos(options, model, faults))
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(report.faults.items()))
    print(f"seed {options.seed}; faults: {told}")
    print(f"requests: {report.requests}, lost: {report.lost}, wrong: {report.wrong}")
    print(f"longest pause of a stream: {max(report.pauses, default=0.0):.2f} s")
    return int(bool(report.lost or report.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
