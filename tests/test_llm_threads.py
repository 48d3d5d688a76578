"""Several threads, and processes that they fork, with one `LLM`."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from command import Mark, wait_until
from forks import in_fork
from headrace import LLM, SamplingParams
from headrace.engine.request import Sequence
from headrace.errors import UsageError
from headrace.pipeline.launch import RankProcesses
from headrace.pipeline.process import LocalProcess
from headrace.pipeline.remote_process import RemoteProcess
from headrace.protocol.messages import Report, Result
from tiny_checkpoints import write_tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# So long that it is never over before a test is.
ENDLESS = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
PROMPTS = ["one", "two", "six", "a longer one"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", max_positions=8192))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, pipeline_parallel_size=2, max_num_seqs=4) as engine:
        yield engine


def tokens(llm: LLM, prompt: str) -> list[int | None]:
    return list(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def streamed(llm: LLM, prompt: str) -> list[int | None]:
    return [delta.token for delta in llm.stream(prompt, GREEDY)]


def test_threads_that_share_an_llm_are_each_given_their_own(llm: LLM) -> None:
    expected = {prompt: tokens(llm, prompt) for prompt in PROMPTS}
    # Open all the while, in this thread.
    own = llm.stream("own", ENDLESS)
    next(own)
    asks: list[tuple[Callable[[LLM, str], list[int | None]], str]] = [
        (ask, prompt) for ask in (tokens, streamed) for prompt in PROMPTS
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, llm, prompt) for ask, prompt in asks * 5]
        seen = [next(own) for _ in range(20)]
        for answer, (_, prompt) in zip(answers, asks * 5, strict=True):
            assert answer.result() == expected[prompt]
    del own
    gc.collect()
    llm.settle()
    assert len(seen) == 20
    assert llm._running.engine.scheduler.idle
    assert llm._arrived == {}


def test_a_thread_that_asks_is_served_while_another_generates_without_end(llm: LLM) -> None:
    expected = tokens(llm, "one")
    done = threading.Event()

    def run() -> int:
        count = 0
        for count, _ in enumerate(llm.stream("endless", ENDLESS)):  # noqa: B007
            if done.is_set():
                break
        return count

    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(run)
        for _ in range(5):
            assert tokens(llm, "one") == expected
        assert len(llm.timelines()) == 2
        done.set()
        assert endless.result() < 7999


def test_one_batch_in_another_thread_may_be_refused_without_harm(llm: LLM) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(tokens, llm, "one")
        bad = pool.submit(llm.generate, ["a", ""], GREEDY)
        with pytest.raises(UsageError, match="prompt 1: the prompt is empty"):
            bad.result()
        assert len(good.result()) == 12


def test_a_stream_that_the_collector_ends_does_not_disturb_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = llm._running.processes.receive
    abort = llm._running.engine.abort
    in_step = False

    def collect_and_receive(timeout_s: float) -> list[Result | Report]:
        nonlocal in_step
        in_step = True
        forgotten.clear()
        gc.collect()
        in_step = False
        return receive(timeout_s)

    def watched_abort(request_id: int) -> object:
        assert not in_step
        return abort(request_id)

    forgotten = [llm.stream("forgotten", ENDLESS)]
    next(forgotten[0])
    monkeypatch.setattr(llm._running.processes, "receive", collect_and_receive)
    monkeypatch.setattr(llm._running.engine, "abort", watched_abort)
    assert len(tokens(llm, "one")) == 12
    llm.settle()
    assert llm._running.engine.scheduler.idle


def test_closing_in_another_thread_ends_what_runs_with_a_usage_error(model: str) -> None:
    llm = LLM(model)
    begun = threading.Event()

    def run() -> None:
        for _ in llm.stream("one", ENDLESS):
            begun.set()

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run) for _ in range(2)]
        begun.wait()
        llm.close()
        for each in running:
            with pytest.raises(UsageError, match=r"closed, by close\(\)"):
                each.result()
    llm.close()


def test_an_interrupt_in_one_thread_ends_the_others_and_is_told_to_them(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model)
    stages = [stage.process for stage in llm._running.processes._processes]
    receive = llm._running.processes.receive

    def interrupted(timeout_s: float) -> list[Result | Report]:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return receive(timeout_s)

    def other() -> None:
        for _ in llm.stream("one", ENDLESS):
            begun.set()

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other)
        begun.wait()
        monkeypatch.setattr(llm._running.processes, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("two", GREEDY)
        with pytest.raises(UsageError, match="closed, by KeyboardInterrupt"):
            running.result()
    assert all(process.poll() is not None for process in stages)


def test_an_interrupt_while_a_request_is_taken_on_ends_the_stages(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model) as llm:
        stages = [stage.process for stage in llm._running.processes._processes]

        def interrupted(sequence: Sequence) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(llm._running.engine.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("two", GREEDY)
        assert all(process.poll() is not None for process in stages)
        with pytest.raises(UsageError, match="closed, by KeyboardInterrupt"):
            llm.generate("two", GREEDY)


def test_no_stage_is_left_behind_when_the_engine_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[RankProcesses] = []
    processes: list[LocalProcess | RemoteProcess] = []

    def interrupted(*_: object, **__: object) -> None:
        processes.extend(stage.process for stage in started[0]._processes)
        raise KeyboardInterrupt

    def watched(*arguments: Any) -> RankProcesses:
        started.append(RankProcesses(*arguments))
        return started[0]

    monkeypatch.setattr("headrace.deployment.start.RankProcesses", watched)
    monkeypatch.setattr("headrace.deployment.start.new_engine", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM("synthetic:1+0.1")
    assert processes
    assert all(process.poll() is not None for process in processes)


def test_a_fork_that_uses_it_is_told_so_at_once_and_harms_nobody(llm: LLM) -> None:
    stream = llm.stream("one", ENDLESS)
    next(stream)
    uses: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate("one", GREEDY),
        "chat": lambda: llm.chat([{"role": "user", "content": "one"}], GREEDY),
        "a new stream": lambda: next(llm.stream("one", GREEDY)),
        "an open stream": lambda: [next(stream) for _ in range(9999)],
        "settle": llm.settle,
        "timelines": llm.timelines,
        "close": llm.close,
    }
    # What another thread holds at a fork is held for ever in the child.
    holder = threading.Event()
    held = threading.Event()

    def hold() -> None:
        with llm._lock:
            held.set()
            holder.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    told = {name: in_fork(use) for name, use in uses.items()}
    assert in_fork(llm._end_stages) == "nothing"
    holder.set()
    thread.join()
    # The model has no template, which chat finds out first.
    assert told.pop("chat").startswith("UsageError: ")
    assert {name: text.split(",")[0] for name, text in told.items()} == {
        name: f"UsageError: this engine belongs to process {os.getpid()}" for name in told
    }
    assert next(stream).token is not None
    assert len(tokens(llm, "one")) == 12


PROGRAM = """
import multiprocessing, os, signal, sys
from headrace import LLM, SamplingParams

