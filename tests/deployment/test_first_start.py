"""What ends a first start, and what does not; with real processes in tests/test_first_start.py."""

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from headrace.config import EngineConfig
from headrace.deployment import first_start
from headrace.deployment.first_start import bring_up, check_hosts
from headrace.deployment.machine import Cluster
from headrace.deployment.resolve import resolve
from headrace.deployment.restart_limit import RestartLimit
from headrace.errors import HeadraceError, ModelError, PipelineError, StallError, StartError
from headrace.protocol.fault import RankFault
from headrace.protocol.hosts import LinkFigures
from machines import FOUR_CORES, MODEL, speed

FROM_OUTSIDE = [RankFault(1, None, outside=True)]
OWN = [RankFault(1, None, outside=False)]


@dataclass
class Ranks:
    """Ranks that have these errors, one after the other, and are ready then."""

    errors: list[tuple[HeadraceError, list[RankFault]]]
    faults: list[RankFault] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def wait_ready(self) -> str:
        if self.errors:
            error, self.faults = self.errors.pop(0)
            raise error
        return "ready"

    def bring_up(self, most: int = 5) -> tuple[str, int]:
        limit = RestartLimit(most, 10.0)
        return bring_up(self.wait_ready, self.epochs.append, self, limit, epoch=3)


def test_ranks_that_somebody_ended_or_that_lost_a_link_or_stand_still_are_started_anew() -> None:
    ranks = Ranks(
        [
            (PipelineError("killed"), FROM_OUTSIDE),
            (PipelineError("lost a link"), []),
            (StallError("stopped"), OWN),
        ]
    )
    assert ranks.bring_up() == ("ready", 6)
    assert ranks.epochs == [4, 5, 6]


@pytest.mark.parametrize(
    ("error", "faults"),
    [
        (ModelError("no such tensor"), OWN),
        (StartError("no memory for the cache"), OWN),
        (PipelineError("an internal error"), OWN),
        (PipelineError("ended by a fault of memory"), [*FROM_OUTSIDE, *OWN]),
        # The engine's own, before any rank is at fault.
        (StartError("no memory for a block"), []),
    ],
)
def test_a_fault_of_its_own_ends_the_start_at_once(
    error: HeadraceError, faults: list[RankFault]
) -> None:
    ranks = Ranks([(error, faults)])
    with pytest.raises(type(error)) as caught:
        ranks.bring_up()
    assert caught.value is error
    assert ranks.epochs == []


def test_it_is_given_up_after_so_many_restarts() -> None:
    ranks = Ranks([(PipelineError("killed"), FROM_OUTSIDE)] * 3)
    with pytest.raises(PipelineError, match="killed; gave up after 2 restarts"):
        ranks.bring_up(most=2)


def test_a_rank_that_the_system_ended_for_want_of_memory_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = iter([7, 8])
    monkeypatch.setattr(first_start, "kills_for_memory", lambda: next(kills))
    ranks = Ranks([(PipelineError("stage 1 was killed by signal 9"), FROM_OUTSIDE)])
    with pytest.raises(StartError, match="signal 9; the system had no memory left"):
        ranks.bring_up()
    assert ranks.epochs == []


def test_a_host_with_stages_that_stays_away_ends_the_first_start_and_is_named() -> None:
    names = ("ada", "bob")
    hosts = tuple(structs.replace(FOUR_CORES, name=name, speed=speed(1.0)) for name in names)
    links = {(0, 1): LinkFigures(1e-4, 1e8), (1, 0): LinkFigures(1e-4, 1e8)}
    config = EngineConfig(model="model.gguf", pipeline_parallel_size=2, join_timeout=30)
    deployment = resolve(config, MODEL, Cluster(hosts=hosts, links=links))
    check_hosts({}, deployment)
    check_hosts({1: 29.0, 2: 100.0}, deployment)
    with pytest.raises(StartError, match=r"host 1 \(bob\) went away .* 30 s \(--join-timeout\)"):
        check_hosts({1: 31.0}, deployment)
