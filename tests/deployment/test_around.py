"""Plans around hosts that stay away: the same model, wholly on those that are left."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headrace.config import EngineConfig
from headrace.deployment.around import plan_around
from headrace.deployment.machine import Cluster
from headrace.deployment.resolve import Deployment, resolve
from headrace.deployment.stage_memory import KEPT_FREE
from headrace.errors import StartError
from headrace.protocol.hosts import LinkFigures
from machines import FOUR_CORES, MODEL, speed

NAMES = ("ada", "bob", "eve", "joe")


def deployed(num_stages: int, speeds: list[float], computes: list[bool]) -> Deployment:
    """On so many hosts, of unlike speeds and lines; computes: whether each has bfloat16."""
    hosts = [
        structs.replace(
            FOUR_CORES, name=name, speed=speed(times), computes_bfloat16=fast, native_kernels=False
        )
        for name, times, fast in zip(NAMES, speeds, computes, strict=False)
    ]
    links = {
        (a, b): LinkFigures(1e-4 * (1 + a + 2 * b), 1e8)
        for a in range(len(hosts))
        for b in range(len(hosts))
        if a != b
    }
    config = EngineConfig(model="model.gguf", pipeline_parallel_size=num_stages, max_model_len=512)
    return resolve(config, MODEL, Cluster(hosts=tuple(hosts), links=links))


@st.composite
def lost(draw: st.DrawFn) -> tuple[Deployment, dict[int, int]]:
    """A deployment, and the memory of the hosts that are left."""
    count = draw(st.integers(2, 4))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=count, max_size=count))
    computes = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    left = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count))
    # The model has 0.3 GiB in bfloat16, twice as much in float32.
    room = {number: draw(st.integers(0, 3 << 30)) for number in left}
    return deployed(draw(st.integers(count, 6)), speeds, computes), room


@given(lost())
def test_all_layers_are_on_the_hosts_that_are_left_and_fit_or_it_is_refused(
    case: tuple[Deployment, dict[int, int]],
) -> None:
    before, room = case
    try:
        planned = plan_around(before, room)
    except StartError:
        # Twice the model, in the wider type, would have had room.
        assert min(room.values()) < 2 << 30
        return
    assert set(planned.hosts) == set(room)
    assert planned.shares[0].first_layer == 0
    assert planned.shares[-1].end_layer == MODEL.sizes.num_layers
    for share, following in zip(planned.shares, planned.shares[1:], strict=False):
        assert share.first_layer < share.end_layer == following.first_layer
    for number, free in room.items():
        own = [s for s, host in zip(planned.shares, planned.hosts, strict=True) if host == number]
        taken = sum(planned.need.weights(s) + planned.need.cache(s) for s in own)
        assert taken <= free * (1 - KEPT_FREE)
        assert planned.cluster.hosts[number].free_memory == free
    # Nothing that requests were told, or that their tokens depend on, is another.
    for name in ("ranks", "dtype", "max_model_len", "max_num_seqs", "most_window", "config"):
        assert getattr(planned, name) == getattr(before, name)
    assert planned.cluster.links == before.cluster.links
    # More memory is never too little.
    plan_around(before, {number: 2 * free for number, free in room.items()})


@given(lost())
def test_who_comes_back_runs_what_it_ran(case: tuple[Deployment, dict[int, int]]) -> None:
    before, room = case
    plenty = 64 << 30
    around = plan_around(before, dict.fromkeys(room, plenty))
    everybody = dict.fromkeys(range(len(before.cluster.hosts)), plenty)
    again = plan_around(around, everybody)
    assert (again.hosts, again.shares, again.cpus) == (before.hosts, before.shares, before.cpus)


def test_what_is_lacking_is_told_by_host() -> None:
    before = deployed(3, [1.0, 1.0, 1.0], [True] * 3)
    with pytest.raises(StartError, match=r"bob has 0.0977 GiB free and needs .* for layers"):
        plan_around(before, {0: 100 << 20, 1: 100 << 20})


def test_a_type_that_the_hosts_left_would_not_choose_stays() -> None:
    before = deployed(2, [1.0, 1.0], [True, False])
    assert before.dtype == "float32"
    assert plan_around(before, {0: 8 << 30}).dtype == "float32"
    assert plan_around(replace(before, dtype="bfloat16"), {1: 8 << 30}).dtype == "bfloat16"


def test_without_any_host_it_is_refused() -> None:
    with pytest.raises(StartError, match="no host that could run stages is left"):
        plan_around(deployed(2, [1.0, 1.0], [True, True]), {})
