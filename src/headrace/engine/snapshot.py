"""What an engine shows of itself: figures of one moment, which no longer change."""

import msgspec

from headrace.engine.pace import Pace
from headrace.engine.rank_usage import RankUsage
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepCost


class EngineSnapshot(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An engine's figures at one moment. The engine's thread makes it, any thread may read it.

    num_running: sequences that have a slot and go on. num_waiting: that wait for a slot, preempted
    ones included. slots_used: of slots_total, those to be released with the next step included.
    blocks_used: of blocks_total, those that sequences own; shared ones count once.
    prefix_cache_queries, prefix_cache_hits: tokens looked for in the prefix cache, and found there.
    preemptions: how often a running sequence lost its slot. num_microbatches: groups of decoding
    sequences that take turns. steps: planned so far. steps_in_flight: those whose result has not
    come. usage: what each rank reported, in all. costs: what a step costs each stage. link_s:
    seconds that a message between neighbours takes.
    """

    num_running: int
    num_waiting: int
    slots_used: int
    slots_total: int
    blocks_used: int
    blocks_total: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    num_microbatches: int
    steps: int
    steps_in_flight: int
    usage: tuple[RankUsage, ...]
    costs: tuple[StepCost, ...]
    link_s: float


def snapshot_of(scheduler: Scheduler, pace: Pace) -> EngineSnapshot:
    """The figures of this moment: a microsecond or two, in the thread that has the scheduler."""
    return EngineSnapshot(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        slots_used=scheduler.slots_used,
        slots_total=scheduler.config.max_num_seqs,
        blocks_used=scheduler.blocks_used,
        blocks_total=scheduler.config.num_blocks,
        prefix_cache_queries=scheduler.counters.prefix_cache_queries,
        prefix_cache_hits=scheduler.counters.prefix_cache_hits,
        preemptions=scheduler.counters.preemptions,
        num_microbatches=scheduler.num_microbatches,
        steps=scheduler.counters.steps,
        steps_in_flight=scheduler.steps_in_flight,
        usage=pace.usage,
        costs=pace.costs,
        link_s=pace.link_s,
    )
