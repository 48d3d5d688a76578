"""A model of which only what a stage needs is there: made of pieces that another host sent.

Its files are as long as the originals, so what was not sent takes no room on the disk and is never
read. A journal beside them tells which pieces are there, and their hashes: an interrupted transfer
goes on where it was, and a stage that is given more layers receives only those.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import msgspec

from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.stage_files import piece_digest, read_piece
from headrace.errors import ModelError
from headrace.protocol.stage_files import Piece, StageFiles

_JOURNAL = ".received"


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    piece: Piece
    digest: str


class ReceivedFiles:
    """A folder that pieces are put into. One at a time may have it open.

    missing: numbers of the pieces that are still to come, in order.
    """

    def __init__(
        self,
        folder: Path,
        wanted: StageFiles,
        on_there: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Make the folder, or look which pieces are in it already, by their hashes.

        on_there: told the bytes of each that is, which takes a while where there are many.

        Raises ModelError for names that lead out of the folder, if there is no room on the disk, or
        the folder cannot be written.
        """
        self._folder = folder
        self._wanted = wanted
        _check(wanted)
        self.files = ModelFiles(folder / wanted.model, wanted.kind)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in wanted.files:
                path = folder / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                # Those that are there keep their content.
                os.truncate(path, file.nbytes)
            there = self._read_journal()
        except OSError as error:
            raise ModelError(f"{folder}: cannot be written: {error.strerror}") from error
        self.missing: list[int] = []
        for number, piece in enumerate(wanted.pieces):
            if piece in there and piece_digest(read_piece(self.files, piece)) == there[piece]:
                on_there(piece.nbytes)
            else:
                self.missing.append(number)
        status = os.statvfs(folder)
        if self.missing_bytes > status.f_bavail * status.f_frsize:
            raise ModelError(
                f"{folder}: {self.missing_bytes / 2**30:.3g} GiB of weights are to come, and the "
                f"disk has {status.f_bavail * status.f_frsize / 2**30:.3g} GiB free: make room, or "
                "name a folder on another disk by XDG_CACHE_HOME"
            )

    @property
    def missing_bytes(self) -> int:
        """Of all pieces that are still to come."""
        return sum(self._wanted.pieces[number].nbytes for number in self.missing)

    def put(self, number: int, data: bytes, digest: str) -> None:
        """Keep a piece. digest: as its sender reckons it.

        Raises ModelError if it is not what was sent or is not missing, or cannot be written.
        """
        if number not in self.missing:
            raise ModelError(f"piece {number} came, which is none of those that are missing")
        piece = self._wanted.pieces[number]
        if len(data) != piece.nbytes or piece_digest(data) != digest:
            raise ModelError(
                f"{piece.file}: the {piece.nbytes} bytes at {piece.offset} came damaged: start "
                "again, and if it stays so, look at the file on the host that sends it"
            )
        try:
            with (self._folder / piece.file).open("r+b") as file:
                file.seek(piece.offset)
                file.write(data)
            # Whatever of it does not reach the disk shows when its hash is looked at.
            with (self._folder / _JOURNAL).open("ab") as journal:
                journal.write(msgspec.json.encode(_Entry(piece, digest)) + b"\n")
        except OSError as error:
            raise ModelError(
                f"{self._folder / piece.file}: cannot be written: {error.strerror}"
            ) from error
        self.missing.remove(number)

    def _read_journal(self) -> dict[Piece, str]:
        try:
            lines: Iterable[bytes] = (self._folder / _JOURNAL).read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        there = {}
        for line in lines:
            try:
                entry = msgspec.json.decode(line, type=_Entry)
            except msgspec.MsgspecError:
                # The last line of a transfer that was cut off.
                continue
            there[entry.piece] = entry.digest
        return there


def _check(wanted: StageFiles) -> None:
    """Raises ModelError for names that lead out of the folder, and pieces out of their files."""
    sizes = {file.name: file.nbytes for file in wanted.files}
    for name in [wanted.model, *sizes]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or _JOURNAL in path.parts:
            raise ModelError(f"the files to receive include {name[:200]!r}, which is no model file")
    for piece in wanted.pieces:
        if not 0 <= piece.offset <= piece.offset + piece.nbytes <= sizes.get(piece.file, -1):
            raise ModelError(f"the files to receive include no such bytes of {piece.file[:200]!r}")
