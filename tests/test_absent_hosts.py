"""A host that stays away, here on loopback: the others take over its layers, or wait for it."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from command import wait_until
from headrace import LLM
from headrace.deployment.rebuild import Rebuild
from joined_hosts import Agent, agents, start
from test_recovery import Answers, answers
from tiny_checkpoints import write_tiny_gguf

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", max_positions=8192))


@pytest.fixture(scope="module")
def expected(model: str) -> Answers:
    """Those of one host that nobody disturbed."""
    with LLM(model, **SETTINGS) as llm:
        return answers(llm)


@contextmanager
def engine(model: str, port: int, key: Path, hosts: int) -> Iterator[LLM]:
    """A stage a host. Once it runs, it waits a second for hosts that are away."""
    with LLM(
        model,
        **SETTINGS,
        pipeline_parallel_size=hosts,
        nnodes=hosts,
        master_port=port,
        cluster_key_file=str(key),
        max_restarts=3,
    ) as llm:
        rebuild = llm._running.recovery.rebuild
        assert isinstance(rebuild, Rebuild)
        rebuild.patience_s = 1.0
        yield llm


def ranks_here(llm: LLM) -> list[int]:
    """Their numbers, of those whose processes run on the engine's host."""
    here = {child.pid for child in psutil.Process().children()}
    processes = llm._running.processes._processes
    return [rank.number for rank in processes if not rank.node and rank.process.pid in here]


def start_again(port: int, key: Path, *arguments: str) -> Agent:
    return start(["join", f"127.0.0.1:{port}", "--cluster-key-file", str(key), *arguments])


def end_for_good(host: Agent) -> None:
    ranks = host.ranks()
    host.process.kill()
    host.process.wait()
    psutil.wait_procs(ranks, timeout=30)
    assert not any(rank.is_running() for rank in ranks)


def test_unfinished_requests_go_on_without_a_host_that_is_gone_for_good(
    model: str, expected: Answers, key: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with agents(1, port, key) as (second,), engine(model, port, key, 2) as llm:
        assert len(ranks_here(llm)) == 1
        assert answers(llm, lambda n: end_for_good(second) if n == 7 else None) == expected
        assert "did not come back within 1 s: the other hosts take over the layers" in caplog.text
        assert ranks_here(llm) == [0, 1]
        # The wait was no restart.
        assert llm._running.recovery.status.restarts == 1
        assert answers(llm) == expected


@pytest.mark.long
def test_without_the_memory_it_says_what_is_missing_and_waits_until_the_host_is_back(
    model: str,
    expected: Answers,
    key: Path,
    port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    back: list[Future[None]] = []
    with (
        agents(1, port, key) as others,
        engine(model, port, key, 2) as llm,
        ThreadPoolExecutor(1) as meanwhile,
    ):
        recovery = llm._running.recovery
        monkeypatch.setattr(llm._running.processes, "room", lambda node: 1 << 10)

        def come_back() -> None:
            try:
                wait_until(lambda: "; waiting for host 1" in caplog.text)
                assert recovery.recovering
            finally:
                # Else everybody waits for ever.
                others.append(start_again(port, key))

        def go_away(rounds: int) -> None:
            if rounds == 7:
                end_for_good(others[0])
                back.append(meanwhile.submit(come_back))

        assert answers(llm, go_away) == expected
        back[0].result()
        missing = next(line for line in caplog.messages if "; waiting for host 1" in line)
        assert "has 9.54e-07 GiB free and needs" in missing
        assert "\n" not in missing
        assert len(ranks_here(llm)) == 1
        assert len(others[1].ranks()) == 1
        assert recovery.status.restarts == 1


@pytest.mark.long
def test_a_host_that_was_done_without_runs_stages_again_from_the_next_restart_on(
    model: str, expected: Answers, key: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with (
        agents(1, port, key, ["--interface", "127.0.0.2"]) as (second,),
        agents(1, port, key, ["--interface", "127.0.0.3"]) as others,
        engine(model, port, key, 3) as llm,
    ):
        assert answers(llm, lambda n: end_for_good(others[0]) if n == 7 else None) == expected
        assert len(second.ranks()) + len(ranks_here(llm)) == 3
        others.append(start_again(port, key, "--interface", "127.0.0.3"))
        wait_until(lambda: "it runs stages from the next restart on" in caplog.text)
        assert answers(llm, lambda n: second.ranks()[0].kill() if n == 7 else None) == expected
        assert [len(host.ranks()) for host in (second, others[1])] == [1, 1]
        assert len(ranks_here(llm)) == 1
        assert llm._running.recovery.status.restarts == 2
