"""The KV-cache blocks that no sequence owns. Block ids mean the same on every stage."""


class BlockPool:
    """Free blocks, with reservations so that an admitted sequence never runs out.

    A sequence reserves its worst case at admission and takes blocks from the reservation as its
    positions are planned.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._reserved = 0

    @property
    def unreserved(self) -> int:
        """Blocks that are neither owned nor promised."""
        return len(self._free) - self._reserved

    @property
    def free(self) -> int:
        """Blocks that no sequence owns, promised ones included."""
        return len(self._free)

    def reserve(self, count: int) -> bool:
        """Promise `count` blocks; False, and nothing promised, if there are not so many."""
        if count > self.unreserved:
            return False
        self._reserved += count
        return True

    def take(self, count: int) -> list[int]:
        """Hand out `count` of the promised blocks."""
        assert count <= self._reserved, "took more blocks than were reserved"
        self._reserved -= count
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int], unused_reservation: int) -> None:
        """Return a sequence's blocks, and the promise of those it never took."""
        assert unused_reservation <= self._reserved
        self._reserved -= unused_reservation
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.num_blocks, "a block was given back twice"
