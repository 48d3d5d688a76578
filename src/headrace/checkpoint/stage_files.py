"""What a stage needs of a model's files: its own tensors, headers, and small files without any."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from headrace.checkpoint.extents import header_bytes, tensor_extents
from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.tensor_check import tensors_of
from headrace.errors import ModelError
from headrace.protocol.program import Program
from headrace.protocol.stage_files import FileSize, Piece, StageFiles

# Of a piece at most.
_PIECE_BYTES = 1 << 22
# Of configurations and tokenizers; larger files hold something else.
_SMALL = (".json", ".jinja", ".model", ".txt")
_MOST_SMALL_BYTES = 1 << 26
_DIGEST_BYTES = 16


def stage_files(files: ModelFiles, program: Program) -> StageFiles:
    """The pieces from which received_files.py makes a model that this share of it loads from.

    No piece has bytes of two tensors, so shares that overlap have pieces in common. Raises
    ModelError if files are missing or damaged, or a tensor of the program is.
    """
    if files.kind == "synthetic":
        raise ModelError(f"model synthetic:{files.path} has no files to send")
    folder = files.path.parent if files.kind == "gguf" else files.path
    extents = tensor_extents(files)
    # Where the file's header ends, by file.
    if files.kind == "gguf":
        headers = {files.path: min(extent.offset for extent in extents.values())}
        small: list[Path] = []
    else:
        headers = {file: header_bytes(file) for file in {each.file for each in extents.values()}}
        small = _small_files(folder)
    wanted: dict[Path, set[tuple[int, int]]] = {file: {(0, headers[file])} for file in headers}
    wanted |= {file: {(0, file.stat().st_size)} for file in small}
    for tensor in tensors_of(program):
        extent = extents.get(tensor.name)
        if extent is not None:
            wanted[extent.file].add((extent.offset, extent.nbytes))
        elif not tensor.optional:
            raise ModelError(f"model {files.path}: tensor {tensor.name} is missing")
    names = {file: file.relative_to(folder).as_posix() for file in sorted(wanted)}
    return StageFiles(
        kind=files.kind,
        model=files.path.name if files.kind == "gguf" else "",
        files=tuple(FileSize(name, file.stat().st_size) for file, name in names.items()),
        pieces=tuple(
            Piece(name, start, size)
            for file, name in names.items()
            for offset, nbytes in sorted(wanted[file])
            for start, size in _cut(offset, nbytes)
        ),
    )


def read_piece(files: ModelFiles, piece: Piece) -> bytes:
    """The bytes of one of stage_files()' pieces. Raises ModelError if the file is not what it
    was."""
    folder = files.path.parent if files.kind == "gguf" else files.path
    try:
        with (folder / piece.file).open("rb") as file:
            data = os.pread(file.fileno(), piece.nbytes, piece.offset)
    except OSError as error:
        raise ModelError(f"{folder / piece.file}: cannot be read: {error.strerror}") from error
    if len(data) != piece.nbytes:
        raise ModelError(f"{folder / piece.file} has become shorter while it was sent")
    return data


def piece_digest(data: bytes) -> str:
    """The hash that goes with a piece, in hexadecimal."""
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _small_files(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.iterdir()
        if file.suffix in _SMALL and file.is_file() and file.stat().st_size <= _MOST_SMALL_BYTES
    ]


def _cut(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(offset, offset + nbytes, _PIECE_BYTES):
        yield start, min(_PIECE_BYTES, offset + nbytes - start)
