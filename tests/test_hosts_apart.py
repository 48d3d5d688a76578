"""Hosts that have only a line in common: network namespaces, where the machine has them."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.host.cluster_key import write_cluster_key
from headrace.pipeline.curve import CUT_S
from relay import Line
from serving.running_server import running_server
from tiny_checkpoints import write_tiny_gguf
from two_hosts import MASTER_ADDRESS, TwoHosts, UnavailableError

PROMPTS: list[Any] = [{"prompt_token_ids": [n + 1, *range(n, 2 * n + 3)]} for n in range(6)]
TOKENS = 60
QUICK = Line(2)
# As far as across a continent, as fast as most machines are connected, and it loses a packet in 20.
BAD = Line(20, rate_mbit=1000, loss_percent=5, mtu=1500)

# Says when it begins, and prints the tokens of so many rounds.
GENERATE = f"""
import json, logging, sys
from headrace import LLM, SamplingParams
logging.basicConfig(level=logging.INFO)
settings, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens={TOKENS}, ignore_eos=True)
with LLM(**settings) as llm:
    for _ in range(rounds):
        print("round", flush=True)
        answers = llm.generate({PROMPTS}, params, use_tqdm=False)
        print(json.dumps([answer.outputs[0].token_ids for answer in answers]), flush=True)
"""

# Sends the prompts so many times to a server, eight at a time, and prints the answers' tokens.
LOAD = f"""
import json, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
def answer(prompt):
    body = {{"prompt": prompt["prompt_token_ids"], "temperature": 0, "max_tokens": {TOKENS},
             "ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}}
    headers = {{"Content-Type": "application/json"}}
    url = sys.argv[1] + "/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        tokens = json.load(response)["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in tokens]
with ThreadPoolExecutor(8) as pool:
    print(json.dumps(list(pool.map(answer, {PROMPTS} * int(sys.argv[2])))))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def alone(model: Path) -> str:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(model), dtype="float32") as llm:
        answers = llm.generate(PROMPTS, params, use_tqdm=False)
    return json.dumps([answer.outputs[0].token_ids for answer in answers])


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    """With a quick line, or the one that the test gives as parameter."""
    try:
        with TwoHosts(getattr(request, "param", QUICK)) as hosts:
            yield hosts
    except UnavailableError as error:
        pytest.skip(str(error))


def start(hosts: TwoHosts, host: int, *arguments: str) -> "subprocess.Popen[str]":
    """Python, on that host."""
    return subprocess.Popen(
        [*hosts.on(host), sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def join(hosts: TwoHosts, key: Path) -> "subprocess.Popen[str]":
    """An agent on the second host."""
    flags = ["--cluster-key-file", str(key)]
    return start(hosts, 1, "-m", "headrace", "join", MASTER_ADDRESS, *flags)


class Running:
    """An engine on the first host, an agent on the second."""

    def __init__(self, hosts: TwoHosts, model: Path, key: Path, rounds: int) -> None:
        settings = {
            "model": str(model),
            "dtype": "float32",
            "pipeline_parallel_size": 2,
            "nnodes": 2,
            "master_addr": MASTER_ADDRESS,
            "cluster_key_file": str(key),
        }
        self.engine = start(hosts, 0, "-c", GENERATE, json.dumps(settings), str(rounds))
        self.agent = join(hosts, key)
        assert self.engine.stderr is not None
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        self.log.extend(self.engine.stderr or ())

    def wait_for_round(self) -> None:
        assert self.engine.stdout is not None
        line = self.engine.stdout.readline()
        assert line == "round\n", self.log

    def end(self) -> list[str]:
        """What it printed since, without the rounds' names."""
        assert self.engine.stdout is not None
        printed = [line.rstrip() for line in self.engine.stdout]
        self._reader.join()
        assert self.engine.wait(30) == 0, self.log
        return [line for line in printed if line != "round"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_cluster_key(tmp_path / "key")
    return tmp_path / "key"


def run(hosts: TwoHosts, model: Path, key: Path, rounds: int) -> Iterator[Running]:
    running = Running(hosts, model, key, rounds)
    try:
        yield running
    finally:
        for process in (running.engine, running.agent):
            process.kill()
            process.wait()


def test_hosts_apart_give_the_tokens_of_one(
    hosts: TwoHosts, model: Path, alone: str, key: Path
) -> None:
    for running in run(hosts, model, key, 2):
        running.wait_for_round()
        assert running.end() == [alone] * 2
        assert running.agent.wait(30) == 0


@pytest.mark.long
def test_a_short_cut_of_the_line_is_ridden_out(
    hosts: TwoHosts, model: Path, alone: str, key: Path
) -> None:
    for running in run(hosts, model, key, 3):
        running.wait_for_round()
        with hosts.cut():
            time.sleep(2.0)
        assert running.end() == [alone] * 3
        assert not any("restart" in line for line in running.log)
        assert running.agent.wait(30) == 0


@pytest.mark.long
def test_after_a_long_cut_the_host_comes_again_and_nothing_is_lost(
    hosts: TwoHosts, model: Path, alone: str, key: Path
) -> None:
    for running in run(hosts, model, key, 3):
        running.wait_for_round()
        with hosts.cut():
            time.sleep(CUT_S + 5.0)
        assert running.end() == [alone] * 3
        assert any("joined again" in line for line in running.log)


@pytest.mark.long
def test_a_host_that_is_killed_and_started_again_loses_nothing(
    hosts: TwoHosts, model: Path, alone: str, key: Path
) -> None:
    for running in run(hosts, model, key, 3):
        running.wait_for_round()
        running.agent.kill()
        running.agent.communicate()
        running.agent = join(hosts, key)
        assert running.end() == [alone] * 3
        assert any("joined again" in line for line in running.log)


@pytest.mark.long
@pytest.mark.parametrize("hosts", [BAD], indirect=True, ids=["bad_line"])
def test_a_server_across_a_bad_line_answers_a_load_with_the_tokens_of_one_host(
    hosts: TwoHosts, model: Path, alone: str, key: Path
) -> None:
    flags = ["-pp", "2", "--nnodes", "2", "--master-addr", MASTER_ADDRESS]
    flags += ["--cluster-key-file", str(key), "--dtype", "float32"]
    agent = join(hosts, key)
    try:
        with running_server(str(model), *flags, prefix=hosts.on(0)) as server:
            load = start(hosts, 0, "-c", LOAD, server.url, "3")
            answers, complaints = load.communicate()
            assert load.returncode == 0, complaints
            assert json.loads(answers) == json.loads(alone) * 3
        assert not any("restart" in line for line in server.log)
        assert agent.wait(30) == 0
    finally:
        agent.kill()
        agent.communicate()
