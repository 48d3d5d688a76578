"""Wears a server out: `python tests/soak.py --minutes 20 --seed 1`.

A real server over HTTP, with a cache too small for its load: long and short prompts, shared
beginnings, streams and not, clients that hang up; and a stage is killed every two minutes. One
stage, by the seed, is spared, so that its memory shows what recoveries leave behind.

Whole answers must be those that were given one at a time before any fault. Memory is sampled all
the while: the line through what a process had after the first third of its life may rise by 16 MiB
an hour, or by 3 MiB in all in a shorter one. In the end there must be no more slots, blocks,
handles, descriptors, processes and files than before; and after the server's end none at all. Exit
code 1, and a line for each thing that is not so.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from census import COUNT
from headrace.client import Client
from headrace.serving.loop_watch import STOOD_STILL
from leftovers import files_left, processes_left
from memory_watch import MemoryWatch
from planted import plant
from server_state import Inside, Outside, look_inside, look_outside, processes, stages
from serving.running_server import Server, check_standstills, running_server
from serving.scrape import IDLE, scrape
from serving.tiny_model import write_chat_model
from soak_load import Case, Load, ask, make_cases
from unattended import end_in_time

# Seconds between two deaths; a shorter run has as many as it has quarters.
_DEATH_EVERY_S = 120.0
_END_TIMEOUT_S = 60.0
# Beside the load: the start, the warm-up, and all that must end.
_SPARE_S = 900.0
# In the server's log: faults of its own.
_FAULTS = re.compile(rf"Traceback|internal error|never retrieved|{STOOD_STILL}")
# Time lines that are full at once, lest their filling be taken for a leak: it takes 12 MiB.
_SHORT_TIME_LINES = """
def shorten(module):
    module.RING_SIZE = 1 << 10


when_imported("headrace.pipeline.timeline", shorten)
"""


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """deaths: beside one in the warm-up. hang_ups: the part of the requests that clients give up.
    sample_s: between two looks at memory. patience_s: for what is in use to come back once nobody
    asks; answer_s: for an answer."""

    seconds: float
    deaths: int
    seed: int = 1
    model: str | None = None
    stages: int = 3
    kv_cache_memory: str = "1MiB"
    max_model_len: int = 2048
    max_num_seqs: int = 16
    concurrency: int = 24
    cases: int = 40
    longest_prompt: int = 1600
    longest_answer: int = 200
    hang_ups: float = 0.3
    sample_s: float = 2.0
    patience_s: float = 30.0
    answer_s: float = 300.0


@dataclass
class Soak:
    """One server from its start to its end: warm_up(), wear(), then finish() says what is wrong.

    planted: the folder of code that counts within processes; temporary: that of temporary files.
    """

    options: SoakOptions
    server: Server
    planted: Path
    temporary: Path
    random: Random
    cases: list[Case] = field(init=False)
    load: Load = field(init=False)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    deaths: int = 0
    outside: Outside = field(init=False)
    inside: Inside = field(init=False)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        self.spared = f"rank {self.random.randrange(options.stages)}"
        self.cases = make_cases(
            options.cases, options.longest_prompt, options.longest_answer, self.random
        )

    def warm_up(self) -> None:
        """Learn the undisturbed answers; then a little load, a death, and what is there after."""
        options = self.options

        async def ask_all() -> None:
            async with Client(self.server.url) as client:
                (name, *_) = await client.models()
                for case in self.cases:
                    case.body["model"] = name
                expected = [await ask(client, case, stream=False) for case in self.cases]
            self.load = Load(
                self.server.url,
                self.cases,
                expected,
                self.random,
                hang_ups=options.hang_ups,
                answer_s=options.answer_s,
            )

        _say(f"{options.cases} requests one by one")
        asyncio.run(ask_all())
        asyncio.run(self._under_load(min(20.0, options.seconds / 6), deaths=1))
        self._wait_until_idle()
        self.outside = look_outside(self.server, self.temporary)
        self.inside = look_inside(self.server, self.planted)

    def wear(self) -> None:
        """The load, with deaths beside it; nothing but memory is looked at meanwhile."""
        asyncio.run(self._under_load(self.options.seconds, self.options.deaths))
        self._wait_until_idle()
        deadline = time.monotonic() + self.options.patience_s
        # Connections and sockets take a moment to go.
        while left := look_outside(self.server, self.temporary).left_since(self.outside):
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        self.problems += left
        # Once: to count what garbage holds frees it.
        self.problems += look_inside(self.server, self.planted).left_since(self.inside)

    def finish(self) -> list[str]:
        """End the server, and tell all that was not as it must be."""
        _say("the end")
        self._look_at_counters()
        account, process = self.load.account, self.server.command.process
        self.problems += account.lost + account.wrong
        self.problems += self.memory.problems(["server", self.spared])
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(_END_TIMEOUT_S)) != 0:
            self.problems.append(f"the server ended with exit code {code}")
        self.server.reader.join()
        self.problems += [line.strip() for line in self.server.log if _FAULTS.search(line)]
        with contextlib.suppress(AssertionError):
            # Told above, and not twice.
            check_standstills(self.server)
        left = [*processes_left(self.server.command.processes()), *files_left(self.temporary)]
        self.problems += [f"{thing} is left after the server's end" for thing in left]
        return self.problems

    def report(self) -> str:
        """What was done, and each life's memory."""
        account, seen = self.load.account, scrape(self.server.url)
        return "\n".join(
            [
                f"seed {self.options.seed}; deaths: {self.deaths}; requests: {account.requests} "
                f"(given up by their client: {account.hung_up}), lost: {len(account.lost)}, "
                f"wrong: {len(account.wrong)}",
                f"preemptions: {seen['num_preemptions_total']:.0f}, tokens found in the prefix "
                f"cache: {seen['prefix_cache_hits_total']:.0f}, steps: {seen['steps_total']:.0f}, "
                f"recovering: {seen['recovery_seconds_total']:.1f} s",
                *map(str, self.memory.lives.values()),
            ]
        )

    async def _under_load(self, seconds: float, deaths: int) -> None:
        _say(f"load for {seconds:.0f} s, with {deaths} deaths")
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self.load.run(self.options.concurrency, seconds))
            tasks.create_task(self._kill(deaths, seconds / (deaths + 1)))
            while not asking.done():
                self.memory.sample(processes(self.server))
                await asyncio.sleep(self.options.sample_s)

    async def _kill(self, deaths: int, every_s: float) -> None:
        for _ in range(deaths):
            await asyncio.sleep(every_s)
            while not (victims := [s for s in stages(self.server).items() if s[0] != self.spared]):
                await asyncio.sleep(0.1)
            name, process = self.random.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                self.deaths += 1
                _say(f"death {self.deaths}: {name}")

    def _wait_until_idle(self) -> None:
        """Slots, blocks and steps must come back."""
        deadline = time.monotonic() + self.options.patience_s
        while True:
            seen = scrape(self.server.url)
            left = {name: seen[name] for name in IDLE if seen[name]}
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.problems += [f"{name} is {value:g} while nobody asks" for name, value in left.items()]

    def _look_at_counters(self) -> None:
        """What did not happen was not tried."""
        seen = scrape(self.server.url)
        if seen["restarts_total"] != self.deaths:
            self.problems.append(f"{self.deaths} deaths, {seen['restarts_total']:g} restarts")
        for name in ("num_preemptions_total", "prefix_cache_hits_total"):
            if not seen[name]:
                self.problems.append(f"{name} is 0: choose a smaller --kv-cache-memory")


