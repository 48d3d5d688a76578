"""Shards of one stage on several hosts, here all on loopback: the same answers, nothing lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.deployment.rebuild import Rebuild
from joined_hosts import agents, start
from test_absent_hosts import end_for_good
from test_recovery import Answers, answers
from tiny_checkpoints import write_tiny_gguf

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """4 heads, 2 of them of keys: of 3 shards, some share one."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, max_positions=8192))


@pytest.fixture(scope="module")
def expected(model: str) -> Answers:
    """What one process says."""
    with LLM(model, **SETTINGS) as llm:
        return answers(llm)


@contextmanager
def engine(
    model: str, port: int, key: Path, *, hosts: int, stages: int, shards: int
) -> Iterator[LLM]:
    with LLM(
        model,
        **SETTINGS,
        pipeline_parallel_size=stages,
        tensor_parallel_size=shards,
        nnodes=hosts,
        master_port=port,
        cluster_key_file=str(key),
        max_restarts=3,
    ) as llm:
        yield llm


def nodes(llm: LLM) -> list[int]:
    """The host of each rank."""
    return [rank.node for rank in llm._running.processes._processes]


# A shard a host; two on one of them; a stage alone on a host beside one on two.
@pytest.mark.parametrize(
    ("hosts", "stages", "shards", "placed"),
    [
        (2, 1, 2, [[0, 1]]),
        pytest.param(2, 1, 3, [[0, 1, 1]], marks=pytest.mark.long),
        pytest.param(3, 2, 2, [[0, 0], [1, 2]], marks=pytest.mark.long),
    ],
)
def test_shards_on_hosts_answer_as_one_process_does(
    model: str, expected: Answers, key: Path, port: int,
    hosts: int, stages: int, shards: int, placed: list[list[int]],
) -> None:  # fmt: skip
    with agents(hosts - 1, port, key) as others:
        with engine(model, port, key, hosts=hosts, stages=stages, shards=shards) as llm:
            # The faster hosts have the dearer stage.
            assert sorted(map(list, llm.card.ranks.by_stage(nodes(llm)))) == placed
            assert answers(llm) == expected
        assert [agent.end() for agent in others] == [0] * (hosts - 1)
        assert all(agent.lines[-1] == "ended in order" for agent in others), others


@pytest.mark.long
def test_a_shard_and_a_host_that_die_lose_nothing(
    model: str, expected: Answers, key: Path, port: int
) -> None:
    with (
        agents(1, port, key) as others,
        engine(model, port, key, hosts=2, stages=1, shards=2) as llm,
    ):
        (agent,) = others

        def kill(rounds: int) -> None:
            if rounds == 7:
                (there,) = agent.ranks()
                there.kill()

        assert answers(llm, kill) == expected

        def kill_host(rounds: int) -> None:
            if rounds == 7:
                end_for_good(agent)
                others.append(start(["join", f"127.0.0.1:{port}", "--cluster-key-file", str(key)]))

        assert answers(llm, kill_host) == expected
        assert nodes(llm) == [0, 1]


def test_a_host_takes_over_the_shards_of_one_that_is_gone_for_good(
    model: str, expected: Answers, key: Path, port: int
) -> None:
    with (
        agents(1, port, key) as (second,),
        engine(model, port, key, hosts=2, stages=1, shards=2) as llm,
    ):
        rebuild = llm._running.recovery.rebuild
        assert isinstance(rebuild, Rebuild)
        rebuild.patience_s = 1.0
        assert answers(llm, lambda n: end_for_good(second) if n == 7 else None) == expected
        assert nodes(llm) == [0, 0]
        assert answers(llm) == expected
