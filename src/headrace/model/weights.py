"""Tensors by their Hugging Face name, read one at a time from either kind of model files."""

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from headrace.checkpoint.gguf_file import GgufFile, read_gguf
from headrace.checkpoint.locate import ModelFiles
from headrace.errors import ModelError
from headrace.protocol.model_config import ModelConfig

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


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
        self._file_of: dict[str, Path] = {}
        for file in _safetensors_files(path):
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._file_of.update(dict.fromkeys(tensors.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{file} is damaged or cut short ({error}): copy the file again"
                ) from error

    def has(self, name: str) -> bool:
        return name in self._file_of

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"model {self._path}: tensor {name} is missing")
        with safe_open(file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"model {self._path}: tensor {name} is stored as {tensor.dtype}; supported are "
                f"{', '.join(map(str, _DTYPES))}"
            )
        return _of_shape(tensor, name, shape, self._path)


def _safetensors_files(path: Path) -> list[Path]:
    if (path / _INDEX).is_file():
        try:
            index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
            files = [path / name for name in names]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{path / _INDEX} is not a safetensors index: {error}") from error
        for file in files:
            if not file.is_file():
                raise ModelError(f"model {path}: shard {file.name} named by {_INDEX} is missing")
        return files
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    raise ModelError(
        f"model {path}: neither {_SINGLE} nor {_INDEX} is there; only safetensors weights are read"
    )


# Names inside a layer: Hugging Face to GGUF
# (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py).
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


class _GgufTensors:
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._file.tensors

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not self.has(name):
            raise ModelError(f"model {self._file.path}: tensor {_gguf_name(name)} is missing")
        tensor = torch.from_numpy(self._file.load(_gguf_name(name)))
        tensor = _of_shape(tensor, _gguf_name(name), shape, self._file.path)
        if ".q_proj." in name:
            return _unpermute(tensor, self._config.num_heads)
        if ".k_proj." in name:
            return _unpermute(tensor, self._config.num_kv_heads)
        return tensor


def _gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight becomes blk.3.ffn_up.weight."""
    if name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of q and k rows: there pairs are neighbours, here halves.

    Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py.
    """
    shape = tensor.shape
    paired = tensor.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return paired.transpose(1, 2).reshape(shape)


def _of_shape(tensor: torch.Tensor, name: str, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"model {path}: tensor {name} has shape {list(tensor.shape)}, "
            f"the configuration asks for {list(shape)}"
        )
    return tensor
