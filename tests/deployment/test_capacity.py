"""What hosts' rates and links mean for stages."""

from itertools import pairwise, permutations

import pytest
from msgspec.structs import replace

from headrace.deployment.capacity import capacities, hop_seconds
from headrace.deployment.partition import LayerCosts
from headrace.deployment.placement import place_stages
from headrace.deployment.stage_memory import MemoryNeed
from headrace.errors import StartError
from headrace.protocol.hosts import HostFacts, HostSpeed, KernelRates, LinkFigures
from machines import FOUR_CORES, speed

LIGHT = MemoryNeed(
    layers=(1,) * 6,
    embedding=1,
    head=1,
    caches=(1,) * 6,
    per_stage=0,
    cache_per_stage=None,
    cache_share=1.0,
)


def hosts(*times: float) -> list[HostFacts]:
    """So many times as fast as some host."""
    return [replace(FOUR_CORES, speed=speed(each)) for each in times]


def seconds(*times: float) -> list[float]:
    return [host.seconds for host in capacities(hosts(*times), "bfloat16", 2)]


def test_a_unit_of_cost_is_a_weight_read_and_multiplied() -> None:
    """2 bytes at 10 GB/s; 32 rows' multiplications and additions at 100 G/s."""
    assert seconds(1.0) == [pytest.approx(0.2e-9 + 0.64e-9)]


def test_hosts_that_differ_by_less_than_a_tenth_count_as_equally_fast() -> None:
    a, slow, b, c = seconds(1.0, 0.5, 0.95, 1.04)
    assert a == b == c
    assert slow == pytest.approx(2 * a, rel=0.1)


def test_links_that_differ_by_less_than_a_quarter_count_as_equal() -> None:
    near, as_near, far = LinkFigures(1e-4, 1e9), LinkFigures(1.2e-4, 1e9), LinkFigures(1e-2, 1e9)
    hops = hop_seconds({(0, 1): near, (1, 0): as_near, (1, 2): far}, 576, 2)
    assert hops.activations[0, 1] == hops.activations[1, 0]
    assert hops.activations[1, 2] == pytest.approx(1e-2 + 32 * 576 * 2 / 1e9)
    assert hops.feedback[1, 2] == pytest.approx(1e-2, rel=0.01)


def test_a_link_that_could_not_be_measured_is_avoided() -> None:
    near = LinkFigures(1e-4, 1e9)
    links = {pair: near for pair in permutations(range(3), 2) if pair != (0, 1)}
    found = place_stages(
        3,
        capacities(hosts(1.0, 1.0, 1.0), "bfloat16", 2),
        hop_seconds(links, 576, 2),
        LayerCosts((1,) * 6, 0, 0),
        LIGHT,
    )
    assert (0, 1) not in pairwise([*found.hosts, found.hosts[0]])
    # Nothing is known against any where nothing was measured.
    assert hop_seconds({}, 576, 2).onward(0, 1) == 0.0


def test_a_host_that_does_not_say_how_fast_it_is_is_named() -> None:
    with pytest.raises(StartError, match="host ada does not say how fast it is with bfloat16"):
        capacities([FOUR_CORES], "bfloat16", 2)
    told = replace(FOUR_CORES, speed=HostSpeed("avx2", {"float32": KernelRates(1.0, 1.0)}))
    with pytest.raises(StartError, match="host ada does not say"):
        capacities([told], "bfloat16", 2)
