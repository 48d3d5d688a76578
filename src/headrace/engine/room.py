"""Slots and cache blocks: who has them, and what the prefix cache holds of them."""

from headrace.engine.block_pool import BlockPool
from headrace.engine.counters import Counters
from headrace.engine.limits import SchedulerConfig
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.request import Run, Sequence


class Room:
    """What the ranks have for sequences, in one epoch."""

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        self._config = config
        self._pool = BlockPool(config.num_blocks)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.cache = PrefixCache(self._pool, config.block_size, config.prefix_caching, counters)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._free_slots)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return self._pool.free

    @property
    def free_fraction(self) -> float:
        """Those, of all."""
        return self._pool.free / self._pool.num_blocks

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences own; shared ones count once."""
        return self._pool.num_blocks - self._pool.free

    def fits(self, sequence: Sequence, cached: list[int], promised: int) -> bool:
        """Whether its whole prefill fits, beside so many blocks promised to others.

        cached: the blocks that it finds in the prefix cache.
        """
        needed = self._config.blocks_for(sequence.length) - len(cached)
        return needed + promised <= self._pool.free_after_sharing(cached)

    def admit(self, sequence: Sequence, cached: list[int]) -> Run:
        """Give it a slot, of those that are free, and the blocks that it found."""
        self._pool.share(cached)
        sequence.run = Run(
            slot=self._free_slots.pop(),
            known=sequence.request.prompt + sequence.outputs,
            blocks=list(cached),
            published=len(cached),
            planned_positions=len(cached) * self._config.block_size,
        )
        return sequence.run

    def extend(self, run: Run, tokens: int) -> list[int] | None:
        """The blocks that it is given for its next tokens; None if there are not enough."""
        missing = self._config.blocks_for(run.planned_positions + tokens) - len(run.blocks)
        if missing > self._pool.free:
            return None
        blocks = self._pool.take(max(0, missing))
        run.blocks.extend(blocks)
        return blocks

    def positions_left(self, run: Run) -> int:
        """Positions that its blocks and the free ones have, beyond those planned."""
        blocks = len(run.blocks) + self._pool.free
        return blocks * self._config.block_size - run.planned_positions

    def release(self, sequence: Sequence) -> int:
        """End its run; the slot that it had."""
        run, sequence.run = sequence.running, None
        self._free_slots.append(run.slot)
        self._pool.give_back(run.blocks)
        return run.slot
