"""One small server for the tests of the API, and the same model offline."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from headrace import LLM
from serving.running_server import Server, check_standstills, running_server
from serving.tiny_model import MAX_QUEUED, MAX_SEQUENCES, MODEL, OTHER_NAME, write_chat_model

_KV_CACHE = "64MiB"


@pytest.fixture(autouse=True)
def nothing_keeps_an_event_loop() -> Iterator[None]:
    """A test fails if it made a server's event loop stand still."""
    yield
    check_standstills()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    """Two stages, float32."""
    with running_server(
        *("--model", str(tiny_model), "-pp", "2", "--dtype", "float32"),
        *("--served-model-name", MODEL, "--served-model-name", OTHER_NAME),
        *("--kv-cache-memory", _KV_CACHE, "--max-num-seqs", str(MAX_SEQUENCES)),
        *("--max-queued-requests", str(MAX_QUEUED), "--max-logprobs", "-1"),
        *("--scheduling-policy", "priority"),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """What the server's answers are compared with."""
    with LLM(
        str(tiny_model), dtype="float32", kv_cache_memory=_KV_CACHE, max_logprobs=-1
    ) as offline:
        yield offline


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[OpenAI]:
    """The official client; it does not try again, which would hide errors."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    """For what the official client does not do."""
    with httpx.Client(base_url=server.url, timeout=60.0) as made:
        yield made
