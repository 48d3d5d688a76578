"""Which products' weights stay in memory as a GGUF file quantizes them, and what they take."""

from collections.abc import Mapping

from headrace.checkpoint.gguf_file import GgufFile
from headrace.kernels.quantized_form import BLOCK, FORMS
from headrace.protocol.program import Matrix
from headrace.protocol.stored_tensor import StoredTensor


def quantized_kinds(file: GgufFile) -> dict[str, str]:
    """By name, the kinds of those of the file's matrices that kernels take as they are."""
    return {
        name: tensor.kind.name
        for name, tensor in file.tensors.items()
        if len(tensor.shape) == 2 and tensor.kind.name in FORMS
    }


def stored_kinds(matrix: Matrix, kinds: Mapping[str, str]) -> tuple[str, ...] | None:
    """The kinds of a product's parts, where all of them stay as they are; else None.

    kinds: see quantized_kinds(). A part of which a shard has columns that are no whole blocks does
    not.
    """
    found = [kinds[part.name] for part in matrix.parts if _stays(part, kinds)]
    return tuple(found) if len(found) == len(matrix.parts) else None


def stored_bytes(matrix: Matrix, kinds: Mapping[str, str]) -> int | None:
    """Bytes of a product's weight in that form; None if it has another."""
    own = stored_kinds(matrix, kinds)
    if own is None:
        return None
    return sum(
        part.shape[0] * (matrix.ins // BLOCK) * FORMS[kind].block_bytes
        for part, kind in zip(matrix.parts, own, strict=True)
    )


def _stays(part: StoredTensor, kinds: Mapping[str, str]) -> bool:
    cut = part.cut
    whole = cut is None or cut.axis == 0 or not any(b % BLOCK for own in cut.ranges for b in own)
    return part.name in kinds and part.stack is None and len(part.shape) == 2 and whole
