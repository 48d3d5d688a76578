"""One suite that every backend of the links must pass; see link_scenarios.py for the promises.

Worlds of real processes are run once each, all their scenarios together, and the tests look at what
came of it. Backends without a device here are skipped.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import SlowLine, edges
from headrace.protocol.messages import LinkEmulation
from headrace.protocol.ranks import Ranks
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork, VirtualTransfer
from pipeline.link_scenarios import DEADLY, PROMISES, SLOW_LINE
from pipeline.virtual_ranks import run_virtual_world

TESTS = Path(__file__).parents[1]
SLOW = LinkEmulation(latency_s=0.06, bytes_per_s=1e8)
LINES = {"fast": LinkEmulation(), "slow": SLOW}
EMULATIONS = {
    "local": None, "slow_local": SLOW, "curve": None, "slow_curve": SLOW, "plain": None,
    "gloo": None, "slow_gloo": SLOW, "nccl": None, "xccl": None,
}  # fmt: skip
BACKENDS = list(EMULATIONS)


class Worlds:
    """Runs scenarios on worlds of processes, each world once."""

    def __init__(self) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "pipeline.link_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
            },
            text=True,
        )
        self.run = functools.cache(self._run)

    def _run(
        self, backend: str, world: int, scenarios: tuple[str, ...]
    ) -> list[dict[str, Any] | None]:
        emulation = EMULATIONS[backend]
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        request = {
            "backend": backend.removeprefix("slow_"),
            "world": world,
            "scenarios": scenarios,
            "emulation": emulation and [emulation.latency_s, emulation.bytes_per_s],
        }
        print(json.dumps(request), file=self._worker.stdin, flush=True)
        answer: list[dict[str, Any] | None] = json.loads(self._worker.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait(30)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def need_device(backend: str) -> None:
    kind = {"nccl": "cuda", "xccl": "xpu"}.get(backend)
    if kind is not None and not getattr(torch, kind).device_count():
        pytest.skip(f"torch sees no {kind} device here")


def scenarios_of(backend: str) -> tuple[str, ...]:
    """What is run in one world, in order."""
    slow = SLOW_LINE if EMULATIONS[backend] else {}
    # A device is asked again and again.
    idle = ["waiting_costs_no_cpu"] if backend not in ("nccl", "xccl") else []
    return (*PROMISES, *slow, *idle)


def check(answers: list[dict[str, Any] | None], scenario: str, may_be_dead: bool = False) -> None:
    """Every rank came through the scenario; else shows what each has to say."""
    wrong = []
    for rank, answer in enumerate(answers):
        if answer is None:
            wrong += [] if may_be_dead and rank == 0 else [f"rank {rank} said nothing"]
        elif answer["outcomes"].get(scenario, "") is not None:
            texts = [text for text in answer["outcomes"].values() if text]
            wrong.append(f"rank {rank}: {' '.join(texts) or 'an earlier scenario failed'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("backend", "scenario"), [(b, name) for b in BACKENDS for name in scenarios_of(b)]
)
def test_a_backend_keeps_the_promise(
    worlds: Worlds, backend: str, scenario: str, world: int
) -> None:
    need_device(backend)
    check(worlds.run(backend, world, scenarios_of(backend)), scenario)


@pytest.mark.parametrize("scenario", DEADLY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_never_hangs(worlds: Worlds, backend: str, scenario: str) -> None:
    need_device(backend)
    if scenario in OWN_LINKS_ALONE and "local" not in backend:
        pytest.skip("torch's gloo waits for ever for the rest of a message whose sender has died")
    check(
        worlds.run(backend, 2, (scenario,)),
        scenario,
        may_be_dead="dies" in scenario or "dying" in scenario,
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("line", "scenario"),
    [*(("fast", name) for name in PROMISES), *(("slow", n) for n in [*PROMISES, *SLOW_LINE])],
)
def test_virtual_links_keep_the_promise(line: str, scenario: str, world: int) -> None:
    run_virtual_world(scenario, world, LINES[line])


@pytest.mark.parametrize("line", ["fast", "slow"])
@pytest.mark.parametrize("scenario", DEADLY)
def test_virtual_links_never_hang(scenario: str, line: str) -> None:
    run_virtual_world(scenario, 2, LINES[line])


def test_nothing_listens_beyond_loopback(worlds: Worlds) -> None:
    answers = worlds.run("gloo", 4, scenarios_of("gloo"))
    addresses = {address for answer in answers if answer for address in answer["listening"]}
    # Store and links alike.
    assert addresses
    assert addresses <= {"127.0.0.1", "::1"}


def test_links_within_a_host_listen_on_no_network_at_all(worlds: Worlds) -> None:
    answers = worlds.run("local", 4, scenarios_of("local"))
    assert [answer and answer["listening"] for answer in answers] == [[]] * 4


# What torch.distributed does not keep: there the engine, which sees the death, ends the wait.
OWN_LINKS_ALONE = {"a_peer_that_dies_in_the_middle_leaves_whole_messages_or_an_error"}
# The activations of 32 rows of SmolLM2.
ROWS_32 = 32 * 576 * 2


def test_a_slow_line_takes_the_latency_once_ahead_and_twice_at_the_moment() -> None:
    line = SlowLine(LinkEmulation(latency_s=0.05))
    assert line.arrival(posted_at=1.0, here_at=2.0, size=ROWS_32) == pytest.approx(2.05)
    assert line.arrival(posted_at=3.0, here_at=3.0, size=ROWS_32) == pytest.approx(3.10)


def test_bytes_take_their_time_one_message_after_the_other() -> None:
    line = SlowLine(LinkEmulation(latency_s=0.05, bytes_per_s=ROWS_32 / 0.01))
    arrivals = [line.arrival(posted_at=0.0, here_at=1.0, size=ROWS_32) for _ in range(3)]
    assert arrivals == pytest.approx([1.06, 1.07, 1.08])


moments = st.lists(st.floats(0, 10), min_size=1, max_size=8).map(sorted)


@given(data=st.data(), posted=moments, latency=st.floats(0, 2), seconds=st.floats(0, 1))
def test_a_slow_line_and_a_virtual_link_agree(
    data: st.DataObject, posted: list[float], latency: float, seconds: float
) -> None:
    sent = data.draw(st.lists(st.floats(0, 10), min_size=len(posted), max_size=len(posted)))
    sent.sort()
    per_s = None if seconds == 0 else 8 / seconds
    line = SlowLine(LinkEmulation(latency, per_s))
    clock = VirtualClock()
    network = VirtualNetwork(clock, Ranks(2), lambda channel: latency, per_s)
    edge = Channel(Tensors.ACTIVATIONS, 0, 1)
    receives: list[VirtualTransfer] = []

    def post() -> None:
        receives.append(network.links(1)[edge].receive(torch.zeros(1, dtype=torch.int64)))

    def send() -> None:
        network.links(0)[edge].send(torch.ones(1, dtype=torch.int64))

    for posted_at, sent_at in zip(posted, sent, strict=True):
        clock.schedule_at(posted_at, post)
        clock.schedule_at(sent_at, send)
    while clock.run_next():
        pass
    expected = [
        line.arrival(posted_at, max(posted_at, sent_at), 8)
        for posted_at, sent_at in zip(posted, sent, strict=True)
    ]
    assert [receive.at for receive in receives] == pytest.approx(expected)


def test_edges_are_one_per_neighbour_and_one_for_feedback() -> None:
    assert edges(Ranks(1)) == []
    assert [(e.source, e.target) for e in edges(Ranks(2))] == [(0, 1), (1, 0)]
    assert [(e.source, e.target) for e in edges(Ranks(4))] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    # Stages are ranks 0 and 1, 2 and 3, 4 and 5; the first shard of the last samples.
    two_shards = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (4, 1)]
    assert [(e.source, e.target) for e in edges(Ranks(3, 2))] == two_shards
    assert [(e.source, e.target) for e in edges(Ranks(1, 3))] == [(0, 1), (0, 2)]
