"""The KV-cache blocks: who holds them, and which hold tokens worth finding again.

Block ids mean the same on every stage, so one pool speaks for all of them.
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b


class BlockPool:
    """Blocks with reference counts, and the prefix cache over them.

    A block is owned (count above 0), evictable (free, but its tokens can be found by key) or blank.
    Blank blocks are given out first, then evictable ones, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that no sequence owns, evictable ones included."""
        return len(self._blank) + len(self._evictable)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has checked that so many are free."""
        assert count <= self.free, "took more blocks than are free"
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._by_key[self._key_of.pop(block)]
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block that was published with this key, if it has not been given out anew."""
        return self._by_key.get(key)

    def free_after_sharing(self, blocks: list[int]) -> int:
        """How many blocks were free once these had one more owner each."""
        return self.free - sum(self._owners[block] == 0 for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """Add an owner to each of these blocks, found in the cache."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._evictable[block]
            self._owners[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """Let an owned, full block be found by the key of its tokens, unless another one is."""
        assert self._owners[block] > 0, "a block was published that nobody owns"
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def give_back(self, blocks: list[int]) -> None:
        """Take an owner from each of a sequence's blocks, given in the order of its positions."""
        # From the end, so that the beginning of a prefix, which more may share, is evicted last.
        for block in reversed(blocks):
            self._owners[block] -= 1
            assert self._owners[block] >= 0, "a block was given back twice"
            if self._owners[block] == 0:
                if block in self._key_of:
                    self._evictable[block] = None
                else:
                    self._blank.append(block)


def root_key(salt: bytes) -> bytes:
    """What the first blocks of sequences with this salt have for a parent; nothing without one."""
    return blake2b(salt, digest_size=16, person=b"salt").digest() if salt else b""


def block_key(parent: bytes, tokens: list[int]) -> bytes:
    """The key of a full block: a digest of its tokens and, through its parent's key, all before.

    A cryptographic hash, since a collision would put one request's text into another's answer.
    """
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()
