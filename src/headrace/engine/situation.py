"""What a prefill policy is told of the moment at which a step is planned."""

from collections.abc import Iterable

from headrace.engine.limits import SchedulerConfig
from headrace.engine.microbatches import Microbatches
from headrace.engine.prefill_policy import Situation
from headrace.engine.request import Sequence
from headrace.engine.room import Room
from headrace.engine.step_cost import StepCost, StepWork, chunk_attended, total_work
from headrace.engine.waiting import WaitingQueue


def situation_of(
    config: SchedulerConfig,
    groups: Microbatches,
    prefilling: Iterable[Sequence],
    waiting: WaitingQueue,
    room: Room,
    *,
    decode: StepWork,
    cost: StepCost,
    max_step_s: float | None,
) -> Situation:
    """decode: work of the step's decode rows; the rest as in Situation."""
    return Situation(
        decode=decode,
        mean_decode=StepWork(*(part // groups.count for part in groups.decode_work)),
        pending=total_work(
            [*map(_prefill_left, prefilling), _admissible(config, waiting, room)],
        ),
        num_microbatches=groups.count,
        free_fraction=room.free_fraction,
        cost=cost,
        max_tokens=config.max_num_batched_tokens,
        max_step_s=max_step_s,
    )


def _prefill_left(sequence: Sequence) -> StepWork:
    run = sequence.running
    left = run.prefill_left
    sampled = left if sequence.wants_prompt_logprobs else 1
    return StepWork(left, chunk_attended(run.planned_positions, left), sampled)


def _admissible(config: SchedulerConfig, waiting: WaitingQueue, room: Room) -> StepWork:
    """What waiting sequences would bring if as many were admitted as have slots and blocks."""
    work = waiting.work
    if not work.tokens:
        return work
    positions = room.free_blocks * config.block_size
    share = min(1.0, room.free_slots / len(waiting), positions / work.tokens)
    return StepWork(*(int(part * share) for part in work))
