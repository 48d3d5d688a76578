"""A host without the model is sent what its stages need of it, all on loopback."""

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from command import wait_until
from headrace import LLM, SamplingParams
from headrace.checkpoint.extents import Extent, tensor_extents
from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.checkpoint.tensor_check import tensors_of
from headrace.errors import HeadraceError, StartError
from headrace.protocol.model_config import StageShare
from joined_hosts import Agent, agents, start
from stage_models import read_model
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

PROMPTS: list[Any] = [{"prompt_token_ids": [n + 1, *range(n, 2 * n + 3)]} for n in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAST = StageShare(2, 4, embeds=False, samples=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, whose names mean nothing elsewhere."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_gguf(folder / "tiny.gguf")
    write_tiny_llama(folder / "tiny", max_shard_size="20KB")
    return folder


@pytest.fixture
def gguf(models: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(models)
    return "tiny.gguf"


@pytest.fixture
def shards(models: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(models)
    return "tiny"


@pytest.fixture(scope="module")
def expected(models: Path) -> list[list[int]]:
    """The tokens of the GGUF file on one host."""
    return alone(str(models / "tiny.gguf"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, Any]:
    """How a host is started that has no model, and caches of its own."""
    (tmp_path / "there").mkdir()
    return {
        "folder": tmp_path / "there",
        "environment": {"XDG_CACHE_HOME": str(tmp_path / "caches")},
    }


def tokens(llm: LLM) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS)]


def alone(model: str) -> list[list[int]]:
    with LLM(model, dtype="float32") as llm:
        return tokens(llm)


def engine(model: str, port: int, key: Path, **settings: Any) -> LLM:
    return LLM(
        model,
        dtype="float32",
        pipeline_parallel_size=2,
        layer_partition="2,2",
        nnodes=2,
        master_port=port,
        cluster_key_file=str(key),
        **settings,
    )


def came(agent: Agent) -> list[str]:
    """What it says of weights that it received."""
    return [line for line in agent.lines if "of weights came" in line]


def received(tmp_path: Path) -> Path:
    """The folder of the one model that was."""
    (folder,) = (tmp_path / "caches" / "headrace" / "weights").iterdir()
    return folder


def content(extent: Extent) -> bytes:
    with extent.file.open("rb") as file:
        return os.pread(file.fileno(), extent.nbytes, extent.offset)


@pytest.mark.parametrize("kind", [pytest.param("gguf", marks=pytest.mark.long), "shards"])
def test_a_host_receives_its_stages_tensors_and_no_others(
    request: pytest.FixtureRequest, tmp_path: Path, elsewhere: dict[str, Any], key: Path, port: int,
    kind: str,
) -> None:  # fmt: skip
    model: str = request.getfixturevalue(kind)
    with agents(1, port, key, **elsewhere) as (agent,):
        with engine(model, port, key) as llm:
            assert tokens(llm) == alone(model)
        assert agent.end() == 0
    folder = received(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = locate_model(model)
    there = ModelFiles(folder / model if kind == "gguf" else folder, files.kind)
    own = {tensor.name for tensor in tensors_of(read_model(files).program(LAST))}
    sent, here = tensor_extents(files), tensor_extents(there)
    assert sent.keys() == here.keys()
    is_there = {name for name, extent in here.items() if content(extent) != bytes(extent.nbytes)}
    assert is_there == own & sent.keys()
    assert all(content(here[name]) == content(sent[name]) for name in is_there)
    # Neither a tokenizer nor anything else that no stage reads.
    files_there = {file.name for file in folder.iterdir()}
    assert not {name for name in files_there if "tokenizer" in name}


@pytest.mark.long
def test_a_second_start_sends_nothing(
    gguf: str, elsewhere: dict[str, Any], key: Path, port: int
) -> None:
    for sends in (True, False):
        with agents(1, port, key, **elsewhere) as (agent,):
            with engine(gguf, port, key):
                pass
            assert agent.end() == 0
            (line,) = came(agent)
            assert ("rank 1: 0 GiB of weights came" in line) is not sends
            assert (" 0 GiB were in " in line) is sends


@pytest.mark.long
def test_a_host_and_a_rank_that_come_again_use_what_was_received(
    gguf: str,
    expected: list[list[int]],
    tmp_path: Path,
    elsewhere: dict[str, Any],
    key: Path,
    port: int,
) -> None:
    with agents(1, port, key, **elsewhere) as others, engine(gguf, port, key) as llm:
        join = ["join", f"127.0.0.1:{port}", "--cluster-key-file", str(key)]
        assert tokens(llm) == expected
        others[0].ranks()[0].kill()
        assert tokens(llm) == expected
        # It was not even asked for.
        assert len(came(others[0])) == 1
        others[0].process.kill()
        others[0].process.wait()
        others.append(start(join, **elsewhere))
        assert tokens(llm) == expected
        assert "rank 1: 0 GiB of weights came" in came(others[1])[0]
        # Another host in its place has nothing.
        others[1].process.kill()
        others[1].process.wait()
        shutil.rmtree(tmp_path / "caches")
        others.append(start(join, **elsewhere))
        assert tokens(llm) == expected
        assert " 0 GiB were in " in came(others[2])[0]


@pytest.mark.long
def test_a_host_that_had_the_model_is_sent_it_when_it_comes_without(
    gguf: str, expected: list[list[int]], elsewhere: dict[str, Any], key: Path, port: int
) -> None:
    with agents(1, port, key) as others, engine(gguf, port, key) as llm:
        join = ["join", f"127.0.0.1:{port}", "--cluster-key-file", str(key)]
        assert tokens(llm) == expected
        assert came(others[0]) == []
        others[0].process.kill()
        others[0].process.wait()
        others.append(start(join, **elsewhere))
        assert tokens(llm) == expected
        assert len(came(others[1])) == 1


def test_an_engine_that_does_not_send_refuses_naming_both(
    gguf: str, elsewhere: dict[str, Any], key: Path, port: int
) -> None:
    with agents(1, port, key, **elsewhere) as (agent,):
        with pytest.raises(StartError) as error:
            engine(gguf, port, key, send_weights=False)
        assert agent.end() == 1
    name = socket.gethostname()
    for told in (str(error.value), agent.lines[-1]):
        assert f"host {name} (127.0.0.1) does not have the model's files, and {name} (" in told
        assert "--no-send-weights" in told


def test_a_host_that_does_not_receive_says_so(
    gguf: str, elsewhere: dict[str, Any], key: Path, port: int
) -> None:
    with agents(1, port, key, ["--no-send-weights"], **elsewhere) as (agent,):
        with pytest.raises(StartError) as error:
            engine(gguf, port, key)
        assert agent.end() == 1
    for told in (str(error.value), agent.lines[-1]):
        assert "model 'tiny.gguf', as the engine's host calls it, is not here" in told
        assert "--no-send-weights" in told


def test_a_model_that_was_named_and_is_not_there_is_an_error(
    gguf: str, elsewhere: dict[str, Any], key: Path, port: int
) -> None:
    with agents(1, port, key, ["--model", "/nowhere/tiny.gguf"], **elsewhere) as (agent,):
        with pytest.raises(StartError, match="no such file or directory"):
            engine(gguf, port, key)
        assert agent.end() == 1


@pytest.mark.long
def test_a_host_with_the_same_flags_is_sent_the_model_too(
    gguf: str, expected: list[list[int]], elsewhere: dict[str, Any], key: Path, port: int
) -> None:
    command = [
        *("serve", gguf, "--nnodes", "2", "--node-rank", "1", "-pp", "2"),
        *("--layer-partition", "2,2", "--master-port", str(port), "--cluster-key-file", str(key)),
    ]
    agent = start(command, **elsewhere)
    try:
        with engine(gguf, port, key) as llm:
            assert tokens(llm) == expected
        assert agent.end() == 0
        assert len(came(agent)) == 1
    finally:
        agent.process.kill()
        agent.process.wait()


def test_what_cannot_be_kept_is_told_in_one_line(
    gguf: str, elsewhere: dict[str, Any], key: Path, port: int, tmp_path: Path
) -> None:
    (tmp_path / "caches").write_text("no folder")
    with agents(1, port, key, **elsewhere) as (agent,):
        with pytest.raises(
            HeadraceError, match=r"stage 1: no folder for what is received .*XDG_CACHE"
        ):
            engine(gguf, port, key, max_restarts=0)
        wait_until(lambda: any("has no weights" in line for line in agent.lines))
