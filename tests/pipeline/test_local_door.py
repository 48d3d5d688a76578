"""Links within a host, as a stranger would try them; see link_scenarios.py for what peers get."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from headrace.errors import StartError
from headrace.host.engine_folder import EngineFolder
from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import End, LinkError
from headrace.pipeline.local_door import LocalDoor, knock
from headrace.protocol.ranks import Ranks

EDGE = Channel(Tensors.ACTIVATIONS, 0, 1)
INSIDE, OUTSIDE = End(EDGE, True, Ranks(2)), End(EDGE, False, Ranks(2))
# Seconds. Ample: only a hang takes so long; and what cannot succeed.
LONG, SHORT = 30.0, 0.3
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


@pytest.fixture
def door(folder: Path) -> Iterator[LocalDoor]:
    door = LocalDoor(INSIDE, folder)
    yield door
    door.close()


def stranger(door: LocalDoor) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.connect(door.address)
    connected.settimeout(LONG)
    return connected


def is_shut_out(connected: socket.socket) -> bool:
    with connected, suppress(ConnectionResetError):
        return connected.recv(100) == b""
    return True


def peers_meet(door: LocalDoor) -> bool:
    """Whether the two ends get to each other, and nobody can come after them."""
    with knock(OUTSIDE, door.address, door.token, LONG) as sends, door.wait_for_peer(LONG) as takes:
        sends.send(b"message")
        return takes.recv(100) == b"message" and not os.path.exists(door.address)


@pytest.mark.parametrize(
    "said", [b"junk", secrets.token_hex(16).encode(), b"\0" * 100_000], ids=["junk", "key", "large"]
)
def test_who_shows_no_token_is_shut_out_and_the_peer_comes_in(door: LocalDoor, said: bytes) -> None:
    junk = stranger(door)
    junk.send(said)
    assert is_shut_out(junk)
    assert peers_meet(door)


def test_who_says_nothing_keeps_nobody_from_coming_in(door: LocalDoor) -> None:
    silent = [stranger(door) for _ in range(8)]
    assert peers_meet(door)
    assert all(is_shut_out(connected) for connected in silent)


def test_who_says_it_slowly_is_shut_out(door: LocalDoor) -> None:
    slow = stranger(door)
    # A packet is a token or it is none.
    slow.send(door.token[:1].encode())
    assert is_shut_out(slow)
    assert peers_meet(door)


def test_a_flood_of_connections_neither_keeps_the_peer_out_nor_leaves_descriptors(
    door: LocalDoor,
) -> None:
    before = psutil.Process().num_fds()
    flood: list[socket.socket] = []

    def connect_all() -> None:
        with suppress(OSError):
            flood.extend(stranger(door) for _ in range(600))

    flooding = threading.Thread(target=connect_all)
    flooding.start()
    assert peers_meet(door)
    flooding.join()
    for connected in flood:
        connected.close()
    # The listening socket is gone too.
    assert psutil.Process().num_fds() < before


def test_a_flood_that_stays_connected_is_let_go_of(door: LocalDoor) -> None:
    flood = [stranger(door) for _ in range(600)]
    assert sum(is_shut_out(connected) for connected in flood[:500]) == 500
    assert peers_meet(door)
    for connected in flood[500:]:
        connected.close()


def test_nobody_comes_in_after_the_peer(door: LocalDoor) -> None:
    assert peers_meet(door)
    with pytest.raises(LinkError, match="sending activations to stage 1: it does not listen at"):
        knock(OUTSIDE, door.address, door.token, LONG)


def test_a_rank_without_the_token_is_told_whom_it_did_not_reach(door: LocalDoor) -> None:
    with pytest.raises(StartError, match="sending activations to stage 1: it did not let this"):
        knock(OUTSIDE, door.address, "none", SHORT)


def test_a_peer_that_does_not_come_is_named(door: LocalDoor) -> None:
    with pytest.raises(StartError, match=r"stage 0 did not connect to .* within 0.3 s"):
        door.wait_for_peer(SHORT)


class Over(Exception):
    """What is waited for is not wanted any more."""


def over() -> None:
    raise Over


def test_a_wait_that_is_over_ends_at_once_on_both_sides(door: LocalDoor) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(Over):
        door.wait_for_peer(LONG, over)
    # Nobody asks who is there, as in a process that was stopped.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as frozen:
        frozen.bind(f"{door.address}-frozen")
        frozen.listen()
        with pytest.raises(Over):
            knock(OUTSIDE, f"{door.address}-frozen", door.token, LONG, over)
    with pytest.raises(Over):
        knock(OUTSIDE, door.address, "none", LONG, over)
    assert psutil.Process().num_fds() == before


def test_a_rank_takes_the_place_of_one_that_died(folder: Path) -> None:
    died, anew = LocalDoor(INSIDE, folder), LocalDoor(INSIDE, folder)
    assert peers_meet(anew)
    died.close()


def as_nobody(code: str, *arguments: str) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can take another user's place")
    asked = subprocess.run(
        [sys.executable, "-c", f"import os, socket, sys\nos.setuid({NOBODY})\n{code}", *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    return (asked.stdout + asked.stderr).strip()


KNOCK = """
knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    knocking.connect(sys.argv[1])
    knocking.send(sys.argv[2].encode())
    print("shut out" if knocking.recv(100) == b"" else "let in")
except OSError as error:
    print(type(error).__name__)
"""


def test_another_user_cannot_even_reach_the_socket() -> None:
    folder = EngineFolder()
    door = LocalDoor(INSIDE, folder.path)
    try:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert as_nobody(KNOCK, door.address, door.token) == "PermissionError"
    finally:
        door.close()
        folder.remove()


def test_another_user_is_shut_out_even_with_the_token(folder: Path, door: LocalDoor) -> None:
    folder.chmod(0o777)
    os.chmod(door.address, 0o777)
    assert as_nobody(KNOCK, door.address, door.token) in ("shut out", "ConnectionResetError")
    assert peers_meet(door)


def test_a_folder_that_can_have_no_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="set TMPDIR to a short path"):
        LocalDoor(INSIDE, tmp_path / ("x" * 120))
