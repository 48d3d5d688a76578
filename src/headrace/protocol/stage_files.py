"""What a stage needs of a model's files, for a host that lacks them."""

from typing import Literal

import msgspec


class FileSize(msgspec.Struct, frozen=True, array_like=True):
    """A file of the model. name: relative to the model's folder, with slashes."""

    name: str
    nbytes: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file, few enough for a message."""

    file: str
    offset: int
    nbytes: int


class StageFiles(msgspec.Struct, frozen=True, array_like=True):
    """model: the file that the model is, or empty where it is the folder. files: all of which there
    are pieces. pieces: the stage's tensors and what is no tensor."""

    kind: Literal["gguf", "huggingface"]
    model: str
    files: tuple[FileSize, ...]
    pieces: tuple[Piece, ...]
