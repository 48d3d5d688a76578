"""Which safetensors files of a directory hold the weights, and what their headers say."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from headrace.checkpoint.json_file import read_json_object
from headrace.errors import ModelError

# Which tells in what file each tensor is, where there are several.
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# What torch saves by pickle, a format that can run code when it is read.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PREFIX = "model."
_HEAD = "lm_head."


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, by its name in that file; dtype as safetensors writes it, such as BF16."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a model directory by their names in a causal language model.

    A base model's tensors have no "model." before their names, and get it here, as in transformers.
    Raises ModelError if the files are missing, damaged (sizes that contradict each other or the
    file among it), or outside the directory.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(path):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    part = tensors.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                    found[name] = StoredTensor(file, name, shape, dtype)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is damaged or cut short ({error}): copy the file again"
            ) from error
    if any(name.startswith(_PREFIX) for name in found):
        return found
    return {
        name if name.startswith(_HEAD) else _PREFIX + name: tensor for name, tensor in found.items()
    }


def _files(path: Path) -> list[Path]:
    """The files; where there is one for all and an index, the one counts, as in transformers."""
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / INDEX).is_file():
        return _indexed_files(path)
    pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
    if pickled:
        raise ModelError(
            f"model {path}: its weights ({pickled[0]}) are pickled, a format that can run code, "
            f"and are not read; only safetensors weights are read: convert them to {_SINGLE}"
        )
    raise ModelError(
        f"model {path}: neither {_SINGLE} nor {INDEX} is there; only safetensors weights are read"
    )


def _indexed_files(path: Path) -> list[Path]:
    where = read_json_object(path / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ModelError(
            f"{path / INDEX} is not a safetensors index: its weight_map must give the file of "
            "each tensor"
        )
    names = sorted(set(where.values()))
    for name in names:
        # Links within the folder are followed: a Hugging Face cache consists of them.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"model {path}: {INDEX} names {name!r}, outside the model's directory")
        try:
            there = (path / name).is_file()
        except ValueError:  # a NUL
            there = False
        if not there:
            raise ModelError(f"model {path}: shard {name[:200]} named by {INDEX} is missing")
    return [path / name for name in names]
