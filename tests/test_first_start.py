"""Ranks that die or stand still while they start for the first time: the start goes on."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import HeadraceError, PipelineError, StallError
from headrace.pipeline import epoch_start, launch
from headrace.pipeline.epoch_start import EpochStart
from headrace.pipeline.launch import RankProcesses
from headrace.pipeline.rank_process import RankProcess
from headrace.protocol.messages import RankConfig
from tiny_checkpoints import write_tiny_gguf

# FIFOs, and what holds them open.
Disks = dict[Path, int]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[int]:
    with LLM(model, dtype="float32") as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[int]:
    (answer,) = llm.generate("water", PARAMS, use_tqdm=False)
    return answer.outputs[0].token_ids


def engine(model: str, stages: int = 3, **settings: Any) -> LLM:
    return LLM(model, dtype="float32", pipeline_parallel_size=stages, **settings)


Moment = Callable[[EpochStart], bool]
MOMENTS: dict[str, Moment] = {
    "before anything was heard": lambda start: True,
    "when one has loaded": lambda start: len(start.loaded) >= 1,
    "when all have loaded": lambda start: start.cache_told,
    "when one is ready": lambda start: len(start.ready) >= 1,
}


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Moment, Callable[[RankProcesses], None]], Any]:
    """Have something done once, as soon as it is so while ranks start; gives whether it was."""

    def at(moment: Moment, then: Callable[[RankProcesses], None]) -> list[bool]:
        done: list[bool] = []

        def watched(name: str) -> None:
            original = getattr(RankProcesses, name)

            def and_do(self: RankProcesses, start: EpochStart) -> None:
                original(self, start)
                if not done and moment(start):
                    done.append(True)
                    then(self)

            monkeypatch.setattr(RankProcesses, name, and_do)

        # The first is over before any rank can have answered to what it tells.
        watched("_tell_cache")
        watched("_judge")
        return done

    return at


def kill(number: int) -> Callable[[RankProcesses], None]:
    return lambda ranks: os.kill(ranks._processes[number].process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "victim", "backend"),
    [
        *((moment, victim, "local") for moment in MOMENTS for victim in (0, 2)),
        # All its ranks are started anew, whoever dies.
        ("when one has loaded", 2, "gloo"),
    ],
)
def test_a_rank_that_is_killed_while_all_start_for_the_first_time_is_started_anew(
    model: str, expected: list[int], at: Any, moment: str, victim: int, backend: str
) -> None:
    done = at(MOMENTS[moment], kill(victim))
    with engine(model, link_backend=backend) as llm:
        assert tokens(llm) == expected
        recovery = llm._running.recovery
        # All may be ready at one look, and then there is no such moment.
        assert recovery.status.restarts == len(done)
        assert done or moment == "when one is ready"
        # It counts among those that are allowed.
        assert recovery.limit.restarts == len(done)


def test_who_lives_on_keeps_what_it_has_loaded_and_is_not_loaded_again(
    model: str, expected: list[int], at: Any
) -> None:
    before: list[int] = []

    def note_and_kill(ranks: RankProcesses) -> None:
        before.extend(rank.process.pid for rank in ranks._processes)
        kill(1)(ranks)

    at(MOMENTS["when one has loaded"], note_and_kill)
    with engine(model) as llm:
        assert tokens(llm) == expected
        after = [rank.process.pid for rank in llm._running.processes._processes]
        same = [old == new for old, new in zip(before, after, strict=True)]
        assert same == [True, False, True]


def test_one_that_waits_for_another_to_connect_hears_of_its_death_and_goes_on(
    model: str, expected: list[int], at: Any
) -> None:
    before: list[int] = []

    def stop(ranks: RankProcesses) -> None:
        # It has loaded, and listens; nobody who knocks is let in.
        before.extend(rank.process.pid for rank in ranks._processes)
        os.kill(before[1], signal.SIGSTOP)
        # By then the others have come to that.
        threading.Timer(1.0, lambda: os.kill(before[1], signal.SIGKILL)).start()

    at(lambda start: len(start.loaded) == 2, stop)
    with engine(model, stages=2) as llm:
        assert tokens(llm) == expected
        after = [rank.process.pid for rank in llm._running.processes._processes]
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)
        assert llm._running.recovery.status.restarts == 1


def test_without_restarts_the_first_death_ends_the_start(model: str, at: Any) -> None:
    at(MOMENTS["when one has loaded"], kill(1))
    with pytest.raises(PipelineError, match=r"^stage 1 .* was killed by signal 9 \(Killed\)$"):
        engine(model, max_restarts=0)


def test_a_rank_that_is_killed_again_and_again_ends_the_start_in_the_end(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = RankProcesses._judge

    def judge_and_kill(self: RankProcesses, start: EpochStart) -> None:
        judge(self, start)
        kill(0)(self)

    monkeypatch.setattr(RankProcesses, "_judge", judge_and_kill)
    told = r"stage 0 .* was killed by signal 9 .*; gave up after 2 restarts in 600 s"
    with pytest.raises(PipelineError, match=told):
        engine(model, stages=2, max_restarts=2)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were started, in order."""
    started: list[int] = []
    spawn = RankProcesses._spawn

    def spawn_and_note(self: RankProcesses, config: RankConfig) -> None:
        started.append(config.rank)
        spawn(self, config)

    monkeypatch.setattr(RankProcesses, "_spawn", spawn_and_note)
    return started


