"""Hosts that go away: waited for, planned around, taken back."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

import headrace.deployment.rebuild
from headrace.config import EngineConfig
from headrace.deployment import rank_setup
from headrace.deployment.hosts import HostMeeting
from headrace.deployment.machine import Cluster
from headrace.deployment.rebuild import Rebuild
from headrace.deployment.resolve import Deployment, resolve
from headrace.host.cluster_key import Secret
from headrace.protocol.cluster import FreeMemory
from headrace.protocol.messages import Loaded
from machines import FOUR_CORES, MODEL, speed

GIB = 1 << 30
PATIENCE_S = 300.0


@dataclass
class Hosts:
    """Three, with this one. lost: for how many seconds which are away."""

    lost: dict[int, float] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=lambda: {0: 8 * GIB, 1: 8 * GIB, 2: 8 * GIB})

    def away(self) -> dict[int, float]:
        return dict(self.lost)

    def free_memory(self, node: int) -> FreeMemory:
        return FreeMemory(self.free[node], 0, 0)


@dataclass
class Processes:
    """Ranks that load when they are told to. did: what was done with them."""

    hosts: Hosts
    did: list[Any] = field(default_factory=list)
    nodes: tuple[int, ...] = (0, 1, 2)
    loaded: list[Loaded] | None = None

    def room(self, node: int) -> int:
        return self.hosts.free[node]

    def move(self, cpus: list[Any], nodes: tuple[int, ...]) -> None:
        self.nodes = nodes
        self.did.append(("move", nodes))

    def restart(self, configs: list[int], num_blocks: int | None) -> None:
        self.loaded = None
        self.did.append(("restart", configs[0], num_blocks))

    def load(self) -> None:
        self.loaded = [Loaded(0, rank, GIB, 1 << 20, "no", None, []) for rank in range(3)]

    def reserve_cache(self, sizes: list[int], choose: Callable[[int], int]) -> int:
        return choose(0)

    def decide_cache(self, num_blocks: int) -> None:
        self.loaded = None
        self.did.append(("cache", num_blocks))

    def look(self, timeout_s: float) -> bool:
        return False

    def what(self) -> list[Any]:
        """Done since this was asked last."""
        did, self.did = self.did, []
        return did


@dataclass
class Engine:
    """told: the blocks of the caches of stages that are others."""

    told: list[int] = field(default_factory=list)

    def new_stages(self, num_blocks: int, priors: list[Any]) -> None:
        self.told.append(num_blocks)


@contextmanager
def epochs(_: Deployment, epoch: int, __: HostMeeting | None) -> Iterator[list[int]]:
    """Of what ranks are told only the epoch."""
    yield [epoch] * 3


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def rebuild(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Rebuild:
    cluster = Cluster(
        hosts=tuple(
            structs.replace(FOUR_CORES, name=name, speed=speed(1)) for name in ("ada", "bob", "eve")
        )
    )
    config = EngineConfig(
        model="model.gguf", pipeline_parallel_size=3, max_model_len=512, join_timeout=PATIENCE_S
    )
    monkeypatch.setattr(headrace.deployment.rebuild, "rank_configs", epochs)
    monkeypatch.setattr(rank_setup, "free_memory", lambda: hosts.free[0])
    return Rebuild(
        engine=Engine(),  # type: ignore[arg-type]
        processes=Processes(hosts),  # type: ignore[arg-type]
        deployment=resolve(config, MODEL, cluster),
        meeting=HostMeeting(
            hosts=hosts,  # type: ignore[arg-type]
            cluster=cluster,
            run=Secret(b""),
        ),
        num_blocks=100,
    )


def processes(rebuild: Rebuild) -> Any:
    return rebuild.processes


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Logged since this was asked last."""
    told = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    caplog.clear()
    return told


