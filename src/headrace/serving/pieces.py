"""Large answers in pieces: each is made in a moment, and sent when the one before it was taken."""

import asyncio
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

import msgspec

# Bytes that belong together, one after the other. Several places of an answer may share some.
Pieces = list[bytes]

_Value = TypeVar("_Value")
# What takes long: it yields after each bounded part.
Work = Generator[None, None, _Value]

# As much as a transport takes before it says that its reader is slow.
PIECE_BYTES = 64 * 1024

# JSON has no raw control characters, so nothing else can look like this.
_MARK = b"\0"
# Where fill() puts what is written already: a value of whatever type belongs there.
LATER: Any = msgspec.Raw(_MARK)


def fill(text: bytes, *values: Pieces) -> Pieces:
    """JSON with each LATER in it, in order, replaced by one of the values."""
    first, *others = text.split(_MARK)
    pieces = [first]
    for value, after in zip(values, others, strict=True):
        pieces += [*value, after]
    return pieces


def joined(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The same bytes, in pieces that are neither tiny nor, by this, huge."""
    waiting: Pieces = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            size = 0
    if waiting:
        yield b"".join(waiting)


class Text:
    """A long text as it is written."""

    def __init__(self) -> None:
        self._pieces: Pieces = []
        self._newest: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """At the end."""
        self._newest.append(part)
        self._size += len(part)
        if self._size >= PIECE_BYTES:
            self._close_piece()

    def pieces(self) -> Pieces:
        """All of it."""
        if self._newest:
            self._close_piece()
        return self._pieces

    def _close_piece(self) -> None:
        self._pieces.append(b"".join(self._newest))
        self._newest.clear()
        self._size = 0


async def in_turns(work: Work[_Value], lock: asyncio.Lock) -> _Value:
    """What the work gives, with all others' turns between its parts.

    lock: held by work that has more than one part, so that of all of it only one part is done
    before everybody else has a turn.
    """
    try:
        next(work)
        async with lock:
            while True:
                await asyncio.sleep(0)
                next(work)
    except StopIteration as end:
        value: _Value = end.value
        return value