def answer():
    return llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids

llm = LLM("synthetic:1+0.1", pipeline_parallel_size=2)
first = answer()
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
process = multiprocessing.get_context("fork").Process(target=print, args=("child",))
process.start()
process.join()
assert process.exitcode == 0
assert answer() == first
if os.fork() == 0:
    # Holds everything that it inherited until it is killed.
    signal.pause()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_ends_of_forks_harm_nobody_and_no_stage_outlives_its_engine() -> None:
    mark = Mark()
    # Socket paths are limited to a hundred characters, which pytest's folders nearly take.
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        variables = {**os.environ, "TMPDIR": folder, mark.name: mark.value}
        # What children print to is not waited for: one of them lives on.
        output = Path(folder) / "output"
        with output.open("wb") as file:
            program = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=variables, stdout=file, stderr=file
            )
        try:
            assert program.wait() == -signal.SIGKILL, output.read_text()
            assert output.read_text() == "child\nready\n"
            (child,) = [p for p in mark.processes() if not is_stage(p)]
            wait_until(lambda: mark.processes() == [child])
            assert os.listdir(folder) == ["output"]
        finally:
            for pid in mark.processes():
                os.kill(pid, signal.SIGKILL)


def is_stage(pid: int) -> bool:
    try:
        return "headrace.pipeline.stage_process" in psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        # It has ended meanwhile: the child that is asked for never does.
        return True