@contextlib.contextmanager
def soaked_server(options: SoakOptions, *more_planted: str) -> Iterator[Soak]:
    """A server that is ready to be worn out; nothing of it is left afterwards."""
    # Paths of sockets are limited to a hundred characters.
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        planted, temporary = Path(folder) / "planted", Path(folder) / "tmp"
        planted.mkdir()
        temporary.mkdir()
        plant(planted, COUNT, _SHORT_TIME_LINES, *more_planted)
        model = options.model or str(write_chat_model(planted / "tiny.gguf"))
        with running_server(
            *("--model", model, "-pp", str(options.stages), "--dtype", "float32"),
            *("--kv-cache-memory", options.kv_cache_memory),
            *("--max-model-len", str(options.max_model_len)),
            *("--max-num-seqs", str(options.max_num_seqs)),
            *("--max-restarts", "1000000"),
            PYTHONPATH=str(planted),
            TMPDIR=str(temporary),
        ) as server:
            yield Soak(options, server, planted, temporary, Random(options.seed))


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="default: a tiny checkpoint")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--kv-cache-memory", default="1MiB")
    parser.add_argument("--concurrency", type=int, default=24)
    given = vars(parser.parse_args())
    seconds = 60 * given.pop("minutes")
    end_in_time(seconds + _SPARE_S)
    deaths = round(seconds / min(_DEATH_EVERY_S, seconds / 4)) - 1
    sample_s = min(SoakOptions.sample_s, seconds / 60)
    options = SoakOptions(seconds=seconds, deaths=deaths, sample_s=sample_s, **given)
    with soaked_server(options) as soak:
        soak.warm_up()
        soak.wear()
        print(soak.report())
        problems = soak.finish()
    for problem in problems:
        print(f"WRONG: {problem}")
    print("nothing is left, and nothing was lost" if not problems else f"{len(problems)} wrong")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
