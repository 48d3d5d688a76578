"""Which host runs which stages, and which layers: unlike hosts, each as much as it can.

The goal, in this order: everything fits the hosts' memory; the slowest stage, whose pace is the
pipeline's, takes as little time as possible, a fiftieth more or less; the messages of a step take
as little time as possible; hosts stand by their node ranks. In the order so found, layers are split
with the fastest slowest stage, and earlier stages have fewer.

A host's stages are consecutive, as many as any other's or one more, and share its cores evenly.
Exact up to eight hosts. Beyond, the order is one that no swap of two hosts makes better, looked for
from the node ranks on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.deployment.capacity import HopSeconds, HostCapacity
from headrace.deployment.partition import LayerCosts, check_stage_count, stage_shares
from headrace.deployment.stage_memory import MemoryNeed, gib
from headrace.errors import StartError, UsageError

# Hosts of which all orders are looked at.
_EXACT_HOSTS = 8
# Orders whose slowest stages differ by less count as equally fast: rates are not known better, and
# else hardly two orders were equal, so that links would never count.
_AS_FAST = 1.02

_Grid = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """By stage: its host's number, and how many layers it has."""

    hosts: tuple[int, ...]
    layers: tuple[int, ...]


def place_stages(
    num_stages: int,
    hosts: Sequence[HostCapacity],
    hops: HopSeconds,
    costs: LayerCosts,
    need: MemoryNeed,
) -> Placement:
    """The best placement.

    Raises StartError that says what each host lacks if the model fits in no way, UsageError for
    fewer stages than hosts or more than layers.
    """
    check_stage_count(len(costs.layers), num_stages)
    grids = _Grids(hosts, stages_by_host(num_stages, hosts), costs, need)
    order = _best_order(grids, hops) if len(hosts) <= _EXACT_HOSTS else None
    if order is None:
        order = _swapped_order(grids, hops)
    missing = _least(grids.missing_along(order), np.add)
    if missing > 0:
        spans = _spans(grids.missing_along(order), missing, np.add)
        placement = _placement(grids, order, spans, np.finfo(float).max)
        check_memory(placement, hosts, need)
    slowest = _least(grids.seconds_along(order), np.maximum)
    spans = _spans(grids.seconds_along(order), slowest, np.maximum)
    return _placement(grids, order, spans, slowest)


def place_partition(
    layers: Sequence[int], hosts: Sequence[HostCapacity], need: MemoryNeed
) -> Placement:
    """So many layers by stage on the hosts in the order of their node ranks.

    Raises StartError that says what each host lacks, UsageError for fewer stages than hosts.
    """
    counts = stages_by_host(len(layers), hosts)
    by_stage = tuple(host for host, count in enumerate(counts) for _ in range(count))
    placement = Placement(by_stage, tuple(layers))
    check_memory(placement, hosts, need)
    return placement


def stages_by_host(num_stages: int, hosts: Sequence[HostCapacity]) -> list[int]:
    """How many stages each host runs: as many as any other, or one more if it is faster.

    Raises UsageError if there are fewer stages than hosts.
    """
    if num_stages < len(hosts):
        raise UsageError(
            f"--pipeline-parallel-size {num_stages} is less than the {len(hosts)} hosts: each host "
            "runs one stage at least"
        )
    each, more = divmod(num_stages, len(hosts))
    fastest = sorted(range(len(hosts)), key=lambda host: hosts[host].seconds)[:more]
    return [each + (host in fastest) for host in range(len(hosts))]


def check_memory(placement: Placement, hosts: Sequence[HostCapacity], need: MemoryNeed) -> None:
    """Raises StartError that says what each host lacks if the stages do not fit."""
    shares = stage_shares(list(placement.layers))
    weights, cache = np.zeros(len(hosts)), np.zeros(len(hosts))
    spans: list[list[int]] = [[] for _ in hosts]
    for host, share in zip(placement.hosts, shares, strict=True):
        weights[host] += need.weights(share) + need.per_stage
        cache[host] += need.cache(share)
        spans[host] += [share.first_layer, share.end_layer - 1]
    lacking = [
        f"{host.name} has {gib(host.free)} free and needs {gib(wanted)} for layers {min(span)} to "
        f"{max(span)}"
        for host, wanted, span in zip(hosts, need.free(weights, cache), spans, strict=True)
        if wanted > host.free
    ]
    if lacking:
        raise StartError(
            f"not enough memory for the model's weights, {gib(weights.sum())}, and its least "
            f"cache, {gib(cache.sum())}, a fifth being left free: {'; '.join(lacking)}. Free "
            "memory there, add a host, or lower --max-model-len"
        )


