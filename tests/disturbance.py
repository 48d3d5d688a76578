"""Harm done to an engine's stages at random moments: which, to whom, and when."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from faults import Faults
from headrace import AsyncLLM
from stage_processes import stage_processes

# How often each fault is drawn: "cannot load" is a kill of a stage that then fails to load once.
_KINDS = {"kill": 6, "stop": 1, "raise": 4, "cannot load": 2, "link shut": 5, "freeze": 1}
# Of a stage that starts nobody expects steps.
_WHILE_COMPUTING = ("stop", "raise", "freeze")
# While all start for the first time: how often each is drawn, and how many there may be. Seconds
# to the next.
_AT_START = {"kill": 3, "stop": 1}
_MOST_AT_START = 3
_NEXT_AT_START_S = 2.5
# A freeze lasts so many times as long as a stage may stand still.
_FROZEN = 1.5


@dataclass
class Harm:
    """What was done. faults: by what and when, and to which stage. frozen_s: how long all stood
    still together."""

    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    frozen_s: float = 0.0

    def now(self) -> float:
        """In seconds that somebody could have done anything in."""
        return time.monotonic() - self.frozen_s

    def note(self, fault: str, place: str) -> None:
        """Count it, and say so, between the engine's own lines."""
        self.faults[fault, place] += 1
        print(f"fault {self.faults.total()}: {fault}: {place}", file=sys.stderr)

    def __str__(self) -> str:
        places = ["first", "middle", "last", "all"]
        rows = [["fault", *places]]
        for kind in sorted({kind for kind, _ in self.faults}):
            rows.append([kind, *(str(self.faults[kind, place]) for place in places)])
        return "\n".join(f"{row[0]:28}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows)


@dataclass
class Disturbance:
    """Does the harm, and counts it."""

    engine: AsyncLLM
    faults: Faults
    random: Random
    harm: Harm

    async def run(self, seconds: float) -> None:
        """For so long; some while the last one is being recovered from."""
        end_at = time.monotonic() + seconds
        while (left := end_at - time.monotonic()) > 0:
            gap = self.random.choice(
                [0.3, self.random.uniform(0.3, 3.0), self.random.uniform(3.0, 10.0)]
            )
            await asyncio.sleep(min(gap, left))
            self._do_one()

    def _do_one(self) -> None:
        processes = self.engine._running.processes
        ranks = list(processes._processes)
        victim = self.random.choice(ranks)
        (kind,) = self.random.choices(list(_KINDS), list(_KINDS.values()))
        when = ""
        if self.engine.recovery.cause is not None:
            if kind in _WHILE_COMPUTING:
                return
            start = processes._start
            loads = start is not None and victim.number not in start.loaded
            when = ", loading" if loads else ", others loading"
        elif kind == "raise" and self.engine._running.engine._suspects:
            # One more of the kind, and a request would rightly be blamed for it.
            return
        match kind:
            case "kill":
                send(victim.process.pid, signal.SIGKILL)
            case "stop":
                send(victim.process.pid, signal.SIGSTOP)
            case "raise":
                self.faults.fail_once(victim.number)
            case "cannot load":
                self.faults.fail_loading(victim.number)
                send(victim.process.pid, signal.SIGKILL)
            case "link shut":
                self.faults.break_link(victim.number)
            case "freeze":
                self._freeze([rank.process.pid for rank in ranks])
        place = "all" if kind == "freeze" else place_of(victim.number, len(ranks))
        self.harm.note(kind + when, place)

    def _freeze(self, stages: list[int]) -> None:
        """This process, which has the engine, and the stages; for longer than a stall may take."""
        seconds = _FROZEN * self.engine.config.stall_timeout
        processes = [*stages, os.getpid()]
        numbers = " ".join(str(process) for process in processes)
        began = time.monotonic()
        thawing = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {numbers}"])
        for process in processes:
            send(process, signal.SIGSTOP)
        thawing.wait()
        self.harm.frozen_s += time.monotonic() - began


async def start_disturbed(
    start: Callable[[], AsyncLLM], ranks: int, random: Random, harm: Harm
) -> AsyncLLM:
    """Start an engine of so many ranks, while some are killed or stopped."""
    starting = asyncio.create_task(asyncio.to_thread(start))
    for _ in range(random.randint(1, _MOST_AT_START)):
        await asyncio.wait([starting], timeout=random.uniform(0.0, _NEXT_AT_START_S))
        stages = stage_processes(os.getpid())
        victim = random.randrange(ranks)
        (kind,) = random.choices(list(_AT_START), list(_AT_START.values()))
        if not starting.done() and victim in stages:
            send(stages[victim], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            harm.note(f"{kind}, first start", place_of(victim, ranks))
    return await starting


def place_of(rank: int, ranks: int) -> str:
    """Which stage that is, in words."""
    if rank == 0:
        return "first"
    return "last" if rank == ranks - 1 else "middle"


def send(process: int, number: signal.Signals) -> None:
    """To a process that may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(process, number)
