"""The limit of open files: raised, told if it is too low, and lived with."""

import json
import logging
import resource
import socket

import pytest

from command import Command, wait_until
from serving.running_server import running_server

MODEL = ("--model", "synthetic:1+0", "--kv-cache-memory", "16MiB")
LIMIT = 72


def limited(kind: str, limit: int) -> list[str]:
    """kind: -n for both limits, -Sn for the soft one."""
    return ["bash", "-c", f'ulimit {kind} {limit}; exec "$@"', "bash"]


@pytest.mark.parametrize("limit", [12, 20, 63])
def test_too_few_open_files_to_start_are_one_line(limit: int) -> None:
    command = ["serve", "--port", "0", *MODEL]
    finished = Command(command, prefix=limited("-n", limit)).finish()
    assert finished.code == 1
    (line,) = finished.err.splitlines()
    assert line.startswith(f"headrace: the limit of open files is {limit}")
    assert "ulimit -n" in line


def test_the_soft_limit_is_raised_for_the_server_and_its_stages() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running_server(*MODEL, prefix=limited("-Sn", LIMIT)) as server:
        for process in (server.command.process.pid, *server.command.stages()):
            soft, _ = resource.prlimit(process, resource.RLIMIT_NOFILE)
            assert soft == (65_535 if hard == resource.RLIM_INFINITY else min(hard, 65_535))


def test_a_server_with_too_many_connections_refuses_more_says_so_once_and_recovers() -> None:
    with running_server(*MODEL, prefix=limited("-n", LIMIT)) as server:
        host, port = server.url.removeprefix("http://").split(":")

        def connect() -> socket.socket:
            return socket.create_connection((host, int(port)), timeout=60.0)

        def answer(connection: socket.socket) -> bytes:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}") and (data := connection.recv(1 << 16)):
                received += data
            return received

        held = []
        answers: list[bytes] = []
        while not answers or answers[-1].startswith(b"HTTP/1.1 200"):
            held.append(connect())
            answers.append(answer(held[-1]))
        assert answers[-1].startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answers[-1]
        error = json.loads(answers[-1].partition(b"\r\n\r\n")[2])["error"]
        assert error["message"].startswith(f"there are {len(held) - 1} connections already")
        # Far more than there are files for; some of them are told, and nobody in the log.
        more = [connect() for _ in range(3 * LIMIT)]
        assert answer(held[0]).startswith(b"HTTP/1.1 200")
        for connection in (*held, *more):
            connection.close()

        def recovered() -> bool:
            with connect() as connection:
                try:
                    return answer(connection).startswith(b"HTTP/1.1 200")
                except ConnectionError:
                    return False

        wait_until(recovered)
    told = [line for line in server.log if "open files" in line]
    assert len(told) == 1
    assert logging.getLevelName(logging.WARNING) in told[0]
