from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from headrace.engine.block_pool import BlockPool, block_key

NUM_BLOCKS = 12


class Pool(RuleBasedStateMachine):
    """Any order of taking, publishing, sharing and giving back."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: dict[int, list[int]] = {}
        # Which key a block was published under, until it is given out anew.
        self.key_of: dict[int, bytes] = {}
        # Free published blocks, least recently freed first.
        self.evictable: list[int] = []
        self.next_holder = 0

    @rule(target=holders, count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> int:
        count = min(count, self.pool.free)
        blank = NUM_BLOCKS - len({b for held in self.held.values() for b in held})
        blank -= len(self.evictable)
        evicted, self.evictable = (
            self.evictable[: max(0, count - blank)],
            self.evictable[max(0, count - blank) :],
        )
        blocks = self.pool.take(count)
        assert set(evicted) == set(blocks) & set(self.key_of), "blank first, then the oldest"
        for block in blocks:
            self.key_of.pop(block, None)
        return self.hold(blocks)

    @rule(holder=holders, place=st.integers(0, 3), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, holder: int, place: int, key: bytes) -> None:
        if place < len(self.held[holder]):
            block = self.held[holder][place]
            self.pool.publish(block, key)
            if key not in self.key_of.values():
                self.key_of.setdefault(block, key)

    @rule(target=holders, keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=3))
    def share(self, keys: list[bytes]) -> int:
        by_key = {key: block for block, key in self.key_of.items()}
        found = []
        for key in dict.fromkeys(keys):
            block = self.pool.find(key)
            assert block == by_key.get(key)
            if block is not None:
                found.append(block)
        free = self.pool.free_after_sharing(found)
        self.pool.share(found)
        assert self.pool.free == free
        self.evictable = [block for block in self.evictable if block not in found]
        return self.hold(found)

    @rule(holder=consumes(holders))
    def give_back(self, holder: int) -> None:
        blocks = self.held.pop(holder)
        self.pool.give_back(blocks)
        still = {b for held in self.held.values() for b in held}
        self.evictable += [b for b in reversed(blocks) if b not in still and b in self.key_of]

    def hold(self, blocks: list[int]) -> int:
        holder, self.next_holder = self.next_holder, self.next_holder + 1
        self.held[holder] = blocks
        return holder

    @invariant()
    def blocks_are_held_or_free_and_none_leaks(self) -> None:
        held = {block for blocks in self.held.values() for block in blocks}
        assert held <= set(range(NUM_BLOCKS))
        assert self.pool.free == NUM_BLOCKS - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_key_tells_tokens_and_everything_before_them() -> None:
    first = block_key(b"", [1, 2])
    assert first == block_key(b"", [1, 2])
    keys = {first, block_key(b"", [2, 1]), block_key(first, [1, 2]), block_key(first, [3, 4])}
    assert len(keys) == 4


def test_the_beginning_of_a_prefix_is_evicted_last() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.give_back(blocks)
    assert pool.take(1) == [blocks[2]]
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [*blocks[:2], None]