def test_a_fault_that_a_rank_reports_ends_the_start_at_once(
    model: str, monkeypatch: pytest.MonkeyPatch, starts: list[int]
) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "of-nowhere")
    with pytest.raises(HeadraceError, match="HEADRACE_KERNELS=of-nowhere"):
        engine(model, stages=2)
    assert starts == [0, 1]


_ABORTS = """
import os, sys
if "headrace.pipeline.stage_process" in sys.orig_argv:
    os.abort()
"""


def test_a_rank_that_crashes_by_itself_ends_the_start_at_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: list[int]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_ABORTS, encoding="ascii")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PipelineError, match=r"was killed by signal 6 .*"):
        engine(model, stages=2)
    assert starts == [0, 1]


# Loading waits in a read of this file, as of a disk that does not answer.
_SLOW_DISK = """
import os, sys
from importlib.util import find_spec
from pathlib import Path


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "headrace.execution.load":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_plant(module):
            execute(module)
            load = module.load_model

            def slow_load(config, device, on_progress):
                with open(Path(__file__).parent / f"disk-{config.rank}", "rb") as disk:
                    on_progress(0.0)
                    disk.read()
                return load(config, device, on_progress)

            module.load_model = slow_load

        spec.loader.exec_module = execute_and_plant
        return spec


if "headrace.pipeline.stage_process" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    """Of two ranks: each loads once they answer."""
    (tmp_path / "sitecustomize.py").write_text(_SLOW_DISK, encoding="ascii")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    disks = {}
    for rank in (0, 1):
        path = tmp_path / f"disk-{rank}"
        os.mkfifo(path)
        disks[path] = os.open(path, os.O_RDWR)
    return disks


@pytest.mark.parametrize("seen_from_outside", [True, False])
def test_a_rank_that_is_stopped_while_it_loads_is_found_and_started_anew_and_a_slow_one_is_not(
    model: str, expected: list[int], disks: Disks, seen_from_outside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # In seconds; the rank that waits for its disk does so for longer than either.
    monkeypatch.setattr(epoch_start, "_STOPPED_DEADLINE", 1.5)
    monkeypatch.setattr(epoch_start, "_SILENT_DEADLINE", 3.0)
    if not seen_from_outside:
        # As with those on other hosts.
        monkeypatch.setattr(RankProcess, "stopped", False)
    monkeypatch.setattr(launch, "_START_LOOK", 0.2)
    stopped: list[int] = []
    begun: list[EpochStart] = []
    judge = RankProcesses._judge

    def judge_and_open(self: RankProcesses, start: EpochStart) -> None:
        if start not in begun:
            begun.append(start)
        # Once it loads, and is known to answer.
        if not stopped and self._processes[1].has_answered:
            stopped.append(self._processes[1].process.pid)
            os.kill(stopped[0], signal.SIGSTOP)
        try:
            judge(self, start)
        except StallError:
            # The stopped one was found: now the disks give what is on them.
            let_answer(disks)
            raise

    monkeypatch.setattr(RankProcesses, "_judge", judge_and_open)
    with engine(model, stages=2) as llm:
        assert tokens(llm) == expected
        assert llm._running.recovery.status.restarts == 1
        assert len(begun) == 2
        assert begun[0].waited_s > 1.5


def let_answer(disks: Disks) -> None:
    """Also those who ask later."""
    for path, opened in disks.items():
        path.unlink()
        path.touch()
        os.close(opened)
    disks.clear()
