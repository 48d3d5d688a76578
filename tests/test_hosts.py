"""Several hosts, here all on loopback: the tokens of one host, and no stranger let in."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from command import wait_until
from forks import in_fork
from headrace import LLM, AsyncLLM, SamplingParams
from headrace.errors import StartError, UsageError
from headrace.host.cluster_key import write_cluster_key
from headrace.pipeline.hosts_thread import HostsThread
from headrace.protocol.messages import Loading
from joined_hosts import Agent, agents, start
from pipeline.test_curve import junk
from tiny_checkpoints import write_tiny_gguf

PROMPTS: list[Any] = [{"prompt_token_ids": [n + 1, *range(n, 2 * n + 3)]} for n in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    """The tokens of one host and one stage."""
    with LLM(model, dtype="float32") as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS)]


def engine(model: str, port: int, key: Path, hosts: int, **settings: Any) -> LLM:
    return LLM(
        model,
        dtype="float32",
        pipeline_parallel_size=settings.pop("stages", hosts),
        nnodes=hosts,
        master_port=port,
        cluster_key_file=str(key),
        **settings,
    )


@pytest.mark.parametrize(
    ("hosts", "stages", "insecure"), [(2, 2, False), (2, 3, True), (3, 3, False)]
)
def test_hosts_give_the_tokens_of_one(
    model: str, alone: list[list[int]], key: Path, port: int,
    hosts: int, stages: int, insecure: bool,
) -> None:  # fmt: skip
    with agents(hosts - 1, port, key) as others:
        with engine(model, port, key, hosts, stages=stages, insecure_links=insecure) as llm:
            assert tokens(llm) == alone
            assert len(llm.timelines()) == stages
        # They end with the engine, in order.
        assert [agent.end() for agent in others] == [0] * (hosts - 1)
        assert all(agent.lines[-1] == "ended in order" for agent in others), others


def test_lines_between_hosts_are_measured_and_shown(
    model: str, key: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with agents(2, port, key), engine(model, port, key, 3):
        pass
    table = [row.split("│") for row in capfd.readouterr().err.splitlines() if row[:1] == "│"]
    assert len(table) == 3
    assert all(re.fullmatch(r"[\d.e-]+ ms, [\d.]+ Gb/s", row[-2].strip()) for row in table), table


def test_a_rank_and_a_host_that_die_lose_nothing(
    model: str, alone: list[list[int]], key: Path, port: int
) -> None:
    with agents(1, port, key) as others, engine(model, port, key, 2) as llm:
        (agent,) = others
        assert tokens(llm) == alone
        agent.ranks()[0].kill()
        assert tokens(llm) == alone
        agent.process.kill()
        agent.process.wait()
        others.append(start(["join", f"127.0.0.1:{port}", "--cluster-key-file", str(key)]))
        assert tokens(llm) == alone


def listening_on_networks(processes: list[psutil.Process]) -> list[str]:
    """Addresses, as tcp://HOST:PORT."""
    connections = []
    for process in processes:
        with suppress(psutil.Error):
            connections += process.net_connections("inet")
    return [
        f"tcp://{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN
    ]


