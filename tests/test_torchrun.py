"""`torchrun`, twice on loopback, as people start it on two hosts."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from command import Mark, wait_until
from headrace import LLM, SamplingParams
from headrace.host.cluster_key import write_cluster_key
from tiny_checkpoints import write_tiny_gguf

PROMPT, TOKENS = "The mill wheel", 12


@dataclass
class Torchrun:
    """One host's. lines: what it, and what it started, printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def printed(self, text: str) -> str | None:
        """The first line that has this."""
        return next((line for line in list(self.lines) if text in line), None)

    def read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def key(tmp_path: Path) -> str:
    write_cluster_key(tmp_path / "key")
    return str(tmp_path / "key")


@contextmanager
def torchruns(count: int, *arguments: str, processes: int = 1) -> Iterator[list[Torchrun]]:
    """So many hosts' torchruns with this command each. Nothing of them is left afterwards."""
    mark, port, started = Mark(), _two_free_ports(), []
    # Of its own, torchrun would leave a folder.
    with tempfile.TemporaryDirectory() as logs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*mark.variable)
            options = ("--log-dir", logs, "--nproc-per-node", str(processes))
            started = [_start(node, count, port, options, arguments) for node in range(count)]
        try:
            yield started
            wait_until(lambda: not mark.processes())
        finally:
            for pid in mark.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for torchrun in started:
                torchrun.process.wait()


def _start(
    node: int, count: int, port: int, options: tuple[str, ...], arguments: tuple[str, ...]
) -> Torchrun:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(count), "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *options,
            *("-m", "headrace", *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    torchrun = Torchrun(process)
    threading.Thread(target=torchrun.read, daemon=True).start()
    return torchrun


def _two_free_ports() -> int:
    """torchrun's own store has the first, Headrace the one after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def alone(model: str) -> str:
    with LLM(model, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        return llm.generate(PROMPT, params)[0].outputs[0].text


def complete(url: str) -> str:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


@pytest.mark.parametrize(
    "ending", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT]
)
def test_two_torchruns_serve_one_model_and_end_with_the_first(
    model: str, key: str, ending: signal.Signals
) -> None:
    serve = ("serve", model, "--port", "0", "-pp", "2", "--dtype", "float32", "--cpu-threads", "1")
    with torchruns(2, *serve, "--cluster-key-file", key) as (first, second):
        wait_until(lambda: bool(first.printed("ready after")) or first.process.poll() is not None)
        ready = first.printed("ready after")
        assert ready is not None, first.lines
        assert first.printed("by torchrun this is host 0 of 2"), first.lines
        assert second.printed("by torchrun this is host 1 of 2"), second.lines
        assert second.printed("runs rank"), second.lines
        url = ready.split(": ")[1].split(" ")[0]
        assert complete(url) == alone(model)
        first.process.send_signal(ending)
        first.process.wait(60)
        second.process.wait(60)
        assert first.printed("ended in order"), first.lines
        assert second.printed("ended in order"), second.lines


def test_several_processes_a_host_are_refused_in_one_line(model: str, key: str) -> None:
    serve = ("serve", model, "-pp", "2", "--cluster-key-file", key)
    with torchruns(1, *serve, processes=2) as (only,):
        assert only.process.wait(60) != 0
        assert only.printed("headrace: torchrun starts 2 processes on each host"), only.lines
