"""The commands of docs/serving.md, as they stand there."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.running_server import Server, running_server

DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in re.findall(r"^```bash\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE)
    if command
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--model", "smollm2", "--kv-cache-memory", "256MiB") as running:
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_endpoint_has_a_command_that_works(server: Server) -> None:
    answers: dict[str, str] = {}
    for command in COMMANDS:
        assert command.startswith("curl ")
        path = re.search(r"http://127\.0\.0\.1:8000(\S*)", command)
        assert path
        ran = command.replace("http://127.0.0.1:8000", server.url)
        done = subprocess.run(["bash", "-c", ran], capture_output=True, check=True, text=True)
        assert '"error":' not in done.stdout, f"{command} {done.stdout}"
        answers.setdefault(path[1], done.stdout)
    documented = json.loads(_get(server, "/openapi.json"))["paths"]
    assert answers.keys() == {path.replace("{name}", "smollm2") for path in documented}
    assert "Tokyo" in answers["/v1/completions"]
    assert json.loads(answers["/detokenize"]) == {"prompt": "The capital of"}


def test_every_flag_of_the_server_is_explained() -> None:
    own = DOCS.split("## Flags")[1].split("## Endpoints")[0]
    # Those of the engine are explained once, for all commands.
    engines = _flags_of("generate")
    assert set(re.findall(r"`(--[a-z-]+)`", own)) - engines == _flags_of("serve") - engines


def _flags_of(command: str) -> set[str]:
    helped = subprocess.run(
        [sys.executable, "-m", "headrace", command, "--help"],
        capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    return set(re.findall(r"--[a-z-]+", helped))


def _get(server: Server, path: str) -> str:
    command = ["curl", "-sf", server.url + path]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout
