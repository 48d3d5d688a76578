"""Tensors by their Hugging Face name, read one at a time from either kind of model files."""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.llama_tensors import check_shape, gguf_name
from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.safetensors_files import stored_tensors
from headrace.errors import ModelError
from headrace.protocol.model_config import ModelConfig

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TensorSource(Protocol):
    """A checkpoint's tensors."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, in the checkpoint's dtype; ModelError if missing or of another shape."""


def open_tensors(files: ModelFiles, config: ModelConfig) -> TensorSource:
    """The tensors of a located model; raises ModelError if the files are missing or damaged."""
    if files.kind == "gguf":
        return _GgufTensors(read_gguf(files.path), config)
    return _SafetensorsTensors(files.path)


class _SafetensorsTensors:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored = stored_tensors(path)

    def has(self, name: str) -> bool:
        # Only GGUF's frequency factors mean something.
        return name in self._stored and name != "rope_freqs.weight"

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"model {self._path}: tensor {name} is missing")
        try:
            with safe_open(stored.file, framework="pt") as tensors:
                tensor: torch.Tensor = tensors.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{stored.file} is damaged or cut short ({error}): copy the file again"
            ) from error
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"model {self._path}: tensor {name} is stored as {tensor.dtype}; supported are "
                f"{', '.join(map(str, _DTYPES))}"
            )
        check_shape(self._path, name, tuple(tensor.shape), shape)
        return tensor


class _GgufTensors:
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not self.has(name):
            raise ModelError(f"model {self._file.path}: tensor {gguf_name(name)} is missing")
        tensor = torch.from_numpy(self._file.load(gguf_name(name)))
        check_shape(self._file.path, gguf_name(name), tuple(tensor.shape), shape)
        if ".q_proj." in name:
            return _unpermute(tensor, self._config.num_heads)
        if ".k_proj." in name:
            return _unpermute(tensor, self._config.num_kv_heads)
        return tensor


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of q and k rows: there pairs are neighbours, here halves.

    Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py.
    """
    shape = tensor.shape
    paired = tensor.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return paired.transpose(1, 2).reshape(shape)
