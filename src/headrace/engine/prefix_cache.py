"""Prefix caching: sequences find blocks that others have filled with the same tokens.

Only accepted tokens are shared, from blocks whose step is planned before the reader's: stages run
plans in order, so what a block is to hold is there when the reader's step runs.
"""

from headrace.engine.block_pool import BlockPool, block_key
from headrace.engine.request import Sequence, token_at


class PrefixCache:
    """Puts sequences' full blocks into the pool's cache and finds them there; or does nothing."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled
        # Full blocks of the step being planned: shared with later steps only.
        self._fresh: dict[bytes, int] = {}

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks that the sequence may begin with; at least its last token is computed."""
        return self._pool.find(self._findable(sequence))

    def begins_in_this_step(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the step being planned computes the block after the sequence's first `blocks`."""
        if not self._fresh:
            return False
        keys = self._findable(sequence)
        return blocks < len(keys) and keys[blocks] in self._fresh

    def chunk_planned(self, sequence: Sequence) -> None:
        """A chunk of known tokens is part of the step being planned."""
        full = sequence.planned_positions // self._block_size
        if self._enabled and full > sequence.published:
            keys = self._keys(sequence, full)
            for number in range(sequence.published, full):
                self._fresh[keys[number]] = sequence.blocks[number]
            sequence.published = full

    def step_planned(self) -> None:
        """The step is complete: the next may share what it computes."""
        for key, block in self._fresh.items():
            self._pool.publish(block, key)
        self._fresh.clear()

    def token_accepted(self, sequence: Sequence) -> None:
        """Share the blocks that a sequence's accepted outputs have filled."""
        full = min(sequence.length, sequence.planned_positions) // self._block_size
        if self._enabled and full > sequence.published:
            keys = self._keys(sequence, full)
            for number in range(sequence.published, full):
                self._pool.publish(sequence.blocks[number], keys[number])
            sequence.published = full

    def _findable(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that the sequence need not compute; none if it must see all logits."""
        if not self._enabled or sequence.wants_prompt_logprobs:
            return []
        return self._keys(sequence, (sequence.length - 1) // self._block_size)

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """The keys of the first `count` blocks, all full of accepted tokens."""
        size = self._block_size
        keys = sequence.keys
        while len(keys) < count:
            start = len(keys) * size
            tokens = [token_at(sequence, position) for position in range(start, start + size)]
            keys.append(block_key(keys[-1] if keys else b"", tokens))
        return keys[:count]
