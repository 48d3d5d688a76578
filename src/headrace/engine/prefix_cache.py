"""Prefix caching: sequences find blocks that others have filled with the same tokens.

Only accepted tokens are shared, from blocks whose step is planned before the reader's: stages run
plans in order, so what a block is to hold is there when the reader's step runs. How soon a prompt
is computed tells what is cached; so sequences find only what others with the same salt left.
"""

from headrace.engine.block_pool import BlockPool, block_key, root_key
from headrace.engine.counters import Counters
from headrace.engine.request import Sequence, tokens_between


class PrefixCache:
    """Puts sequences' full blocks into the pool's cache and finds them there; or does nothing."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool, counters: Counters) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled
        # Full blocks of the step being planned: shared with later steps only.
        self._fresh: dict[bytes, int] = {}
        self._counters = counters

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks that the sequence may begin with; at least its last token is computed."""
        found: list[int] = []
        for number in range(self._findable(sequence)):
            block = self._pool.find(self._key(sequence, number))
            if block is None:
                break
            found.append(block)
        return found

    def begins_in_this_step(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the step being planned computes the block after the sequence's first `blocks`."""
        if not self._fresh or blocks >= self._findable(sequence):
            return False
        return self._key(sequence, blocks) in self._fresh

    def first_admitted(self, sequence: Sequence, found: int) -> None:
        """A sequence is admitted for the first time, with its first `found` tokens cached."""
        if self._enabled and not sequence.wants_prompt_logprobs:
            self._counters.prefix_cache_queries += sequence.length
            self._counters.prefix_cache_hits += found

    def chunk_planned(self, sequence: Sequence) -> None:
        """A chunk of known tokens is part of the step being planned."""
        run = sequence.running
        full = run.planned_positions // self._block_size
        if self._enabled:
            for number in range(run.published, full):
                self._fresh[self._key(sequence, number)] = run.blocks[number]
            run.published = max(full, run.published)

    def step_planned(self) -> None:
        """The step is complete: the next may share what it computes."""
        for key, block in self._fresh.items():
            self._pool.publish(block, key)
        self._fresh.clear()

    def token_accepted(self, sequence: Sequence) -> None:
        """Share the blocks that a sequence's accepted outputs have filled."""
        run = sequence.running
        full = min(sequence.length, run.planned_positions) // self._block_size
        if self._enabled:
            for number in range(run.published, full):
                self._pool.publish(run.blocks[number], self._key(sequence, number))
            run.published = max(full, run.published)

    def _findable(self, sequence: Sequence) -> int:
        """How many blocks the sequence need not compute; none if it must see all logits."""
        if not self._enabled or sequence.wants_prompt_logprobs:
            return 0
        return (sequence.length - 1) // self._block_size

    def _key(self, sequence: Sequence, number: int) -> bytes:
        """The key of a block that is full of accepted tokens; those before it are worked out too,
        but none after: most are never asked for."""
        request, own = sequence.request, sequence.keys
        of_prompt = request.prompt_keys
        if number < len(of_prompt):
            return of_prompt[number]
        size = self._block_size
        most = len(request.prompt) // size
        parent = of_prompt[-1] if of_prompt else root_key(request.salt)
        for block in range(len(of_prompt), min(number + 1, most)):
            parent = block_key(parent, request.prompt[block * size : (block + 1) * size])
            of_prompt.append(parent)
        if own:
            parent = own[-1]
        for block in range(most + len(own), number + 1):
            tokens = tokens_between(sequence, block * size, (block + 1) * size)
            parent = block_key(parent, tokens)
            own.append(parent)
        return of_prompt[number] if number < most else own[number - most]
