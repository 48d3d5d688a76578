"""How long a stage computes inside kernels: a clock around every call that leaves Python for one.

A kernel is a function of the native extension, or of the torch reference in its place, or a product
by torch; everything else that a step does is the step's Python, torch's own small operations
included.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from headrace.kernels import path, reference


@dataclass
class KernelClock:
    """seconds: inside kernels since it began to run. calls: of kernels."""

    seconds: float = 0.0
    calls: int = 0
    _inside: bool = field(default=False, init=False)

    def around(self, kernel: Any) -> Any:
        """The kernel, timed. What that costs, some 0.2 us a call, counts as Python."""

        def timed(*arguments: Any, **options: Any) -> Any:
            # A kernel that another one calls is part of that one.
            if self._inside:
                return kernel(*arguments, **options)
            self._inside = True
            began = perf_counter()
            answer = kernel(*arguments, **options)
            self.seconds += perf_counter() - began
            self.calls += 1
            self._inside = False
            return answer

        return timed


@contextmanager
def timed_kernels() -> Iterator[KernelClock]:
    """While it lasts, every kernel's time is added up."""
    clock = KernelClock()
    kernels = [(module, name, getattr(module, name)) for module, name in _kernels()]
    try:
        for module, name, kernel in kernels:
            setattr(module, name, clock.around(kernel))
        yield clock
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def _kernels() -> list[tuple[Any, str]]:
    """Where each kernel is called from: a module, and the name in it."""
    found: list[tuple[Any, str]] = [
        (torch.ops.mkldnn, "_linear_pointwise"),
        (torch.nn.functional, "linear"),
    ]
    found += [
        (reference, n) for n, f in vars(reference).items() if isinstance(f, types.FunctionType)
    ]
    if path.native is not None:
        found += [(path.native, n) for n, f in vars(path.native).items() if callable(f)]
    return found
