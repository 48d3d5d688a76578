"""The engine's state as metrics, read when somebody asks.

The engine runs in another thread, whose newest snapshot is shown: it is made before each wait for
the stages, so all figures are of the same moment.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.deployment.model_card import ModelCard
from headrace.deployment.recovery import RecoveryStatus
from headrace.engine.rank_usage import RankUsage
from headrace.engine.snapshot import EngineSnapshot
from headrace.protocol.ranks import Ranks

# How far back the busy fraction looks.
_BUSY_WINDOW_S = 10.0
# A rank is a shard of a stage.
_RANK_LABELS = ["model_name", "stage", "shard"]

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_Source = TypeVar("_Source")


class _Figure(NamedTuple, Generic[_Source]):
    """A number of the engine or of a rank. Prometheus adds _total to names of counters."""

    family: _Family
    name: str
    documentation: str
    value: Callable[[_Source], float]


_FIGURES: list[_Figure[EngineSnapshot]] = [
    _Figure(
        GaugeMetricFamily,
        "num_requests_running",
        "Completions (a request has n of them) that have a slot and go on.",
        lambda s: s.num_running,
    ),
    _Figure(
        GaugeMetricFamily,
        "num_requests_waiting",
        "Completions (a request has n of them) that wait for a slot, preempted ones included.",
        lambda s: s.num_waiting,
    ),
    _Figure(
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "Part of the KV-cache blocks that completions own; 1 is all.",
        lambda s: s.blocks_used / s.blocks_total,
    ),
    _Figure(
        GaugeMetricFamily,
        "kv_blocks_used",
        "KV-cache blocks that completions own; 0 when nothing runs.",
        lambda s: s.blocks_used,
    ),
    _Figure(GaugeMetricFamily, "kv_blocks_total", "KV-cache blocks.", lambda s: s.blocks_total),
    _Figure(
        GaugeMetricFamily,
        "slots_used",
        "Slots in use, those to be released with the next step included; 0 when nothing runs.",
        lambda s: s.slots_used,
    ),
    _Figure(
        GaugeMetricFamily,
        "slots_total",
        "Slots: completions that can run at the same time.",
        lambda s: s.slots_total,
    ),
    _Figure(
        CounterMetricFamily,
        "prefix_cache_queries",
        "Tokens that admitted completions looked for in the prefix cache.",
        lambda s: s.prefix_cache_queries,
    ),
    _Figure(
        CounterMetricFamily,
        "prefix_cache_hits",
        "Tokens that admitted completions found in the prefix cache.",
        lambda s: s.prefix_cache_hits,
    ),
    _Figure(
        CounterMetricFamily,
        "num_preemptions",
        "How often a running completion lost its slot to an older one.",
        lambda s: s.preemptions,
    ),
    _Figure(
        GaugeMetricFamily,
        "num_microbatches",
        "Groups of decoding completions that take turns.",
        lambda s: s.num_microbatches,
    ),
    _Figure(CounterMetricFamily, "steps", "Steps planned and sent.", lambda s: s.steps),
    _Figure(
        GaugeMetricFamily,
        "steps_in_flight",
        "Steps whose result has not come.",
        lambda s: s.steps_in_flight,
    ),
]

_RECOVERY_FIGURES: list[_Figure[RecoveryStatus]] = [
    _Figure(
        CounterMetricFamily,
        "restarts",
        "How often stages were started anew after a fault.",
        lambda status: status.restarts,
    ),
    _Figure(
        CounterMetricFamily,
        "recovery_seconds",
        "Time in which nothing was computed because stages were started anew.",
        lambda status: status.seconds_at(time.monotonic()),
    ),
]

_RANK_FIGURES: list[_Figure[RankUsage]] = [
    _Figure(
        CounterMetricFamily,
        "stage_busy_seconds",
        "Time in which the stage computed.",
        lambda usage: usage.busy_s,
    ),
    _Figure(
        CounterMetricFamily,
        "stage_feedback_wait_seconds",
        "Time in which the stage waited for sampled tokens.",
        lambda usage: usage.feedback_wait_s,
    ),
    _Figure(
        CounterMetricFamily,
        "stage_activation_wait_seconds",
        "Time in which the stage waited for the stage before it.",
        lambda usage: usage.activation_wait_s,
    ),
    _Figure(
        GaugeMetricFamily,
        "stage_peak_memory_bytes",
        "The most memory that the stage ever had.",
        lambda usage: usage.peak_memory_bytes,
    ),
]


class _Shown(NamedTuple):
    """The engine that is shown."""

    card: ModelCard
    snapshot: Callable[[], EngineSnapshot]
    recovery: Callable[[], RecoveryStatus]


class EngineState(Collector):
    """Shows one engine; nothing before it is attached."""

    def __init__(self, model_name: str, clock: Callable[[], float]) -> None:
        self._model_name = model_name
        self._clock = clock
        self._engine: _Shown | None = None
        # Moments and each rank's busy seconds by then.
        self._samples: deque[tuple[float, list[float]]] = deque()

    def attach(
        self,
        card: ModelCard,
        snapshot: Callable[[], EngineSnapshot],
        recovery: Callable[[], RecoveryStatus],
    ) -> None:
        """Show this engine from now on. snapshot, recovery: give its newest."""
        engine = _Shown(card, snapshot, recovery)
        # First: another thread may collect at this very moment.
        self._sample(engine)
        self._engine = engine

    def sample(self) -> None:
        """Note how long the ranks have computed so far."""
        if self._engine is not None:
            self._sample(self._engine)

    def _sample(self, engine: _Shown) -> None:
        samples = self._samples
        samples.append((self._clock(), [usage.busy_s for usage in engine.snapshot().usage]))
        while len(samples) > 2 and samples[-1][0] - samples[1][0] >= _BUSY_WINDOW_S:
            samples.popleft()

    def collect(self) -> Iterator[Metric]:
        """What there is to see now."""
        if self._engine is None:
            return
        now, ranks = self._engine.snapshot(), self._engine.card.ranks
        for figure in _FIGURES:
            yield self._figure(figure, now)
        recovery = self._engine.recovery()
        for of_recovery in _RECOVERY_FIGURES:
            yield self._figure(of_recovery, recovery)
        for of_rank in _RANK_FIGURES:
            family = of_rank.family(
                f"headrace:{of_rank.name}", of_rank.documentation, labels=_RANK_LABELS
            )
            self._add_by_rank(family, ranks, [of_rank.value(usage) for usage in now.usage])
            yield family
        fractions = GaugeMetricFamily(
            "headrace:stage_busy_fraction",
            f"Part of the last {_BUSY_WINDOW_S:g} seconds in which the stage computed.",
            labels=_RANK_LABELS,
        )
        self._add_by_rank(fractions, ranks, self._busy_fractions(ranks.count))
        yield fractions
        yield self._cache_config(self._engine.card, now.blocks_total)

    def _figure(self, figure: _Figure[_Source], source: _Source) -> Metric:
        family = figure.family(
            f"headrace:{figure.name}", figure.documentation, labels=["model_name"]
        )
        family.add_metric([self._model_name], figure.value(source))
        return family

    def _add_by_rank(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        ranks: Ranks,
        values: list[float],
    ) -> None:
        for rank, value in enumerate(values):
            stage, shard = str(ranks.stage_of(rank)), str(ranks.shard_of(rank))
            family.add_metric([self._model_name, stage, shard], value)

    def _busy_fractions(self, num_ranks: int) -> list[float]:
        """By rank. A step counts when it is reported, so a long one could make it more than 1."""
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        if ended <= began:
            return [0.0] * num_ranks
        return [
            min(1.0, (late - early) / (ended - began))
            for early, late in zip(before, after, strict=True)
        ]

    def _cache_config(self, card: ModelCard, num_blocks: int) -> Metric:
        """Labels as in vLLM: programs that route requests read them."""
        info = GaugeMetricFamily(
            "headrace:cache_config_info",
            "How the KV cache is laid out; always 1.",
            labels=["model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"],
        )
        sizes = [str(card.block_size), str(num_blocks), str(card.prefix_caching)]
        info.add_metric([self._model_name, *sizes], 1)
        return info
