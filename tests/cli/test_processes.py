"""Processes, sockets and signals: nothing is left behind, nothing listens to strangers."""

import fcntl
import os
import signal
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from command import Command, Finished, wait_until

LONG = ["generate", "--temperature", "0", "--ignore-eos"]
SMOLLM2 = [
    "--model", "smollm2", "--prompt", "Tell me a long story.", "--max-tokens", "4000",
    "--max-model-len", "8192",
]  # fmt: skip
# Where it does not matter what the stages compute: they load nothing.
SLEEPING = ["--model", "synthetic:20+1", "--prompt", "w1", "--max-tokens", "2000"]


def start(stages: int, folder: Path, model: list[str] = SMOLLM2, *prefix: str) -> Command:
    arguments = [*LONG, *model, "-pp", str(stages)]
    return Command(arguments, environment={"TMPDIR": str(folder)}, prefix=list(prefix))


def wait_for_text(command: Command) -> None:
    """Until the first text streams: every stage is at work."""
    assert command.process.stdout is not None
    assert command.process.stdout.read(1)


@pytest.fixture
def short_tmp() -> "tempfile.TemporaryDirectory[str]":
    """Socket paths are limited to a hundred characters, which pytest's folders nearly take."""
    return tempfile.TemporaryDirectory(prefix="hr-")


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("loading", signal.SIGINT),
        ("loading", signal.SIGHUP),
        ("generating", signal.SIGTERM),
        ("generating", signal.SIGHUP),
    ],
)
def test_a_signal_ends_everything(
    short_tmp: "tempfile.TemporaryDirectory[str]", moment: str, number: signal.Signals
) -> None:
    with short_tmp as folder, start(2, Path(folder)) as command:
        if moment == "loading":
            wait_until(lambda: len(command.stages()) == 2)
            time.sleep(0.5)
        else:
            wait_for_text(command)
        command.process.send_signal(number)
        wait_until(lambda: command.processes() == [])
        finished = command.finish()
        assert finished.code == 128 + number
        assert "Traceback" not in finished.err
        assert os.listdir(folder) == []


@pytest.mark.parametrize("pause_s", [0.003, 0.1])
def test_a_second_signal_neither_hangs_nor_leaves_anything(
    short_tmp: "tempfile.TemporaryDirectory[str]", pause_s: float
) -> None:
    with short_tmp as folder, start(2, Path(folder)) as command:
        wait_until(lambda: len(command.stages()) == 2)
        command.process.send_signal(signal.SIGINT)
        time.sleep(pause_s)
        command.process.send_signal(signal.SIGINT)
        wait_until(lambda: command.processes() == [])
        assert command.finish().code == 130
        assert os.listdir(folder) == []


# Stands in for a module that the command imports, and says when it does.
IMPORTED = """
import sys, time
print("importing", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_command_is_still_imported_ends_it_without_a_word(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "typer.py").write_text(IMPORTED, encoding="utf-8")
    with Command(["serve"], environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.process.stdout is not None
        assert command.process.stdout.readline() == b"importing\n"
        command.process.send_signal(number)
        command.process.send_signal(number)
        finished = command.finish()
    assert (finished.code, finished.err) == (128 + number, "")


def test_a_signal_while_the_prompt_is_read_ends_the_command_without_a_word(tmp_path: Path) -> None:
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    writers: list[int] = []

    def is_opened() -> bool:
        # Only then it can be opened for writing.
        with suppress(OSError):
            writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    def waits_for_more() -> bool:
        unread = bytearray(4)
        fcntl.ioctl(writers[0], termios.FIONREAD, unread)
        status: str = psutil.Process(command.process.pid).status()
        return not any(unread) and status == psutil.STATUS_SLEEPING

    with Command([*LONG, *SLEEPING[:2], "--prompt-file", str(fifo)]) as command:
        wait_until(is_opened)
        os.write(writers[0], b"a")
        # Python hears of a signal that comes just before a read only after the read.
        wait_until(waits_for_more)
        command.process.send_signal(signal.SIGHUP)
        finished = command.finish()
    os.close(writers[0])
    assert (finished.code, finished.err) == (128 + signal.SIGHUP, "")


def test_a_hangup_that_nohup_had_ignored_is_ignored(
    short_tmp: "tempfile.TemporaryDirectory[str]",
) -> None:
    few = [*SLEEPING[:-1], "100"]
    with short_tmp as folder, start(1, Path(folder), few, "nohup") as command:
        wait_for_text(command)
        for pid in command.processes():
            os.kill(pid, signal.SIGHUP)
        assert command.finish().code == 0


@dataclass(frozen=True)
class Killed:
    """A command of three stages one of which was killed while all were at work.

    listening: addresses before that.
    """

    listening: set[str]
    finished: Finished
    files_left: list[str]


VICTIMS = [0, 1]


@pytest.fixture(scope="module")
def killed() -> Iterator[list[Killed]]:
    """By the stage that was killed: the commands start at the same time."""
    with ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-"))) for _ in VICTIMS
        ]
        model = [*SLEEPING, "--max-restarts", "0"]
        commands = [stack.enter_context(start(3, folder, model)) for folder in folders]
        for command in commands:
            wait_for_text(command)
        yield [
            kill(command, victim, folder)
            for victim, command, folder in zip(VICTIMS, commands, folders, strict=True)
        ]


def kill(command: Command, victim: int, folder: Path) -> Killed:
    listening = {
        connection.laddr.ip
        for pid in command.processes()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    os.kill(command.stages()[victim], signal.SIGKILL)
    return Killed(listening, command.finish(), os.listdir(folder))


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_stage_ends_the_command_with_an_error_that_names_it(
    killed: list[Killed], victim: int
) -> None:
    finished = killed[victim].finished
    assert finished.code == 1
    last = finished.err.splitlines()[-1]
    assert last.startswith(f"headrace: stage {victim} (layers ")
    assert "was killed by signal 9" in last
    assert "Traceback" not in finished.err
    assert finished.left == []
    assert killed[victim].files_left == []


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_listens_on_any_network(killed: list[Killed], victim: int) -> None:
    assert killed[victim].listening == set()


def test_stages_end_when_the_engine_is_killed(
    short_tmp: "tempfile.TemporaryDirectory[str]",
) -> None:
    with short_tmp as folder, start(2, Path(folder)) as command:
        wait_for_text(command)
        command.process.kill()
        wait_until(lambda: command.processes() == [])
        command.finish()


def test_stages_that_are_stopped_end_too_when_the_engine_is_killed(
    short_tmp: "tempfile.TemporaryDirectory[str]",
) -> None:
    with short_tmp as folder, start(2, Path(folder), SLEEPING) as command:
        wait_for_text(command)
        for stage in command.stages():
            os.kill(stage, signal.SIGSTOP)
        command.process.kill()
        wait_until(lambda: command.processes() == [])
        command.finish()
        assert os.listdir(folder) == []


def test_a_reader_that_goes_away_ends_the_command_quietly(
    short_tmp: "tempfile.TemporaryDirectory[str]",
) -> None:
    with short_tmp as folder, start(2, Path(folder), SLEEPING) as command:
        wait_for_text(command)
        assert command.process.stdout is not None
        command.process.stdout.close()
        wait_until(lambda: command.processes() == [])
        assert command.process.stderr is not None
        assert b"Traceback" not in command.process.stderr.read()
