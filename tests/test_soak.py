"""The checks of soak.py find what they are for: each leak that is planted, and nothing else."""

import re
from random import Random

import pytest

from memory_watch import MOST_MIB_PER_HOUR, Life, MemoryWatch
from soak import SoakOptions, soaked_server

# Once there is a file "leaks": in the server a slot and a block an epoch; in the first stage 64
# KiB a step, and once handles, a ledger, a thread, a descriptor, a process and a folder.
_LEAKS = """
import os, subprocess, tempfile, threading

KEPT = []


def leak_room(module):
    release = module.Room.release

    def leaky(self, sequence):
        blocks = sequence.running.blocks
        if (FOLDER / "leaks").exists() and blocks and not hasattr(self, "leaked"):
            self.leaked = blocks.pop(), self._free_slots.pop(0)
        return release(self, sequence)

    module.Room.release = leaky


def leak_in_steps(module):
    forward = module.ModelExecutor.forward

    def leaky(self, plan, inputs):
        if (FOLDER / "leaks").exists():
            if not KEPT:
                from headrace.pipeline.ledger import Ledger, _Entry

                KEPT.extend(_Entry(None, None) for _ in range(60))
                KEPT.append(Ledger())
                os.dup(0)
                waits = threading.Event().wait
                threading.Thread(target=waits, name="x (stays)", daemon=True).start()
                subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, start_new_session=True)
                tempfile.mkdtemp(prefix="stays-")
            KEPT.append(b"x" * (1 << 16))
        return forward(self, plan, inputs)

    module.ModelExecutor.forward = leaky


if RANK == "0":
    when_imported("headrace.execution.model_executor", leak_in_steps)
elif not IS_STAGE:
    when_imported("headrace.engine.room", leak_room)
"""


def test_everything_that_is_left_is_named_and_nothing_else() -> None:
    options = SoakOptions(
        seconds=5.0, deaths=1, seed=2, stages=2, cases=8, concurrency=8, longest_prompt=400,
        longest_answer=40, max_model_len=512, kv_cache_memory="160KiB", sample_s=0.05,
        patience_s=2.0,
    )  # fmt: skip
    with soaked_server(options, _LEAKS) as soak:
        assert soak.spared == "rank 0", "choose a seed that spares the stage that leaks"
        soak.warm_up()
        assert soak.problems == []
        (soak.planted / "leaks").touch()
        soak.wear()
        # In so short a life others grow, too, and not all that is to be tried may happen.
        short = re.compile("memory grew: (server|rank 1)|.* is 0: choose")
        problems = [problem for problem in soak.finish() if not short.match(problem)]
    left = [
        "slots_used is 1 while nobody asks",
        "kv_blocks_used is 1 while nobody asks",
        r"process \d+ \(sleep 100\) is left",
        "stays-.* is left",
        r"rank 0 has \d+ more headrace.pipeline.ledger._Entry",
        "rank 0 has 1 more headrace.pipeline.ledger.Ledger",
        "rank 0 has 1 more open pipe",
        "rank 0 has 1 more thread stays",
        "memory grew: rank 0:",
        r"process \d+ \(sleep 100\) is left after the server's end",
        "stays-.* is left after the server's end",
    ]
    assert_matches(problems, left)


def assert_matches(problems: list[str], patterns: list[str]) -> None:
    """Each pattern is at the beginning of its own problem, in any order."""
    unknown = [p for p in problems if not any(re.match(pattern, p) for pattern in patterns)]
    missing = [p for p in patterns if not any(re.match(p, problem) for problem in problems)]
    assert not unknown + missing, "\n".join(["unknown:", *unknown, "missing:", *missing])
    assert len(problems) == len(patterns)


@pytest.mark.parametrize("leak", [0.0, 2 * MOST_MIB_PER_HOUR])
def test_the_line_through_a_life_tells_a_leak_from_noise(leak: float) -> None:
    """Sampled every two seconds for twenty minutes, with noise of some MiB and a large warm-up."""
    random = Random(5)
    life = Life("rank 0", 1)
    for number in range(600):
        at = 2.0 * number
        warm_up = 20.0 * min(1.0, at / 200)
        life.samples.append((at, 100 + warm_up + leak * at / 3600 + random.gauss(0, 2)))
    assert life.slope == pytest.approx(leak, abs=MOST_MIB_PER_HOUR / 2)
    assert (memory_problems(life) == []) == (leak == 0)


def memory_problems(*lives: Life) -> list[str]:
    watch = MemoryWatch(dict(enumerate(lives)))
    return watch.problems([life.name for life in lives])


def test_a_life_of_a_few_samples_is_not_judged() -> None:
    life = Life("rank 0", 1, [(float(second), 100.0 + second) for second in range(20)])
    assert life.slope is None
    assert str(life) == "rank 0: 19 s, too short to be judged"
    assert memory_problems(life) == ["no life of rank 0 was long enough to judge its memory"]
