"""Stages that die, raise or stand still: nothing is lost, and nothing is different."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from census import descriptors
from command import wait_until
from faults import Faults, planted
from headrace import LLM, SamplingParams
from headrace.engine.outputs import OutputDelta
from headrace.errors import PipelineError
from tiny_checkpoints import write_tiny_gguf

TOKENS = 60
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=TOKENS, ignore_eos=True)
STOPPED = SamplingParams(
    temperature=1.0, seed=11, max_tokens=TOKENS, ignore_eos=True, stop=["zzzzzz", "\ufffd?!"]
)
REQUESTS = [("one", GREEDY), ("a longer prompt", SEEDED), ("two", GREEDY), ("six", STOPPED)]
# By request and completion: tokens, text, finish reason.
Answers = dict[tuple[int, int], tuple[list[int], str, str | None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, max_positions=8192))


@pytest.fixture(scope="module")
def expected(model: str) -> Answers:
    """What nobody disturbed."""
    with LLM(model, dtype="float32") as llm:
        return answers(llm)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return planted(tmp_path)


def engine(model: str, stages: int, **settings: Any) -> LLM:
    return LLM(
        model, dtype="float32", pipeline_parallel_size=stages, max_num_seqs=8, block_size=4,
        **settings,
    )  # fmt: skip


def answers(
    llm: LLM,
    disturb: Callable[[int], None] = lambda _: None,
    requests: list[tuple[str, SamplingParams]] = REQUESTS,
) -> Answers:
    """What streams that are read in turns give. disturb: called with the number of rounds."""
    found: Answers = {}
    streams: dict[int, Iterator[OutputDelta]] = {
        number: llm.stream(prompt, params) for number, (prompt, params) in enumerate(requests)
    }
    rounds = 0
    while streams:
        for number, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[number]
                continue
            tokens, text, _ = found.get((number, delta.index), ([], "", None))
            if delta.token is not None:
                tokens.append(delta.token)
            found[number, delta.index] = (tokens, text + delta.text, delta.finish_reason)
        rounds += 1
        disturb(rounds)
    return found


def pids(llm: LLM) -> list[int]:
    return [rank.process.pid for rank in llm._running.processes._processes]


def send(llm: LLM, victim: int, number: signal.Signals) -> None:
    os.kill(pids(llm)[victim], number)


@pytest.mark.parametrize(("stages", "victim"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_stage_that_is_killed_is_started_anew_and_every_answer_is_the_same(
    model: str, expected: Answers, stages: int, victim: int
) -> None:
    with engine(model, stages) as llm:
        before = pids(llm)

        def kill(rounds: int) -> None:
            if rounds in (1, 20):
                send(llm, victim, signal.SIGKILL)

        assert answers(llm, kill) == expected
        status = llm._running.recovery.status
        assert (status.restarts, status.cause) == (2, None)
        assert status.seconds > 0
        # Whoever lived kept its weights.
        same = [old == new for old, new in zip(before, pids(llm), strict=True)]
        assert same == [number != victim for number in range(stages)]
        assert llm.snapshot.blocks_total == llm.card.num_blocks
        assert answers(llm) == expected


def test_a_death_while_the_pipeline_recovers_is_one_more_restart(
    model: str, expected: Answers
) -> None:
    with engine(model, 3) as llm:
        recovery = llm._running.recovery
        look, killed = recovery.rebuild.look, list[int]()

        def look_and_kill(timeout_s: float) -> bool:
            # One that loads, one that lives on, and both at once: each when the death before has
            # led to a restart.
            victims = [[1], [0], [1, 2]]
            number = len(killed)
            if number < len(victims) and recovery.status.restarts == number + 1:
                killed.append(number)
                for victim in victims[number]:
                    send(llm, victim, signal.SIGKILL)
            return look(timeout_s)

        recovery.rebuild.look = look_and_kill  # type: ignore[method-assign]

        def kill(rounds: int) -> None:
            if rounds == 5:
                send(llm, 1, signal.SIGKILL)

        assert answers(llm, kill) == expected
        assert killed == [0, 1, 2]
        assert recovery.status.restarts >= 4


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_exception_in_a_layer_costs_only_its_stage(
    model: str, expected: Answers, victim: int, faults: Faults
) -> None:
    with engine(model, 3) as llm:
        before = pids(llm)
        assert answers(llm, lambda n: faults.fail_once(victim) if n == 7 else None) == expected
        assert llm._running.recovery.status.restarts == 1
        same = [old == new for old, new in zip(before, pids(llm), strict=True)]
        assert same == [number != victim for number in range(3)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_link_that_is_shut_under_its_stages_costs_no_process(
    model: str, expected: Answers, rank: int, faults: Faults
) -> None:
    with engine(model, 3) as llm:
        before = pids(llm)

        def shut(rounds: int) -> None:
            if rounds == 7:
                wait_until(faults.break_link(rank))

        assert answers(llm, shut) == expected
        assert llm._running.recovery.status.restarts == 1
        assert pids(llm) == before


def test_what_lives_through_recoveries_holds_nothing_of_the_epochs_before(
    model: str, faults: Faults
) -> None:
    with engine(model, 3) as llm:
        opened = []
        for number in range(4):
            answers(llm, lambda n: wait_until(faults.break_link(1)) if n == 7 else None)
            assert llm._running.recovery.status.restarts == number + 1
            opened.append([descriptors(pid) for pid in [os.getpid(), *pids(llm)]])
        # From the second on: by then, whatever is made once was made.
        assert opened[1] == opened[2] == opened[3]


def test_a_stage_that_fails_while_it_loads_is_started_once_more(
    model: str, expected: Answers, faults: Faults
) -> None:
    with engine(model, 2) as llm:

        def kill(rounds: int) -> None:
            if rounds == 7:
                faults.fail_loading(1)
                send(llm, 1, signal.SIGKILL)

        assert answers(llm, kill) == expected
        assert llm._running.recovery.status.restarts == 2


def test_a_stage_that_is_stopped_is_found_by_its_deadline_and_replaced(
    model: str, expected: Answers
) -> None:
    with engine(model, 2, stall_timeout=2.0) as llm:
        before = pids(llm)

        def stop(rounds: int) -> None:
            if rounds == 9:
                send(llm, 1, signal.SIGSTOP)

        assert answers(llm, stop) == expected
        assert llm._running.recovery.status.restarts >= 1
        assert pids(llm)[1] != before[1]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_stage_that_is_stopped_ends_with_the_engine_however_that_is_closed(
    model: str, in_order: bool
) -> None:
    with suppress(ZeroDivisionError), engine(model, 2) as llm:
        there = pids(llm)
        send(llm, 1, signal.SIGSTOP)
        if not in_order:
            raise ZeroDivisionError
    assert not any(psutil.pid_exists(pid) for pid in there)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_request_that_ends_a_stage_whenever_it_runs_fails_alone_at_its_second_death(
    model: str, expected: Answers, faults: Faults, aborts: bool
) -> None:
    poison = SamplingParams(temperature=0, max_tokens=5, n=1)
    with engine(model, 2) as llm:
        faults.poison(llm.tokenizer.encode("~", add_special_tokens=False)[0], aborts=aborts)
        found = answers(llm, requests=[*REQUESTS[:2], ("bad ~ bad", poison), *REQUESTS[2:]])
        assert llm._running.recovery.status.restarts == 2
        tokens, text, reason = found.pop((2, 0))
        assert (tokens, text, reason) == ([], "", "error")
        moved = {(n if n < 2 else n - 1, index): answer for (n, index), answer in found.items()}
        assert moved == expected


def test_beyond_the_limit_the_engine_gives_up_and_says_why(model: str) -> None:
    with engine(model, 2, max_restarts=1) as llm:

        def kill(rounds: int) -> None:
            if rounds in (5, 10):
                send(llm, 0, signal.SIGKILL)

        told = r"stage 0 .* was killed by signal 9 .*gave up after 1 restarts in 600 s"
        with pytest.raises(PipelineError, match=told):
            answers(llm, kill)


def test_without_restarts_the_first_death_ends_the_engine(model: str) -> None:
    told = r"stage 1 .* was killed by signal 9 \(Killed\)$"
    with engine(model, 2, max_restarts=0) as llm, pytest.raises(PipelineError, match=told):
        answers(llm, lambda n: send(llm, 1, signal.SIGKILL) if n == 3 else None)
