"""Tensors by their names in the files, read one at a time from either kind of model files."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from headrace.checkpoint.extents import Extent, tensor_extents
from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.tensor_check import check_shape
from headrace.errors import ModelError
from headrace.model.mxfp4 import dequantized
from headrace.protocol.stored_tensor import MX_BLOCK, Cut, StoredTensor

# How safetensors write the dtypes of weights, and that of MXFP4's bytes.
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {"U8": torch.uint8}
# Numbers of a matrix that are read at a time.
_BAND = 1 << 18
# First and end of some rows.
Range = tuple[int, int]


class TensorSource(Protocol):
    """A checkpoint's tensors."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def load(self, tensor: StoredTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, paired heads undone; ModelError if missing or of another shape.

        dtype: None for the checkpoint's own. A matrix is read a band of rows at a time, so that
        nothing but the tensor itself is large.
        """


def open_tensors(files: ModelFiles) -> TensorSource:
    """The tensors of a located model; raises ModelError if the files are missing or damaged."""
    if files.kind == "gguf":
        return _GgufTensors(read_gguf(files.path))
    return _SafetensorsTensors(files)


def gguf_file(source: TensorSource) -> GgufFile | None:
    """The file that the tensors are read from, if it is a GGUF file."""
    return source.file if isinstance(source, _GgufTensors) else None


class _SafetensorsTensors:
    """Reads what it is asked for, an expert's part alone; nothing stays mapped or is read ahead."""

    def __init__(self, files: ModelFiles) -> None:
        self._path = files.path
        self._extents = tensor_extents(files)

    def has(self, name: str) -> bool:
        return name in self._extents

    def load(self, tensor: StoredTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        stack, cut = tensor.stack, tensor.cut
        if stack is None:
            ((name, shape),) = tensor.stored

            def read(rows: Range) -> torch.Tensor:
                whole = self._read(name, shape, _DTYPES, rows=rows)
                return whole if cut is None or cut.axis == 0 else _taken(whole, cut)

            return unpaired(_in_bands(read, tensor, shape, dtype), tensor.paired_heads)
        if not stack.mxfp4:
            ((name, shape),) = tensor.stored
            whole = self._read(name, shape, _DTYPES, stack.expert)
            return _as(_taken(_own_rows(whole, tensor), cut), dtype)
        blocks, scales = (
            self._read(name, shape, _BYTES, stack.expert)[stack.first :: stack.step]
            for name, shape in tensor.stored
        )
        in_blocks = None if cut is None else _in_blocks(cut)
        if in_blocks is not None:
            return _as(dequantized(_taken(blocks, in_blocks), _taken(scales, in_blocks)), dtype)
        return _as(_taken(dequantized(blocks, scales), cut), dtype)

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: dict[str, torch.dtype],
        expert: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The tensor of this shape, or its part of an expert, or these rows of it."""
        extent = self._extents.get(name)
        if extent is None:
            raise ModelError(f"model {self._path}: tensor {name} is missing")
        dtype = dtypes.get(extent.dtype)
        if dtype is None:
            raise ModelError(
                f"model {self._path}: tensor {name} is stored as {extent.dtype}; supported are "
                f"{', '.join(dtypes)}"
            )
        check_shape(self._path, name, extent.shape, shape)
        offset, nbytes = extent.offset, extent.nbytes
        if expert is not None:
            nbytes //= shape[0]
            offset, shape = offset + expert * nbytes, shape[1:]
        elif rows is not None:
            first, end = rows
            nbytes //= shape[0]
            offset, nbytes = offset + first * nbytes, (end - first) * nbytes
            shape = (end - first, *shape[1:])
        return torch.frombuffer(_bytes(extent, offset, nbytes), dtype=dtype).view(shape)


def _bytes(extent: Extent, offset: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    try:
        with extent.file.open("rb", buffering=0) as file:
            file.seek(offset)
            view, done = memoryview(data), 0
            while done < nbytes:
                count = file.readinto(view[done:])
                if not count:
                    raise OSError("it ends too early")
                done += count
    except OSError as error:
        raise ModelError(
            f"{extent.file} is damaged or cut short ({error}): copy the file again"
        ) from error
    return data


class _GgufTensors:
    """Those of a GGUF file, dequantized."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def load(self, tensor: StoredTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        ((name, shape),) = tensor.stored
        if not self.has(name):
            raise ModelError(f"model {self.file.path}: tensor {name} is missing")
        check_shape(self.file.path, name, self.file.tensors[name].shape, shape)
        stack, cut, part = tensor.stack, tensor.cut, None
        if stack is not None:
            shape = shape[1:]
            # Of one expert the file may have no stack.
            part = stack.expert if len(self.file.tensors[name].shape) > len(shape) else None
        if 1 in (len(shape), len(self.file.tensors[name].shape)):
            whole = torch.from_numpy(self.file.load(name, part)).view(shape)
            return _as(_own_rows(_taken(whole, cut), tensor), dtype)

        def read(rows: Range) -> torch.Tensor:
            columns: Sequence[Range | None] = (None,)
            if cut is not None and cut.axis:
                columns = cut.ranges
            loaded = [self.file.load(name, part, rows, some) for some in columns]
            return torch.cat([torch.from_numpy(each) for each in loaded], dim=1)

        return _own_rows(_in_bands(read, tensor, shape, dtype), tensor)


def _in_bands(
    read: Callable[[Range], torch.Tensor],
    tensor: StoredTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """The tensor from what read() gives of its rows, of columns those it has. shape: the whole's;
    dtype: None for that of what is read."""
    cut = tensor.cut
    ranges = ((0, shape[0]),) if cut is None or cut.axis else cut.ranges
    band = max(1, _BAND // (shape[1] if len(shape) > 1 else 1))
    loaded: torch.Tensor | None = None
    done = 0
    for first, end in ranges:
        for row in range(first, end, band):
            rows = read((row, min(row + band, end)))
            if loaded is None:
                loaded = torch.empty(tensor.shape, dtype=dtype or rows.dtype)
            loaded[done : done + len(rows)] = rows
            done += len(rows)
    assert loaded is not None
    return loaded


def _in_blocks(cut: Cut) -> Cut | None:
    """A cut of numbers as one of MXFP4's blocks; None if it goes through some."""
    if cut.axis == 0:
        return cut
    if any(bound % MX_BLOCK for bounds in cut.ranges for bound in bounds):
        return None
    ranges = tuple((first // MX_BLOCK, end // MX_BLOCK) for first, end in cut.ranges)
    return replace(cut, ranges=ranges)


def _taken(whole: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """What a shard has of a tensor."""
    if cut is None:
        return whole
    pieces = [whole.narrow(cut.axis, first, end - first) for first, end in cut.ranges]
    return torch.cat(pieces, dim=cut.axis)


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _own_rows(values: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """The tensor's own rows of what the files have for its expert, if any; paired heads undone."""
    stack = tensor.stack
    if stack is not None:
        values = (values.T if stack.transposed else values)[stack.first :: stack.step]
    return unpaired(values, tensor.paired_heads)


def unpaired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order of so many heads' rows in which rotated pairs are neighbours; 0: as it is.

    Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py.
    """
    if heads == 0:
        return tensor
    shape = tensor.shape
    paired = tensor.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return paired.transpose(1, 2).reshape(shape)
