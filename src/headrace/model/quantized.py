"""A GGUF file's quantized weights, packed as they are read, without being dequantized."""

from itertools import groupby

import torch

from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.tensor_check import check_shape
from headrace.kernels.quantized_linear import QuantizedPart
from headrace.model.weights import Range, unpaired
from headrace.protocol.program import Matrix
from headrace.protocol.stored_tensor import StoredTensor

# Bytes of a matrix that are read at a time.
_BAND = 4 << 20


def packed_parts(matrix: Matrix, kinds: tuple[str, ...], file: GgufFile) -> list[QuantizedPart]:
    """The product's weight, neighbours of one kind as one part. kinds: see stored_kinds().

    Raises ModelError for tensors that are of another shape.
    """
    found = []
    tensors = zip(matrix.parts, kinds, strict=True)
    for kind, group in groupby(tensors, key=lambda each: each[1]):
        own = [tensor for tensor, _ in group]
        part = QuantizedPart(kind, sum(tensor.shape[0] for tensor in own), matrix.ins)
        first = 0
        for tensor in own:
            _pack(tensor, file, part, first)
            first += tensor.shape[0]
        found.append(part)
    return found


def _pack(tensor: StoredTensor, file: GgufFile, part: QuantizedPart, first: int) -> None:
    """The tensor as outputs of the part, from `first` on."""
    ((name, shape),) = tensor.stored
    check_shape(file.path, name, file.tensors[name].shape, shape)
    places = torch.empty(tensor.shape[0], dtype=torch.int64)
    places[unpaired(torch.arange(len(places)), tensor.paired_heads)] = torch.arange(len(places))
    places += first
    rows: tuple[Range, ...] = ((0, shape[0]),)
    columns: tuple[Range, ...] = ((0, shape[1]),)
    if tensor.cut is not None and tensor.cut.axis == 0:
        rows = tensor.cut.ranges
    elif tensor.cut is not None:
        columns = tensor.cut.ranges
    band = max(1, _BAND * shape[0] // file.tensors[name].nbytes)
    done = 0
    for begin, end in rows:
        for row in range(begin, end, band):
            read = file.rows(name, row, min(row + band, end))
            own, to = places[done : done + len(read)], 0
            for left, right in columns:
                part.put(read, own, left, right, to)
                to += right - left
            done += len(read)
