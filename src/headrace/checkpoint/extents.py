"""Where in its file the bytes of each tensor lie, in either kind of model files."""

import json
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.safetensors_files import stored_tensors
from headrace.errors import ModelError

# Of a safetensors file: the size of the header that follows, little-endian.
_SIZE_BYTES = 8


@dataclass(frozen=True)
class Extent:
    """Bytes of a file. offset: from its start. dtype: as the file names it, such as BF16 or
    Q4_1."""

    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def tensor_extents(files: ModelFiles) -> dict[str, Extent]:
    """By the tensors' names, as programs have them; none of a synthetic model.

    Raises ModelError if files are missing or damaged.
    """
    match files.kind:
        case "synthetic":
            return {}
        case "gguf":
            tensors = read_gguf(files.path).tensors.values()
            return {
                each.name: Extent(files.path, each.offset, each.nbytes, each.shape, each.kind.name)
                for each in tensors
            }
    stored = stored_tensors(files.path)
    headers = {file: _Header.of(file) for file in {each.file for each in stored.values()}}
    return {
        name: headers[each.file].extent(each.name, each.shape, each.dtype)
        for name, each in stored.items()
    }


def header_bytes(file: Path) -> int:
    """How many bytes at the start of a safetensors file come before its tensors'."""
    return _Header.of(file).nbytes


@dataclass(frozen=True)
class _Header:
    """Of a safetensors file that has been checked (github.com/huggingface/safetensors, Format)."""

    file: Path
    nbytes: int
    offsets: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, file: Path) -> "_Header":
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(_SIZE_BYTES), "little")
                entries = json.loads(opened.read(size))
            offsets = {
                name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
                for name, entry in entries.items()
                if name != "__metadata__"
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is damaged ({error}): copy the file again") from error
        return cls(file, _SIZE_BYTES + size, offsets)

    def extent(self, name: str, shape: tuple[int, ...], dtype: str) -> Extent:
        first, end = self.offsets[name]
        return Extent(self.file, self.nbytes + first, end - first, shape, dtype)
