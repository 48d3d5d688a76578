"""How long a stage computes inside kernels, and in which: a clock around every call that leaves
Python for one.

A kernel is a function of the native extension, or of the torch reference in its place, or a product
by torch; everything else that a step does is the step's Python, torch's own small operations
included. The native call that runs all layers tells itself how long each of their parts took, and
what it takes beyond those, to be called, is Python, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from headrace.kernels import path, reference
from headrace.kernels.linear import Linear
from headrace.model.llama import LlamaStage
from headrace.sampling import sampler

_PRODUCTS = ("qkv", "attention_out", "gate_up", "down")

# What kernels' time is spent on, in the order of a step. norm: with the residual's addition.
PARTS = (
    "embed", "norm", "qkv", "rotate", "attention", "attention_out", "gate_up", "silu", "down",
    "head", "sampling",
)  # fmt: skip


def _no_time() -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0)


@dataclass
class KernelClock:
    """seconds: inside kernels, by part. calls: of kernels. product: which one is computed now."""

    seconds: dict[str, float] = field(default_factory=_no_time)
    calls: int = 0
    product: str = ""

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds by part, and calls, since this was called last."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = _no_time(), 0
        return taken

    def around(self, kernel: Any, part: str | None) -> Any:
        """The kernel, timed. part: None for that of the product that is computed now.

        What that costs, some 0.2 us a call, counts as Python.
        """

        def timed(*arguments: Any, **options: Any) -> Any:
            began = perf_counter()
            answer = kernel(*arguments, **options)
            self.seconds[part or self.product] += perf_counter() - began
            self.calls += 1
            return answer

        return timed

    def around_layers(self, run_layers: Any, take_profile: Callable[[], dict[str, float]]) -> Any:
        """The kernel that runs all layers and then tells what it spent on each part."""

        def timed(*arguments: Any) -> None:
            run_layers(*arguments)
            self.calls += 1
            for part, seconds in take_profile().items():
                self.seconds[part] += seconds

        return timed


@contextmanager
def timed_kernels(model: LlamaStage) -> Iterator[KernelClock]:
    """While it lasts, the time of every kernel that the model calls is added up."""
    clock = KernelClock()
    timed = [
        (module, name, clock.around(getattr(module, name), part))
        for module, name, part in _kernels()
    ]
    timed.append((Linear, "__call__", _named(clock, model)))
    if path.native is not None:
        # What was spent before is not asked for.
        path.native.take_profile()
        run_layers = clock.around_layers(path.native.run_layers, path.native.take_profile)
        timed.append((path.native, "run_layers", run_layers))
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in timed]
    try:
        for owner, name, call in timed:
            setattr(owner, name, call)
        yield clock
    finally:
        for owner, name, call in own:
            setattr(owner, name, call)


def _kernels() -> list[tuple[Any, str, str | None]]:
    """Where each kernel is called from, a module and the name in it, and the part that it is."""
    found: list[tuple[Any, str, str | None]] = [
        (torch.nn.functional, "embedding", "embed"),
        (torch.nn.functional, "linear", None),
        (torch.ops.mkldnn, "_linear_pointwise", None),
        (reference, "rms_norm", "norm"),
        (reference, "rotate_and_write", "rotate"),
        (reference, "paged_attention", "attention"),
        (reference, "silu_and_multiply", "silu"),
        (sampler, "choose_by_torch", "sampling"),
    ]
    if path.native is not None:
        found += [
            (path.native, "gather", "embed"),
            (path.native, "rms_norm", "norm"),
            (path.native, "linear", None),
            (path.native, "rotate_and_write", "rotate"),
            (path.native, "attention", "attention"),
            (path.native, "silu_and_multiply", "silu"),
            (path.native, "choose", "sampling"),
        ]
    return found


def _named(clock: KernelClock, model: LlamaStage) -> Any:
    """Linear's call, with a note of which of the model's products it is."""
    names = {id(getattr(layer, name)): name for layer in model.layers for name in _PRODUCTS}
    names[id(model.head)] = "head"
    call = Linear.__call__

    def named(linear: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        clock.product = names[id(linear)]
        return call(linear, x, out)

    return named
