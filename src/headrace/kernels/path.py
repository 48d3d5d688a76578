"""Which code the kernels run: a native path that this CPU has, or the torch reference."""

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

# Imported first: the extension uses the OpenMP runtime that torch brings, and cannot be loaded
# without one.
import torch

from headrace.errors import StartError
from headrace.kernels import PATH_VARIABLE, REFERENCE

_MODULE = "headrace.kernels._native"


class _Missing(ModuleType):
    """In place of the extension: whatever is asked of it, it says why there is none."""

    def __init__(self, reason: str) -> None:
        super().__init__(_MODULE)
        self.reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise StartError(f"native kernels {self.reason}")


def _load() -> ModuleType:
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError:
        return _Missing("are missing: install a C++17 compiler, then headrace again")
    except ImportError as error:
        return _Missing(f"cannot be loaded ({error}): install headrace again")


# The extension: to be asked only where runs_native() says so, or has_native().
if TYPE_CHECKING:
    from headrace.kernels import _native

    native = _native
else:
    native = _load()


def has_native() -> bool:
    """Whether there is a native extension, taken or not."""
    return not isinstance(native, _Missing)


_path = str(native.path_name()) if has_native() else REFERENCE
_chosen = False


def paths() -> list[str]:
    """What there is to choose from here, best last; the first is the torch reference."""
    return [REFERENCE, *(native.path_names() if has_native() else ())]


def use_path(name: str) -> None:
    """Take this path from now on; weights that were packed and caches made before are void.

    Raises StartError if there is no such path here.
    """
    global _path, _chosen
    if name not in paths():
        raise StartError(
            f"{PATH_VARIABLE}={name}: this machine and installation have {', '.join(paths())}"
        )
    if name != REFERENCE:
        native.use_path(name)
    _path, _chosen = name, True


def choose_path() -> str | None:
    """Follow the environment variable HEADRACE_KERNELS if it is set.

    Returns what the user should know about it once, if anything. Raises StartError for a path
    that is not here.
    """
    wanted = os.environ.get(PATH_VARIABLE)
    if wanted:
        use_path(wanted)
    elif isinstance(native, _Missing):
        return (
            f"torch takes the place of native kernels, several times slower; they {native.reason}"
        )
    elif not native.threaded and torch.get_num_threads() > 1:
        return (
            "native kernels use one thread of each stage, since they were not compiled by GCC: "
            "install g++, then headrace again"
        )
    return None


def path_name() -> str:
    """The path taken now."""
    return _path


def is_chosen() -> bool:
    """Whether somebody chose the path, and so wants no library in its place."""
    return _chosen


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether the path taken has products of dtype that need not convert it first."""
    if _path == REFERENCE:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and native.multiplies_bfloat16())


def runs_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether native kernels work on such tensors."""
    return _path != REFERENCE and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