def test_a_host_that_is_away_is_waited_for_as_long_as_was_said(
    rebuild: Rebuild, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.lost[2] = 0.0
    rebuild.begin(1)
    for hosts.lost[2] in (0.0, 100.0, PATIENCE_S):
        assert not rebuild.look(0.0)
    assert processes(rebuild).what() == [("restart", 1, 100)]
    (line,) = lines(caplog)
    assert line.startswith("away: host 2 (eve); if not back within 300 s (--join-timeout), the")


def test_then_the_others_take_its_layers_and_the_cache_is_as_large_as_fits(
    rebuild: Rebuild, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.lost[2] = PATIENCE_S + 1
    rebuild.begin(1)
    rebuild.look(0.0)
    did = processes(rebuild).what()
    assert did[0] == ("restart", 1, 100)
    kind, nodes = did[1]
    assert kind == "move"
    assert set(nodes) == {0, 1}
    assert did[2] == ("restart", 1, None)
    assert "host 2 (eve) did not come back within 300 s: the other" in lines(caplog)[-1]
    # Nothing more is done until they have loaded.
    rebuild.look(0.0)
    assert processes(rebuild).what() == []
    processes(rebuild).load()
    rebuild.look(0.0)
    ((kind, num_blocks),) = processes(rebuild).what()
    assert kind == "cache"
    # A host with two stages has half as many blocks for each: 512 positions for 256 sequences.
    assert num_blocks == 8 * GIB // 2 // (2 << 20)
    assert rebuild.engine.told == [num_blocks]  # type: ignore[attr-defined]
    # From now on this is what is restarted.
    rebuild.begin(2)
    assert processes(rebuild).what() == [("restart", 2, num_blocks)]


def test_each_host_that_is_away_has_its_time(rebuild: Rebuild, hosts: Hosts) -> None:
    hosts.lost.update({1: PATIENCE_S + 1, 2: 1.0})
    rebuild.begin(1)
    rebuild.look(0.0)
    assert processes(rebuild).what() == [("restart", 1, 100)]
    hosts.lost[2] = PATIENCE_S + 1
    rebuild.look(0.0)
    assert processes(rebuild).what() == [("move", (0, 0, 0)), ("restart", 1, None)]


def test_without_the_memory_it_says_what_is_missing_and_waits(
    rebuild: Rebuild, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.lost[2] = PATIENCE_S + 1
    hosts.free.update({0: GIB // 10, 1: GIB // 10})
    rebuild.begin(1)
    for _ in range(5):
        rebuild.look(0.0)
    _, line = lines(caplog)
    assert "bob has 0.1 GiB free and needs" in line
    assert line.endswith("; waiting for host 2 (eve)")
    assert processes(rebuild).what() == [("restart", 1, 100)]
    # It is tried again when that is long ago, or another host is there.
    hosts.free.update({0: 8 * GIB, 1: 8 * GIB})
    rebuild.patience_s = 0.0
    rebuild.look(0.0)
    assert [each[0] for each in processes(rebuild).what()] == ["move", "restart"]


def test_where_the_caches_do_not_fit_stages_go_back_to_where_they_were(
    rebuild: Rebuild, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.lost[2] = PATIENCE_S + 1
    rebuild.begin(1)
    rebuild.look(0.0)
    processes(rebuild).what()
    hosts.free[0] = 10 << 20
    processes(rebuild).load()
    rebuild.look(0.0)
    assert processes(rebuild).what() == [("move", (0, 1, 2)), ("restart", 1, None)]
    assert "; the stages go back to where they were" in lines(caplog)[-1]
    # And wait for their host, which loads when it is there.
    rebuild.look(0.0)
    assert processes(rebuild).what() == []
    hosts.free[0] = 8 * GIB
    hosts.lost.clear()
    processes(rebuild).load()
    rebuild.look(0.0)
    assert [each[0] for each in processes(rebuild).what()] == ["cache"]


def test_a_host_that_is_back_runs_stages_from_the_next_restart_on(
    rebuild: Rebuild, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.lost[2] = PATIENCE_S + 1
    rebuild.begin(1)
    rebuild.look(0.0)
    processes(rebuild).load()
    rebuild.look(0.0)
    processes(rebuild).what()
    hosts.lost.clear()
    rebuild.look(0.0)
    assert processes(rebuild).what() == []
    rebuild.begin(2)
    assert processes(rebuild).what() == [("move", (0, 1, 2)), ("restart", 2, None)]
    assert lines(caplog)[-1] == "back: host 2 (eve); all stages start anew"


def test_a_host_that_comes_back_in_time_changes_nothing(rebuild: Rebuild, hosts: Hosts) -> None:
    hosts.lost[1] = 10.0
    rebuild.begin(1)
    rebuild.look(0.0)
    hosts.lost.clear()
    rebuild.look(0.0)
    rebuild.begin(2)
    assert processes(rebuild).what() == [("restart", 1, 100), ("restart", 2, 100)]
