"""Signals at the moments that are worst for them, each of which is brought about."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from command import Command, Finished
from fake_server import fake_server
from headrace.host.cluster_key import write_cluster_key

# Runs headrace; a signal comes before or after a library's function does its work, at one of
# its calls.
INTERRUPTED = """
import signal, sys
from {module} import {owner}
from headrace.__main__ import main

function = {owner}.{name}
calls = 0

def interrupted(*arguments, **named):
    global calls
    calls += 1
    if (calls, "before") == ({call}, "{when}"):
        signal.raise_signal({number})
    result = function(*arguments, **named)
    if (calls, "after") == ({call}, "{when}"):
        signal.raise_signal({number})
    return result

{owner}.{name} = interrupted
sys.exit(main())
"""
# What comes from a server is taken in there, and all that goes wrong meanwhile is its fault.
TAKEN_IN = "aiohttp.streams", "StreamReader", "feed_data", "before"
# A socket is open by then, but its context does not know it yet, or not any more.
OPENED = "zmq", "Context", "_add_socket", "before"
CLOSING = "zmq", "Context", "_rm_socket", "after"
SLEEPING = ["generate", "--model", "synthetic:20+1", "--prompt", "w1", "-pp", "2", "--ignore-eos"]


def interrupted(
    function: tuple[str, str, str, str],
    call: int,
    arguments: list[str],
    number: signal.Signals = signal.SIGINT,
    stdin: bytes = b"",
    environment: dict[str, str] | None = None,
) -> Finished:
    module, owner, name, when = function
    script = INTERRUPTED.format(
        module=module, owner=owner, name=name, when=when, call=call, number=int(number)
    )
    with Command(arguments, stdin, environment or {}, program=["-c", script]) as command:
        return command.finish()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--max-tokens", "1000000", "--url"],
        [
            *("bench", "serve", "--num-prompts", "9", "--random-input-len", "5"),
            *("--random-output-len", "1000", "--base-url"),
        ],
    ],
    ids=["chat", "bench"],
)
def test_a_signal_is_never_taken_for_a_broken_connection(
    arguments: list[str], call: int, number: signal.Signals
) -> None:
    with fake_server() as server:
        finished = interrupted(TAKEN_IN, call, [*arguments, server.url], number, b"count\n")
    assert finished.code == 128 + number
    assert "headrace:" not in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_signal_while_a_stage_is_given_its_sockets_ends_everything(call: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        finished = interrupted(
            OPENED, call, [*SLEEPING, "--max-tokens", "2000"], environment={"TMPDIR": folder}
        )
        assert os.listdir(folder) == []
    assert (finished.code, finished.left) == (130, [])
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("call", [1, 4])
def test_a_signal_while_the_sockets_are_closed_ends_everything(call: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        finished = interrupted(
            CLOSING, call, [*SLEEPING, "--max-tokens", "2"], environment={"TMPDIR": folder}
        )
        assert os.listdir(folder) == []
    assert (finished.code, finished.left) == (130, [])
    assert "Traceback" not in finished.err


def test_a_signal_while_a_host_opens_its_socket_ends_it(tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_cluster_key(key)
    finished = interrupted(OPENED, 1, ["join", "127.0.0.1:1", "--cluster-key-file", str(key)])
    assert (finished.code, finished.left) == (130, [])
    assert "Traceback" not in finished.err
