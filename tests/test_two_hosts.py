"""Stages on two hosts: real sockets, and a line on which every packet takes a while."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace import LLM, SamplingParams
from relay import Line
from tiny_checkpoints import write_tiny_gguf
from two_hosts import MASTER_ADDRESS, TwoHosts, UnavailableError

DELAY_MS = 10
PROMPTS = [[n + 1, *range(n, 2 * n + 3)] for n in range(6)]
TOKENS = 12

GENERATE = f"""
import json
from headrace import LLM, SamplingParams
settings = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens={TOKENS}, ignore_eos=True)
with LLM(**settings) as llm:
    prompts = [{{"prompt_token_ids": ids}} for ids in {PROMPTS}]
    answers = llm.generate(prompts, params)
    print(json.dumps([answer.outputs[0].token_ids for answer in answers]))
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with TwoHosts(Line(DELAY_MS)) as hosts:
            yield hosts
    except UnavailableError as error:
        pytest.skip(str(error))
    # Whatever happened, nothing is left.
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not [name for name in hosts.namespaces if name in namespaces]
    assert not [p.pid for p in psutil.process_iter() if _belongs(p, hosts)]


def _belongs(process: psutil.Process, hosts: TwoHosts) -> bool:
    try:
        return any(name in " ".join(process.cmdline()) for name in hosts.namespaces)
    except psutil.Error:
        return False


def test_stages_on_two_hosts_give_the_tokens_of_one_stage_on_one(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    settings = {
        "model": model,
        "dtype": "float32",
        "pipeline_parallel_size": 2,
        "link_backend": "gloo",
        "master_addr": MASTER_ADDRESS,
        # Several turns under way at once on the line.
        "num_microbatches": 3,
    }
    across = subprocess.run(
        hosts.command(GENERATE, json.dumps(settings)),
        env=hosts.environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert across.returncode == 0, across.stderr
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(model, dtype="float32") as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        alone = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
    assert json.loads(across.stdout) == alone
