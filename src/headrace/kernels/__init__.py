"""Kernels of the forward pass: native on CPUs, and for each a plain torch reference."""

import importlib.util
import os

PATH_VARIABLE = "HEADRACE_KERNELS"
REFERENCE = "torch"


def has_native_kernels() -> bool:
    """Whether the kernels are the native ones; for processes that do without torch."""
    if os.environ.get(PATH_VARIABLE) == REFERENCE:
        return False
    return importlib.util.find_spec("headrace.kernels._native") is not None
