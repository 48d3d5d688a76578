"""A digest of a model's weights: the same on all hosts that have the same model, wherever it lies.

It covers each tensor's name, shape, type and size, and samples of its bytes, so it takes a fraction
of a second for any model. It tells models apart, and files that were cut short or mixed up; a few
bytes changed elsewhere in a tensor it does not see. How tensors are spread over files does not
count.
"""

import os
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from headrace.checkpoint.extents import Extent, tensor_extents
from headrace.checkpoint.locate import ModelFiles
from headrace.errors import ModelError
from headrace.protocol.hosts import TensorDigest, WeightsDigest

# A page each, at a tensor's beginning, middle and end: what is read of a disk in any case.
_SAMPLE_BYTES = 4096
_TENSOR_DIGEST_BYTES = 8
_TOTAL_DIGEST_BYTES = 16


def weights_digest(files: ModelFiles) -> WeightsDigest:
    """Of all tensors. Raises ModelError for files that are missing or damaged."""
    extents = tensor_extents(files)
    with ExitStack() as opened:
        descriptors: dict[Path, int] = {}
        for file in {extent.file for extent in extents.values()}:
            try:
                descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelError(f"{file}: cannot be opened: {error.strerror}") from error
            opened.callback(os.close, descriptors[file])
            # Or the system reads much around each sample.
            os.posix_fadvise(descriptors[file], 0, 0, os.POSIX_FADV_RANDOM)
        tensors = tuple(
            TensorDigest(name, _tensor_digest(descriptors[extents[name].file], extents[name]))
            for name in sorted(extents)
        )
    total = blake2b(digest_size=_TOTAL_DIGEST_BYTES)
    if files.kind == "synthetic":
        total.update(str(files.path).encode())
    for tensor in tensors:
        # No name has a NUL in it: each ends where the digest of its tensor begins.
        total.update(tensor.name.encode() + b"\0" + tensor.digest)
    return WeightsDigest(total.hexdigest(), tensors)


def first_difference(ours: WeightsDigest, theirs: WeightsDigest) -> str | None:
    """The name of the first tensor, by name, that only one has or that differs; None if all are the
    same."""
    of_ours = {tensor.name: tensor.digest for tensor in ours.tensors}
    of_theirs = {tensor.name: tensor.digest for tensor in theirs.tensors}
    names = sorted(of_ours.keys() | of_theirs.keys())
    return next((name for name in names if of_ours.get(name) != of_theirs.get(name)), None)


def _tensor_digest(descriptor: int, extent: Extent) -> bytes:
    hashed = blake2b(digest_size=_TENSOR_DIGEST_BYTES)
    hashed.update(f"{extent.dtype} {list(extent.shape)} {extent.nbytes}\0".encode())
    for offset, size in _samples(extent.nbytes):
        hashed.update(os.pread(descriptor, size, extent.offset + offset))
    return hashed.digest()


def _samples(nbytes: int) -> list[tuple[int, int]]:
    """Offsets and sizes; all of a small tensor."""
    if nbytes <= 3 * _SAMPLE_BYTES:
        return [(0, nbytes)]
    starts = (0, (nbytes - _SAMPLE_BYTES) // 2, nbytes - _SAMPLE_BYTES)
    return [(start, _SAMPLE_BYTES) for start in starts]