def answers(address: str) -> bool:
    host, _, number = address.removeprefix("tcp://").partition(":")
    try:
        socket.create_connection((host, int(number)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def strangers(port: int) -> Iterator[threading.Event]:
    """Connect with junk, again and again, to the engine's host, and to whatever else of these
    processes listens, from before there is anything until the test is over."""
    over, connections = threading.Event(), []
    # Servers of other tests in this process.
    earlier = set(listening_on_networks(_descendants()))

    def bother() -> None:
        while not over.is_set():
            found = set(listening_on_networks(_descendants())) - earlier
            for address in {f"tcp://127.0.0.1:{port}", *found}:
                connections.extend(junk(address, 5))
            while len(connections) > 600:
                connections.pop(0).close()
            time.sleep(0.05)

    thread = threading.Thread(target=bother, daemon=True)
    thread.start()
    yield over
    over.set()
    thread.join()
    for connection in connections:
        connection.close()


def _descendants() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def test_strangers_at_every_socket_neither_get_in_nor_harm_anybody(
    model: str, alone: list[list[int]], key: Path, port: int, strangers: threading.Event
) -> None:
    # Servers of other tests in this process.
    earlier = listening_on_networks(_descendants())
    with agents(1, port, key) as others:
        with engine(model, port, key, 2, max_restarts=0) as llm:
            for _ in range(3):
                assert tokens(llm) == alone
            # Ranks have met, and let nobody in any more; the engine's host waits for hosts that
            # come again.
            everybody = set(listening_on_networks(_descendants())) - set(earlier)
            assert [address for address in everybody if answers(address)] == [
                f"tcp://127.0.0.1:{port}"
            ]
        assert others[0].end() == 0


class Gone(Exception):
    """A host has ended by itself."""


def wait_for_others_until_gone(agent: Agent, model: str, port: int, key: Path) -> None:
    """Be the engine's host of two until this other one has ended. Raises Gone if nobody joined."""

    def check() -> None:
        if agent.process.poll() is not None:
            raise Gone

    AsyncLLM(
        model,
        check=check,
        pipeline_parallel_size=2,
        nnodes=2,
        master_port=port,
        cluster_key_file=str(key),
    ).close()


def test_a_host_that_does_not_come_is_named(model: str, key: Path, port: int) -> None:
    told = f"no host with --node-rank 1 of 2 hosts (--nnodes) joined at 127.0.0.1:{port}"
    with pytest.raises(StartError, match=re.escape(told)):
        engine(model, port, key, 2, join_timeout=0.1)


def test_a_host_with_another_key_is_not_let_in(model: str, tmp_path: Path, port: int) -> None:
    for name in "ab":
        write_cluster_key(tmp_path / name)
    with agents(1, port, tmp_path / "b", ["--join-timeout", "1"]) as (stranger,):
        with pytest.raises(Gone):
            wait_for_others_until_gone(stranger, model, port, tmp_path / "a")
        assert stranger.end() == 1
    assert f"no engine's host let this one in at 127.0.0.1:{port}" in stranger.lines[-1]


def wrong_host(model: str, port: int, key: Path, *arguments: str) -> Agent:
    """One that serves the same model, but for these flags."""
    return start(
        [
            *("serve", model, "--master-port", str(port), "--cluster-key-file", str(key)),
            *arguments,
        ]
    )


def test_another_layout_is_refused_naming_both_sides(model: str, key: Path, port: int) -> None:
    agent = wrong_host(model, port, key, "--nnodes", "2", "--node-rank", "1", "-pp", "3")
    with pytest.raises(Gone):
        wait_for_others_until_gone(agent, model, port, key)
    assert agent.end() == 1
    assert (
        "--pipeline-parallel-size 3, the engine's host --pipeline-parallel-size 2"
        in (agent.lines[-1])
    )


def test_other_weights_are_refused_naming_both_sides(
    model: str, key: Path, port: int, tmp_path: Path
) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=7)
    with agents(1, port, key, ["--model", str(other)]) as (agent,):
        with pytest.raises(StartError, match=r"have different weights .*: tensor .* differs"):
            engine(model, port, key, 2)
        assert agent.end() == 1
        assert "have different weights" in agent.lines[-1]


def test_hosts_need_a_key_and_as_many_stages(model: str, key: Path) -> None:
    with pytest.raises(UsageError, match="--nnodes 2 needs --cluster-key-file"):
        LLM(model, nnodes=2, pipeline_parallel_size=2)
    with pytest.raises(UsageError, match="--nnodes 3 needs as many stages, or shards"):
        LLM(model, nnodes=3, pipeline_parallel_size=2, cluster_key_file=str(key))
    with pytest.raises(UsageError, match="--node-rank 2 must be less than --nnodes 2"):
        LLM(model, nnodes=2, node_rank=2, pipeline_parallel_size=2, cluster_key_file=str(key))
    with pytest.raises(UsageError, match="an engine runs on host 0"):
        LLM(model, nnodes=2, node_rank=1, pipeline_parallel_size=2, cluster_key_file=str(key))


class Planted(Exception):
    """Of a kind that nobody expects."""


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the engine's thread that has the other hosts fails as soon as one of them
    says anything; once each time."""
    due = threading.Event()
    take = HostsThread._take_from_agents

    def take_or_fail(self: HostsThread) -> None:
        if due.is_set():
            due.clear()
            raise Planted("in the thread")
        take(self)

    monkeypatch.setattr(HostsThread, "_take_from_agents", take_or_fail)
    return due


@pytest.mark.long
def test_an_error_in_the_thread_that_has_the_hosts_is_recovered_from_as_if_they_had_gone(
    model: str, alone: list[list[int]], key: Path, port: int, breaks: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with agents(1, port, key) as (agent,):
        with engine(model, port, key, 2) as llm:
            assert tokens(llm) == alone
            breaks.set()
            assert tokens(llm) == alone
            assert llm._running.recovery.status.restarts == 1
        cause = "internal error in the connection to other hosts: Planted: in the thread"
        assert any(line.startswith("stage ") and cause in line for line in caplog.messages)
        assert agent.end() == 0


def test_an_error_in_the_thread_that_has_the_hosts_ends_a_start_before_they_are_there(
    model: str, key: Path, port: int, breaks: threading.Event
) -> None:
    breaks.set()
    with agents(1, port, key), pytest.raises(StartError, match="Planted: in the thread"):
        engine(model, port, key, 2)


@pytest.mark.long
def test_a_fork_of_the_engine_holds_no_socket_by_which_hosts_tell_that_it_lives(
    model: str, key: Path, port: int
) -> None:
    def look() -> None:
        held = psutil.Process().net_connections("inet")
        assert [c for c in held if c.laddr.port == port] == []

    with agents(1, port, key) as (agent,):
        with engine(model, port, key, 2) as llm:
            assert in_fork(look) == "nothing"
            # Nor does it close any of the engine's own.
            llm.generate(PROMPTS[:1], PARAMS)
        assert agent.end() == 0


@pytest.mark.long
def test_a_rank_on_another_host_that_is_killed_while_it_starts_is_started_anew(
    model: str, alone: list[list[int]], key: Path, port: int
) -> None:
    with agents(1, port, key) as (agent,):
        killed: list[psutil.Process] = []

        def kill(message: Loading) -> None:
            if not killed and (there := agent.ranks()):
                killed.append(there[0])
                there[0].kill()

        with engine(model, port, key, 2, on_progress=kill) as llm:
            assert tokens(llm) == alone
            assert llm._running.recovery.status.restarts == len(killed)


@pytest.mark.long
def test_a_killed_engine_leaves_its_hosts_waiting_and_their_ranks_ended(
    model: str, key: Path, port: int
) -> None:
    server = start(
        [
            *("serve", model, "--port", "0", "-pp", "2", "--nnodes", "2"),
            *("--master-port", str(port), "--cluster-key-file", str(key)),
        ]
    )
    try:
        with agents(1, port, key) as (agent,):
            wait_until(lambda: any(line.startswith("ready ") for line in server.lines))
            ranks = agent.ranks()
            assert len(ranks) == 1
            os.kill(server.process.pid, 9)
            ranks[0].wait(30)
            wait_until(lambda: any("the engine's host is gone" in line for line in agent.lines))
            assert agent.process.poll() is None
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.long
def test_a_rank_that_is_stopped_ends_with_its_host_and_with_the_engine(
    model: str, key: Path, port: int
) -> None:
    with agents(2, port, key) as (killed, other):
        with engine(model, port, key, 3):
            stopped = [*killed.ranks(), *other.ranks()]
            for rank in stopped:
                rank.suspend()
            killed.process.kill()
            stopped[0].wait(30)
        assert other.end() == 0
        assert not stopped[1].is_running()


def test_a_key_is_made_by_a_command(tmp_path: Path) -> None:
    command = ["-m", "headrace", "key", str(tmp_path / "key")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0
    assert "copy it to every host" in done.stdout
    again = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists" in again.stderr
