from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from headrace.engine.block_pool import BlockPool

NUM_BLOCKS = 12


class Pool(RuleBasedStateMachine):
    """Any order of reserving, taking and giving back."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owned: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.next_owner = 0

    @rule(target=owners, count=st.integers(0, NUM_BLOCKS + 2))
    def reserve(self, count: int) -> int:
        room = NUM_BLOCKS - sum(map(len, self.owned.values())) - sum(self.reserved.values())
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        granted = self.pool.reserve(count)
        assert granted == (count <= room)
        self.owned[owner], self.reserved[owner] = [], count if granted else 0
        return owner

    @rule(owner=owners, data=st.data())
    def take(self, owner: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.reserved[owner]))
        self.owned[owner] += self.pool.take(count)
        self.reserved[owner] -= count

    @rule(owner=consumes(owners))
    def give_back(self, owner: int) -> None:
        self.pool.give_back(self.owned.pop(owner), self.reserved.pop(owner))

    @invariant()
    def no_block_has_two_owners_and_none_leaks(self) -> None:
        taken = [block for blocks in self.owned.values() for block in blocks]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(NUM_BLOCKS))
        assert self.pool.free == NUM_BLOCKS - len(taken)
        assert self.pool.unreserved == self.pool.free - sum(self.reserved.values())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
