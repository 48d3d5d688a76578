"""Tensors by their names in the files, read one at a time from either kind of model files."""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.safetensors_files import stored_tensors
from headrace.checkpoint.tensor_check import check_shape
from headrace.errors import ModelError
from headrace.protocol.program import StoredTensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TensorSource(Protocol):
    """A checkpoint's tensors."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor, in the checkpoint's dtype, paired heads undone; ModelError if missing or of
        another shape."""


def open_tensors(files: ModelFiles) -> TensorSource:
    """The tensors of a located model; raises ModelError if the files are missing or damaged."""
    if files.kind == "gguf":
        return _GgufTensors(read_gguf(files.path))
    return _SafetensorsTensors(files.path)


class _SafetensorsTensors:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored = stored_tensors(path)

    def has(self, name: str) -> bool:
        return name in self._stored

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        name = tensor.name
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"model {self._path}: tensor {name} is missing")
        try:
            with safe_open(stored.file, framework="pt") as tensors:
                values: torch.Tensor = tensors.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{stored.file} is damaged or cut short ({error}): copy the file again"
            ) from error
        if values.dtype not in _DTYPES:
            raise ModelError(
                f"model {self._path}: tensor {name} is stored as {values.dtype}; supported are "
                f"{', '.join(map(str, _DTYPES))}"
            )
        check_shape(self._path, name, tuple(values.shape), tensor.shape)
        return _unpaired(values, tensor.paired_heads)


class _GgufTensors:
    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        if not self.has(tensor.name):
            raise ModelError(f"model {self._file.path}: tensor {tensor.name} is missing")
        values = torch.from_numpy(self._file.load(tensor.name))
        check_shape(self._file.path, tensor.name, tuple(values.shape), tensor.shape)
        return _unpaired(values, tensor.paired_heads)


def _unpaired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order of so many heads' rows in which rotated pairs are neighbours; 0: as it is.

    Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py.
    """
    if heads == 0:
        return tensor
    shape = tensor.shape
    paired = tensor.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return paired.transpose(1, 2).reshape(shape)
