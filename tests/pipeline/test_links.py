"""What stages may rely on from a backend; each rank is a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import StartError
from headrace.pipeline.launch import bind_master
from headrace.pipeline.links import edges

WORKER = Path(__file__).with_name("link_worker.py")
DEADLINE_S = 2.0


def run_ranks(scenario: str, world: int) -> list[dict[str, Any]]:
    """What each rank printed; an empty dict for one that printed nothing."""
    with bind_master("127.0.0.1", 0) as master:
        port, fd = master.getsockname()[1], master.fileno()
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(WORKER), scenario, str(rank), str(world), str(port),
                 str(fd if rank == 0 else -1)],
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=[fd] if rank == 0 else [],
            )
            for rank in range(world)
        ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(output) if output else {} for output in outputs]


@pytest.mark.parametrize("world", [2, 4])
def test_every_edge_carries_its_tensors_in_order_whatever_the_others_do(world: int) -> None:
    seen = run_ranks("exchange", world)
    assert [rank["right"] for rank in seen] == [True] * world
    # Store and links alike.
    assert {address for rank in seen for address in rank["listening"]} <= {"127.0.0.1", "::1"}


def test_a_peer_that_never_sends_is_an_error_within_the_deadline() -> None:
    seen = run_ranks("silent", 2)[1]
    assert "waiting for activations from stage 0: nothing came within 2 s" in seen["error"]
    assert DEADLINE_S * 0.9 <= seen["seconds"] < DEADLINE_S + 3


def test_a_peer_that_dies_is_an_error_before_the_deadline() -> None:
    seen = run_ranks("dying", 2)[1]
    assert "waiting for activations from stage 0" in seen["error"]
    assert seen["seconds"] < DEADLINE_S


def test_a_transfer_started_after_the_peer_died_is_the_same_error() -> None:
    errors = run_ranks("late", 2)[1]["errors"]
    assert [peer for peer, _ in errors] == [0, 0]
    assert all("the link is gone" in text for _, text in errors)


def test_edges_are_one_per_neighbour_and_one_for_feedback() -> None:
    assert edges(1) == []
    assert [(e.source, e.target) for e in edges(2)] == [(0, 1), (1, 0)]
    assert [(e.source, e.target) for e in edges(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_a_port_in_use_is_named() -> None:
    with bind_master("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port} .*--master-port"):
            bind_master("127.0.0.1", port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1:0"):
        bind_master("192.0.2.1", 0)
