"""What decoding a body would cost, before it is decoded: decoding stops everybody else.

A million numbers take some 20 ms, and everything else in JSON takes longer by the piece. Texts cost
next to nothing, however long they are.
"""

import asyncio
from collections.abc import Iterator

from headrace.serving.api_errors import ApiError

# Smaller ones cannot cost much, whatever is in them.
SMALL = 64 * 1024
# As much as is looked at in one go.
_PIECE = 64 * 1024
# Each byte outside of texts counts as one, and what takes longer as more.
_MOST_WORK = 3_000_000
_TEXT, _CONTAINER, _MEMBER = 15, 40, 20
# Numbers this long are turned into integers of Python in time that grows with the square.
_MOST_DIGITS = 400
_LONG_NUMBER = b"0" * _MOST_DIGITS
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONGEST_NAME = 100


async def check_work(data: bytearray) -> None:
    """Raises ApiError, naming the field, for a body with more in it than anything asks for.

    Others have their turn all the while. Whether it is JSON is not looked at.
    """
    scan = _Scan()
    for piece in _pieces(data):
        scan.take(piece)
        await asyncio.sleep(0)


def _pieces(data: bytearray) -> Iterator[bytes]:
    """All of it in pieces of a bounded size, none of which ends within an escape."""
    at = 0
    while at < len(data):
        piece = bytes(data[at : at + _PIECE])
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2 and at + len(piece) < len(data):
            # The last of them belongs to what comes next.
            piece = piece[:-1]
        yield piece
        at += len(piece)


class _Scan:
    """Reads JSON in pieces that do not end within an escape.

    depth: of lists and objects around what comes next. field: the last name in the outermost
    object. text: how the text began that is not over yet, None outside of texts.
    """

    def __init__(self) -> None:
        self.work = 0
        self.depth = 0
        self.field = ""
        self.text: bytes | None = None
        # The last text in the outermost object, which may be a field's name.
        self._last = b""

    def take(self, piece: bytes) -> None:
        """Count one more piece. Raises ApiError for what is too much."""
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        for number, part in enumerate(piece.split(b'"')):
            if number:
                self._quote()
            if self.text is not None:
                self.text += part[: _LONGEST_NAME - len(self.text)]
            elif part:
                self._between(part)
            if self.work > _MOST_WORK:
                self._refuse(
                    "there is more in it than one request may have, which is some 400,000 token "
                    "ids or 150,000 texts: send several requests"
                )

    def _quote(self) -> None:
        if self.text is None:
            self.text = b""
            self.work += _TEXT
        else:
            if self.depth == 1:
                self._last = self.text
            self.text = None

    def _between(self, part: bytes) -> None:
        """What stands between two texts."""
        if self.depth == 1 and part.lstrip()[:1] == b":":
            self.field = self._last.decode(errors="replace")
        self.work += len(part)
        if part == b",":
            # As in lists of texts, of which there are many.
            return
        opened = part.count(b"[") + part.count(b"{")
        self.work += _CONTAINER * opened + _MEMBER * part.count(b":")
        self.depth += opened - part.count(b"]") - part.count(b"}")
        if len(part) >= _MOST_DIGITS and _LONG_NUMBER in part.translate(_ZEROS):
            self._refuse(f"there is a number of more than {_MOST_DIGITS} digits in it")

    def _refuse(self, why: str) -> None:
        raise ApiError(400, f"{self.field or 'the body'}: {why}", param=self.field or None)
