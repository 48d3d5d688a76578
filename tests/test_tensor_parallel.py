"""Stages of several shards, as real processes: the same answers, and the same recovery."""

import signal
from pathlib import Path
from typing import Any

import pytest

from command import wait_until
from faults import Faults, planted
from headrace import LLM, SamplingParams
from headrace.errors import StartError, UsageError
from test_recovery import Answers, answers, pids, send
from tiny_checkpoints import write_tiny_gguf

LAYOUTS = [(1, 2), (2, 2), pytest.param(1, 3, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """4 heads, 2 of them of keys: of 3 shards, some share one."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, max_positions=8192))


@pytest.fixture(scope="module")
def expected(model: str) -> Answers:
    """What one process says."""
    with LLM(model, dtype="float32") as llm:
        return answers(llm)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return planted(tmp_path)


def engine(model: str, stages: int, shards: int, **settings: Any) -> LLM:
    return LLM(
        model, dtype="float32", pipeline_parallel_size=stages, tensor_parallel_size=shards,
        max_num_seqs=8, block_size=4, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("stages", "shards"), LAYOUTS)
def test_shards_answer_as_one_process_does(
    model: str, expected: Answers, stages: int, shards: int
) -> None:
    with engine(model, stages, shards) as llm:
        assert answers(llm) == expected
        assert llm.card.ranks.count == stages * shards == len(llm.snapshot.usage)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"link_backend": "gloo"}, {"token_feedback": "blocking"}])
def test_shards_answer_so_by_other_links_and_with_blocking_feedback(
    model: str, expected: Answers, settings: dict[str, str]
) -> None:
    with engine(model, 2, 2, **settings) as llm:
        assert answers(llm) == expected


def test_logprobs_of_prompt_and_answer_are_those_of_one_process(model: str) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    prompt = [list(range(1, 200))]
    told = []
    for shards in (1, 2):
        with engine(model, 1, shards, max_num_batched_tokens=64) as llm:
            (answer,) = llm.generate(prompt, params)
        assert answer.prompt_logprobs is not None
        assert answer.outputs[0].logprobs is not None
        given = [e for e in (*answer.prompt_logprobs, *answer.outputs[0].logprobs) if e is not None]
        assert len(given) == 198 + 9
        told.append({(n, t): p.logprob for n, entry in enumerate(given) for t, p in entry.items()})
    assert told[1] == pytest.approx(told[0], abs=1e-4)


@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))]
)
def test_a_shard_that_is_killed_is_started_anew_and_every_answer_is_the_same(
    model: str, expected: Answers, victim: int
) -> None:
    with engine(model, 2, 2) as llm:
        before = pids(llm)

        def kill(rounds: int) -> None:
            if rounds in (1, 20):
                send(llm, victim, signal.SIGKILL)

        assert answers(llm, kill) == expected
        assert llm._running.recovery.status.restarts == 2
        # Whoever lived kept its weights.
        same = [old == new for old, new in zip(before, pids(llm), strict=True)]
        assert same == [number != victim for number in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_in_a_layer_of_a_shard_costs_it_alone(
    model: str, expected: Answers, victim: int, faults: Faults
) -> None:
    with engine(model, 1, 2) as llm:
        before = pids(llm)
        assert answers(llm, lambda n: faults.fail_once(victim) if n == 7 else None) == expected
        assert llm._running.recovery.status.restarts == 1
        same = [old == new for old, new in zip(before, pids(llm), strict=True)]
        assert same == [number != victim for number in range(2)]


def test_a_link_that_is_shut_under_a_shard_costs_no_process(
    model: str, expected: Answers, faults: Faults
) -> None:
    with engine(model, 2, 2) as llm:
        before = pids(llm)

        def shut(rounds: int) -> None:
            if rounds == 7:
                wait_until(faults.break_link(3))

        assert answers(llm, shut) == expected
        assert llm._running.recovery.status.restarts == 1
        assert pids(llm) == before


@pytest.mark.long
def test_a_shard_that_is_stopped_is_found_and_replaced(model: str, expected: Answers) -> None:
    with engine(model, 1, 2, stall_timeout=2.0) as llm:
        before = pids(llm)

        def stop(rounds: int) -> None:
            if rounds == 9:
                send(llm, 1, signal.SIGSTOP)

        assert answers(llm, stop) == expected
        assert llm._running.recovery.status.restarts >= 1
        assert pids(llm)[1] != before[1]


def test_a_shard_that_is_lost_for_good_is_named_with_its_stage(model: str) -> None:
    with engine(model, 2, 2, max_restarts=0) as llm:
        stream = llm.stream("a", SamplingParams(max_tokens=60, ignore_eos=True))
        next(stream)
        send(llm, 3, signal.SIGKILL)
        with pytest.raises(Exception, match="stage 1 shard 1"):
            list(stream)


def test_more_shards_than_heads_are_refused_before_anything_starts(model: str) -> None:
    with pytest.raises(UsageError, match=r"--tensor-parallel-size 5 is too many shards.* 4 heads"):
        engine(model, 1, 5)


def test_without_native_kernels_shards_are_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "import sys\nsys.modules['headrace.kernels._native'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(missing, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StartError, match="--tensor-parallel-size 2 needs the native kernels"):
        engine(model, 1, 2)
