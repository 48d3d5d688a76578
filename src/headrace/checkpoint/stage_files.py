"""What a stage needs of a model's files: its own tensors, headers, and configuration."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from headrace.checkpoint.extents import header_bytes, tensor_extents
from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.safetensors_files import INDEX
from headrace.checkpoint.tensor_check import tensors_of
from headrace.errors import ModelError
from headrace.protocol.program import Program
from headrace.protocol.stage_files import FileSize, Piece, StageFiles

# Of a piece at most.
PIECE_BYTES = 1 << 22
# Files without tensors that a stage needs, or that tell people what lies there.
_CONFIGURATION = ("config.json", INDEX)
_DIGEST_BYTES = 16


def stage_files(files: ModelFiles, *programs: Program) -> StageFiles:
    """The pieces from which received_files.py makes a model that these shares of it load from.

    Without programs, those that all shares have in common. No piece has bytes of two tensors, so
    shares that overlap have pieces in common. Raises ModelError if files are missing or damaged, or
    a tensor of a program is.
    """
    if files.kind == "synthetic":
        raise ModelError(f"model synthetic:{files.path} has no files to send")
    folder = files.path.parent if files.kind == "gguf" else files.path
    extents = tensor_extents(files)
    # Where the file's header ends, by file.
    if files.kind == "gguf":
        headers = {files.path: min(extent.offset for extent in extents.values())}
        configuration: list[Path] = []
    else:
        headers = {file: header_bytes(file) for file in {each.file for each in extents.values()}}
        configuration = [folder / name for name in _CONFIGURATION if (folder / name).is_file()]
    wanted: dict[Path, set[tuple[int, int]]] = {file: {(0, headers[file])} for file in headers}
    wanted |= {file: {(0, file.stat().st_size)} for file in configuration}
    for tensor in (each for program in programs for each in tensors_of(program)):
        for name, _ in tensor.stored:
            extent = extents.get(name)
            if extent is not None:
                wanted[extent.file].add((extent.offset, extent.nbytes))
            elif not tensor.optional:
                raise ModelError(f"model {files.path}: tensor {name} is missing")
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


def files_identity(files: ModelFiles, weights: str) -> str:
    """A hash, in hexadecimal, that models have in common only if they have the same weights at the
    same places of the same files. weights: the total of their digest (digest.py).

    Raises ModelError if files are missing or damaged.
    """
    hashed = blake2b(weights.encode(), digest_size=_DIGEST_BYTES)
    common = stage_files(files)
    for file in common.files:
        hashed.update(f"\0{file.name}\0{file.nbytes}\0".encode())
    for piece in common.pieces:
        hashed.update(read_piece(files, piece))
    return hashed.hexdigest()


def piece_digest(data: bytes) -> str:
    """The hash that goes with a piece, in hexadecimal."""
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _cut(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(offset, offset + nbytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, offset + nbytes - start)
