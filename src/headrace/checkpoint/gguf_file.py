"""GGUF model files: what their header says, and their tensors as float32 arrays.

The layout is that of the GGUF specification (ggml, docs/gguf.md): magic, version, counts,
metadata, tensor descriptions, padding, tensor data. Every length in a header is checked against
what the file can hold before anything is read or allocated, so a damaged or hostile file costs
an error and nothing else.
"""

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, quants

from headrace.errors import ModelError

SUPPORTED_KINDS = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
    GGMLQuantizationType.MXFP4,
)

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NESTING = 4
# Real headers stay far below both: a vocabulary of 256 k tokens is some 10 MB and 1.3 million
# array elements. They bound what a damaged length can make the reader copy.
_MAX_HEADER_BYTES = 1 << 27
_MAX_ARRAY_ELEMENTS = 1 << 22
# Likewise: models of a thousand layers have some 10,000 tensors, and files some 100 keys.
_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 16
# The fewest bytes that an entry can take: empty name, then its type and a one-byte value; or
# its dimension count, kind and offset.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_KINDS = {int(kind): kind for kind in GGMLQuantizationType}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NUMBERS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in its file.

    `shape` counts rows first, as PyTorch does (ggml writes the row length first); `offset` is
    counted from the start of the file and `nbytes` is the stored, quantized size.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Opened:
    """Closes the descriptor when nobody has it any more."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass
class GgufFile:
    """A GGUF file whose header has been read and whose tensors are read on demand.

    Metadata arrays are lists; numbers are Python numbers.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    _opened: "_Opened" = field(repr=False, compare=False)

    def load(
        self,
        name: str,
        part: int | None = None,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """The tensor as a float32 array of its shape that shares no memory with the file.

        part: of a tensor that stacks several, this one alone is read. rows, columns: of a matrix,
        first and end of those that are read. Raises ModelError if the file has no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: has no tensor {name!r}, but the model needs it")
        shape, offset, nbytes = tensor.shape, tensor.offset, tensor.nbytes
        if part is not None:
            nbytes //= shape[0]
            shape, offset = shape[1:], offset + part * nbytes
        if rows is not None:
            nbytes //= shape[0]
            offset, nbytes = offset + rows[0] * nbytes, (rows[1] - rows[0]) * nbytes
            shape = (rows[1] - rows[0], *shape[1:])
        stored = self._read(offset, nbytes)
        stored = stored.reshape(prod(shape[:-1]), -1)
        first = 0
        if columns is not None:
            # Of a row, the blocks that they lie in.
            numbers, size = GGML_QUANT_SIZES[tensor.kind]
            begin, end = columns[0] // numbers, -(-columns[1] // numbers)
            stored, first = stored[:, begin * size : end * size], columns[0] - begin * numbers
            shape = (*shape[:-1], columns[1] - columns[0])
        values = quants.dequantize(stored, tensor.kind)[:, first : first + shape[-1]]
        return values.reshape(shape)

    def rows(self, name: str, first: int, end: int) -> np.ndarray:
        """These rows of one of its matrices as the file has them: uint8 [rows, bytes of one]."""
        tensor = self.tensors[name]
        nbytes = tensor.nbytes // tensor.shape[0]
        return self._read(tensor.offset + first * nbytes, (end - first) * nbytes).reshape(
            -1, nbytes
        )

    def _read(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of the file. Not of a map of it, all of which would count as this process's."""
        data = np.empty(nbytes, np.uint8)
        view, done = data.data, 0
        while done < nbytes:
            count = os.preadv(self._opened.descriptor, [view[done:]], offset + done)
            if not count:
                raise ModelError(f"{self.path}: was cut short since it was opened; start again")
            done += count
        return data


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a little-endian GGUF file, version 2 or 3, and check its tensors' extents.

    Raises ModelError if the file cannot be opened, is not GGUF or of another version, is
    truncated (header or tensor data), holds a tensor kind that is not supported, or if its
    header contradicts itself.
    """
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            if size < len(MAGIC):
                raise ModelError(f"{path}: is not a GGUF file: it has only {size} bytes")
            contents = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            opened = _Opened(os.dup(handle.fileno()))
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror or error}") from error
    metadata, tensors = _read_header(_Header(path, contents))
    return GgufFile(path, metadata, tensors, opened)


def _read_header(header: "_Header") -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata, and where the tensors lie."""
    tensor_count, metadata_count = header.start()
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = header.text("a metadata key")
        if key in metadata:
            header.fail(f"metadata key {key!r} appears twice; the file is damaged")
        metadata[key] = header.value(header.u32(f"the type of {key!r}"), key)
    descriptions: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        tensor = header.tensor()
        if tensor.name in descriptions:
            header.fail(f"tensor {tensor.name!r} appears twice; the file is damaged")
        descriptions[tensor.name] = tensor
    tensors = _place(header, descriptions, metadata)
    return metadata, tensors


def _place(
    header: "_Header", descriptions: dict[str, GgufTensor], metadata: dict[str, Any]
) -> dict[str, GgufTensor]:
    """The tensors with offsets from the start of the file, each within the file."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or alignment < 1 or alignment & (alignment - 1):
        header.fail(f"general.alignment is {alignment!r}, but it must be a power of two")
    data_start = -(-header.position // alignment) * alignment
    placed = {}
    for name, tensor in descriptions.items():
        if tensor.offset % alignment:
            header.fail(
                f"tensor {name!r} starts at offset {tensor.offset}, "
                f"which is not a multiple of the alignment, {alignment}"
            )
        start = data_start + tensor.offset
        missing = start + tensor.nbytes - header.size
        if missing > 0:
            header.fail(
                f"is truncated: tensor {name!r} needs {tensor.nbytes} bytes at offset {start}, "
                f"but {missing} bytes are missing at the end; fetch the file again"
            )
        placed[name] = GgufTensor(name, tensor.shape, tensor.kind, start, tensor.nbytes)
    # Or a small file could take any amount of memory.
    in_order = sorted(placed.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.nbytes > after.offset:
            header.fail(f"tensors {before.name!r} and {after.name!r} overlap; the file is damaged")
    return placed


class _Header:
    """A cursor over the header that refuses to step outside it."""

    def __init__(self, path: Path, contents: mmap.mmap) -> None:
        self.path = path
        self.contents = contents
        self.size = len(contents)
        self.position = 0
        self.elements = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")

    def need(self, count: int, what: str) -> None:
        """Make sure that `count` more bytes are there and that the header stays plausible."""
        if count > self.size - self.position:
            self.fail(
                f"the header is truncated or damaged: {what} needs {count} bytes at offset "
                f"{self.position}, but the file has {self.size}; fetch the file again"
            )
        if self.position + count > _MAX_HEADER_BYTES:
            self.fail(
                f"the header is damaged: {what} at offset {self.position} would make it larger "
                f"than {_MAX_HEADER_BYTES} bytes; fetch the file again"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        number: int = _U32.unpack_from(self.contents, self.position)[0]
        self.position += 4
        return number

    def u64(self, what: str) -> int:
        self.need(8, what)
        number: int = _U64.unpack_from(self.contents, self.position)[0]
        self.position += 8
        return number

    def text(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        self.need(length, what)
        start = self.position
        self.position += length
        try:
            return self.contents[start : self.position].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not UTF-8; the file is damaged")

    def start(self) -> tuple[int, int]:
        """Check magic and version; returns how many tensors and metadata entries follow."""
        if self.contents[:4] != MAGIC:
            self.fail(f"is not a GGUF file: it starts with {self.contents[:4]!r}, not b'GGUF'")
        self.position = 4
        version = self.u32("the version")
        if version not in _VERSIONS:
            # The versions are small numbers, so a byte order that is not ours shows here.
            if version and version & 0xFFFF == 0:
                self.fail("is a big-endian GGUF file, but only little-endian ones can be read")
            self.fail(
                f"is GGUF version {version}, but only versions 2 and 3 can be read; "
                "convert the model again with a current converter"
            )
        tensors = self.u64("the tensor count")
        metadata = self.u64("the metadata count")
        smallest = tensors * _MIN_TENSOR_BYTES + metadata * _MIN_METADATA_BYTES
        self.need(smallest, f"a header of {tensors} tensors and {metadata} metadata entries")
        for count, most, what in (
            (tensors, _MAX_TENSORS, "tensors"),
            (metadata, _MAX_KEYS, "keys"),
        ):
            if count > most:
                self.fail(
                    f"the header is damaged: it counts {count} {what}, and more than {most} are "
                    "not plausible; fetch the file again"
                )
        return tensors, metadata

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """One metadata value; arrays become lists."""
        if kind == GGUFValueType.STRING:
            return self.text(f"the value of {key!r}")
        if kind == GGUFValueType.ARRAY:
            return self.array(key, depth)
        return self.numbers(kind, 1, key)[0]

    def array(self, key: str, depth: int) -> list[Any]:
        if depth >= _MAX_NESTING:
            self.fail(f"{key!r} nests arrays deeper than {_MAX_NESTING}; the file is damaged")
        kind = self.u32(f"the element type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        self.elements += count
        if self.elements > _MAX_ARRAY_ELEMENTS:
            self.fail(
                f"the header is damaged: {key!r} has {count} elements, and more than "
                f"{_MAX_ARRAY_ELEMENTS} in all are not plausible; fetch the file again"
            )
        if kind == GGUFValueType.STRING:
            return self.texts(count, key)
        if kind == GGUFValueType.ARRAY:
            return [self.array(key, depth + 1) for _ in range(count)]
        return self.numbers(kind, count, key)

    def texts(self, count: int, key: str) -> list[str]:
        """`count` strings; the loop is bare because a vocabulary has a hundred thousand."""
        what = f"an element of {key!r}"
        self.need(count * _U64.size, f"the value of {key!r}")
        contents = self.contents
        end = min(self.size, _MAX_HEADER_BYTES)
        unpack: Callable[[mmap.mmap, int], tuple[int]] = _U64.unpack_from
        texts = []
        for _ in range(count):
            start = self.position + _U64.size
            if start > end:
                self.need(_U64.size, what)
            stop = start + unpack(contents, self.position)[0]
            if stop > end:
                self.position = start
                self.need(stop - start, what)
            try:
                texts.append(contents[start:stop].decode())
            except UnicodeDecodeError:
                self.fail(f"{what} at offset {start} is not UTF-8; the file is damaged")
            self.position = stop
        return texts

    def numbers(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            self.fail(f"{key!r} has the unknown value type {kind}; the file is damaged")
        self.need(count * dtype.itemsize, f"the value of {key!r}")
        numbers = np.frombuffer(self.contents, dtype, count, self.position)
        self.position += count * dtype.itemsize
        values: list[Any] = numbers.tolist()
        return values

    def tensor(self) -> GgufTensor:
        """One tensor description; its offset is still relative to the tensor data."""
        name = self.text("a tensor name")
        dims = self.u32(f"the dimension count of tensor {name!r}")
        if not 1 <= dims <= _MAX_DIMS:
            self.fail(f"tensor {name!r} has {dims} dimensions, but 1 to {_MAX_DIMS} are possible")
        row_first = [self.u64(f"the shape of tensor {name!r}") for _ in range(dims)]
        number = self.u32(f"the kind of tensor {name!r}")
        offset = self.u64(f"the offset of tensor {name!r}")
        kind = _KINDS.get(number)
        if kind is None or kind not in SUPPORTED_KINDS:
            supported = ", ".join(each.name for each in SUPPORTED_KINDS)
            self.fail(
                f"tensor {name!r} is of kind {number if kind is None else kind.name}, "
                f"which is not supported; convert the model to one of {supported}"
            )
        shape = tuple(reversed(row_first))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            self.fail(
                f"tensor {name!r} of kind {kind.name} has shape {shape}, "
                f"but its rows must be whole blocks of {block}; the file is damaged"
            )
        return GgufTensor(name, shape, kind, offset, prod(shape) // block * block_bytes)