@dataclass
class _Grids:
    """What each host would take for layers [first, end), float64 [layers + 1, layers + 1], if it
    came first or last in the pipeline or not; inf for what it cannot run."""

    hosts: Sequence[HostCapacity]
    counts: Sequence[int]
    costs: LayerCosts
    need: MemoryNeed
    _kept: dict[tuple[str, int, bool, bool], _Grid] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.costs.layers)

    def seconds_along(self, order: Sequence[int]) -> list[_Grid]:
        """Of the slowest stage, of each host in a whole pipeline of this order."""
        last = len(order) - 1
        return [self.seconds(host, at == 0, at == last) for at, host in enumerate(order)]

    def missing_along(self, order: Sequence[int]) -> list[_Grid]:
        """Bytes of memory, of each host in a whole pipeline of this order."""
        last = len(order) - 1
        return [self.missing(host, at == 0, at == last) for at, host in enumerate(order)]

    def seconds(self, host: int, first: bool, last: bool) -> _Grid:
        """Of the slowest stage, inf where the host's memory is too small."""
        key = ("seconds", host, first, last)
        if key not in self._kept:
            grid, *others = self.stages(host, first, last)
            for other in others:
                grid = np.maximum(grid[:, :, None], other[None]).min(axis=1)
            self._kept[key] = np.where(self.missing(host, first, last) > 0, np.inf, grid)
        return self._kept[key]

    def stages(self, host: int, first: bool, last: bool) -> list[_Grid]:
        """Seconds of each of the host's stages, whatever memory it takes."""
        costs, count = self.costs, self.counts[host]
        unit = self.hosts[host].seconds * count
        grids = []
        for stage in range(count):
            ends = costs.embedding * (first and stage == 0)
            ends += costs.head * (last and stage == count - 1)
            grid = (_sums(costs.layers) + ends) * unit
            grid[_fewer_layers(self.num_layers, 1)] = np.inf
            grids.append(grid)
        return grids

    def missing(self, host: int, first: bool, last: bool) -> _Grid:
        """Bytes of memory; inf where a stage would have no layer."""
        key = ("missing", host, first, last)
        if key not in self._kept:
            need, count = self.need, self.counts[host]
            weights = _sums(need.layers) + need.embedding * first + need.head * last
            weights += need.per_stage * count
            cache = _sums(need.caches)
            if need.cache_per_stage is not None:
                cache[:] = need.cache_per_stage * count
            grid = np.maximum(need.free(weights, cache) - self.hosts[host].free, 0.0)
            grid[_fewer_layers(self.num_layers, count)] = np.inf
            self._kept[key] = grid
        return self._kept[key]


def _best_order(grids: _Grids, hops: HopSeconds) -> tuple[int, ...] | None:
    """Of all orders with a fast slowest stage the one of the shortest way; None if nothing fits."""
    count, everybody = len(grids.hosts), (1 << len(grids.hosts)) - 1
    tails = _tails(grids)
    slowest = tails[everybody][0] * _AS_FAST
    if np.isinf(slowest):
        return None
    # What no order can go below, for each hop that is still to come.
    least_hop = min(hops.activations.values(), default=0.0)
    least_feedback = min(hops.feedback.values(), default=0.0)
    best, best_s = None, np.inf

    def extend(order: tuple[int, ...], left: int, reached: NDArray[np.bool_], way: float) -> None:
        nonlocal best, best_s
        if not left:
            way += hops.back(order[-1], order[0])
            if best is None or way < best_s:
                best, best_s = order, way
            return
        for host in range(count):
            rest = left & ~(1 << host)
            if rest == left:
                continue
            longer = way + (hops.onward(order[-1], host) if order else 0.0)
            foreseen = longer + least_hop * rest.bit_count() + least_feedback * (count > 1)
            # Sums of the same numbers in another order differ in the last bits.
            if foreseen >= best_s * (1 - 1e-9):
                continue
            grid = grids.seconds(host, not order, not rest)
            onward = (grid[reached] <= slowest).any(axis=0) & (tails[rest] <= slowest)
            if onward.any():
                extend((*order, host), rest, onward, longer)

    start = np.zeros(grids.num_layers + 1, bool)
    start[0] = True
    extend((), everybody, start, 0.0)
    return best


