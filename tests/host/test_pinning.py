"""Real stages: one OpenMP runtime, its threads on a core each, all others free among the cores."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from command import Command
from headrace.host.cpus import StageCpus
from headrace.host.pinning import start_process
from tiny_checkpoints import write_tiny_gguf

ALLOWED = sorted(os.sched_getaffinity(0))
# What a user may have set for other programs, and what must not matter.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PINNING = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": str(ALLOWED[-1])}
several_cores = pytest.mark.skipif(len(ALLOWED) < 2, reason="threads need two cores to be apart")


@contextmanager
def at_work(folder: Path, *arguments: str) -> Iterator[Command]:
    """headrace generate on a tiny model, once every stage computes."""
    model = write_tiny_gguf(folder / "tiny.gguf", max_positions=100_000)
    common = ["generate", "--model", str(model), "--prompt", "x" * 100, "--ignore-eos"]
    limits = ["--max-tokens", "99000", "--kv-cache-memory", "200MB"]
    with Command([*common, *limits, *arguments], environment=THREADS) as command:
        assert command.process.stdout is not None
        assert command.process.stdout.read(1)
        yield command


def cores_of_threads(pid: int) -> dict[int, frozenset[int]]:
    """Where each thread may run, by its id."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/task"):
        # One may end just now.
        with suppress(ProcessLookupError):
            found[int(name)] = frozenset(os.sched_getaffinity(int(name)))
    return found


def openmp_runtimes(pid: int) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return set(re.findall(r"/\S*/lib(?:gomp|iomp|omp)\d?\b[^/\s]*", maps))


@several_cores
def test_each_openmp_thread_has_a_core_and_other_threads_have_all_of_the_stage(
    tmp_path: Path,
) -> None:
    first, second = ALLOWED[:2]
    bind = f"{first},{second}|{first},{second}"
    with at_work(tmp_path, "-pp", "2", "--cpu-bind", bind) as command:
        for stage in command.stages():
            threads = cores_of_threads(stage)
            assert threads.pop(stage) == {first}, "the main thread computes too"
            counts = Counter(threads.values())
            assert counts.pop(frozenset({second})) == 1
            assert set(counts) == {frozenset({first, second})}, "sockets, links, watching"
            assert len(openmp_runtimes(stage)) == 1, openmp_runtimes(stage)
        engine = command.process.pid
        assert set(cores_of_threads(engine).values()) == {frozenset(ALLOWED)}
        assert "libtorch" not in Path(f"/proc/{engine}/maps").read_text(encoding="utf-8")


@several_cores
def test_none_pins_no_thread(tmp_path: Path) -> None:
    with at_work(tmp_path, "--cpu-bind", "none", "--cpu-threads", "2") as command:
        (stage,) = command.stages()
        assert set(cores_of_threads(stage).values()) == {frozenset(ALLOWED)}
        assert len(openmp_runtimes(stage)) == 1, openmp_runtimes(stage)


def test_the_environments_own_threads_and_pinning_are_replaced() -> None:
    # More than there are cores: torch asks MKL, which would take fewer.
    threads = len(ALLOWED) + 1
    code = "import os, torch; print(torch.get_num_threads(), *sorted(os.sched_getaffinity(0)))"
    pinned, free = (
        start_process(
            [sys.executable, "-c", code],
            StageCpus(cpus, threads),
            {**os.environ, **THREADS, **PINNING},
            stdout=subprocess.PIPE,
        )
        for cpus in (ALLOWED[:1], [])
    )
    assert sorted(os.sched_getaffinity(0)) == ALLOWED, "the caller stays where it was"
    for process, cpus in ((pinned, ALLOWED[:1]), (free, ALLOWED)):
        answer, _ = process.communicate(timeout=60)
        assert list(map(int, answer.split())) == [threads, *cpus]