def _tails(grids: _Grids) -> list[_Grid]:
    """By set of hosts, as bits: the least seconds of the slowest stage if they come last in the
    pipeline, in whatever order, by the number of layers before them."""
    count = len(grids.hosts)
    tails = [np.full(grids.num_layers + 1, np.inf) for _ in range(1 << count)]
    tails[0][-1] = 0.0
    for later, tail in enumerate(tails):
        for host in range(count):
            longer = later | 1 << host
            if longer != later:
                grid = grids.seconds(host, longer == len(tails) - 1, later == 0)
                own = np.maximum(grid, tail).min(axis=1)
                tails[longer] = np.minimum(tails[longer], own)
    return tails


def _swapped_order(grids: _Grids, hops: HopSeconds) -> tuple[int, ...]:
    """One whose slowest stage no swap of two hosts makes faster, and then one whose way no swap
    makes shorter; what is missing counts before all else."""

    def missing(order: tuple[int, ...]) -> float:
        return _least(grids.missing_along(order), np.add)

    def slowest(order: tuple[int, ...]) -> float:
        return _least(grids.seconds_along(order), np.maximum)

    def way(order: tuple[int, ...]) -> float:
        seconds = sum(hops.onward(*ends) for ends in pairwise(order))
        return seconds + hops.back(order[-1], order[0])

    order = tuple(range(len(grids.hosts)))
    order = _swapped(order, lambda order: (missing(order), slowest(order)))
    allowed = slowest(order) * _AS_FAST
    return _swapped(order, lambda order: (missing(order), slowest(order) > allowed, way(order)))


def _swapped(
    order: tuple[int, ...], score: Callable[[tuple[int, ...]], tuple[float, ...]]
) -> tuple[int, ...]:
    """An order of hosts of which no swap of two has a lower score."""
    best, better = score(order), True
    while better:
        better = False
        for a, b in combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[a], swapped[b] = order[b], order[a]
            if (found := score(tuple(swapped))) < best:
                order, best, better = tuple(swapped), found, True
    return order


def _placement(
    grids: _Grids, order: Sequence[int], spans: Sequence[tuple[int, int]], slowest: float
) -> Placement:
    """Each host's layers given to its stages, none of which takes longer than `slowest`."""
    hosts: list[int] = []
    layers: list[int] = []
    for at, (host, (first, end)) in enumerate(zip(order, spans, strict=True)):
        stages = grids.stages(host, at == 0, at == len(order) - 1)
        inner = [grid[first : end + 1, first : end + 1] for grid in stages]
        for stage_first, stage_end in _spans(inner, slowest, np.maximum):
            hosts.append(host)
            layers.append(stage_end - stage_first)
    return Placement(tuple(hosts), tuple(layers))


def _least(grids: Sequence[_Grid], combine: np.ufunc) -> float:
    """Of all ways to cut the layers into spans, one for each grid, the least that its parts,
    combined, come to."""
    return float(_heads(grids, combine)[-1][-1])


def _spans(grids: Sequence[_Grid], most: float, combine: np.ufunc) -> list[tuple[int, int]]:
    """Those of a way that comes to no more than `most`, the last ones as long as possible."""
    heads, spans = _heads(grids, combine), []
    end, behind = len(grids[0]) - 1, 0.0
    for grid, head in zip(reversed(grids), reversed(heads[:-1]), strict=True):
        way = combine(combine(head, grid[:, end]), behind)
        first = int((way <= most).argmax())
        spans.append((first, end))
        behind, end = combine(behind, grid[first, end]), first
    return spans[::-1]


def _heads(grids: Sequence[_Grid], combine: np.ufunc) -> list[_Grid]:
    """After none, one and so on of the grids: the least to come to, by the number of layers so
    far."""
    start = np.full(len(grids[0]), np.inf)
    start[0] = 0.0
    heads = [start]
    for grid in grids:
        heads.append(combine(heads[-1][:, None], grid).min(axis=0))
    return heads


def _sums(values: Sequence[int]) -> _Grid:
    """[first, end]: of values[first:end]."""
    before = np.concatenate(([0], np.cumsum(values)))
    sums: _Grid = (before[None, :] - before[:, None]).astype(float)
    return sums


def _fewer_layers(num_layers: int, least: int) -> NDArray[np.bool_]:
    """[first, end]: whether these are fewer layers than that."""
    numbers = np.arange(num_layers + 1)
    return numbers[None, :] - numbers[:, None] < least
