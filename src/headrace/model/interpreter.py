"""Runs a program: runs of native operations in one call each, others by torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.exchange import Exchange
from headrace.kernels.kv_cache import KvCache, new_cache
from headrace.model.bind import Weights
from headrace.model.buffers import Buffers
from headrace.model.native_program import compile_run, is_native, native_step
from headrace.model.operations import Bound, Step, Work, work_of
from headrace.protocol.program import Operation, Program, label

# What is made of a piece of work to watch it, given what a profile calls it: None where a native
# program tells that itself, of each of its operations.
Around = Callable[[str | None, Work], Work]


@dataclass(frozen=True)
class Routine:
    """Operations as pieces of work, in order, by what a profile calls them: see Around.

    native: whether some piece is a native program.
    """

    buffers: Buffers
    pieces: list[tuple[str | None, Work]]
    native: bool

    def run(
        self, ids: torch.Tensor | None, batch: AttentionBatch | None, *given: torch.Tensor
    ) -> list[torch.Tensor]:
        """All of it, on the given buffers; returns what is in the places then."""
        places = self.buffers.of_step(*given)
        native = None
        if self.native:
            native = native_step(places, batch, 0 if ids is None else ids.data_ptr())
        step = Step(ids, places, batch, native)
        for _, work in self.pieces:
            work(step)
        return places


@dataclass
class Interpreter:
    """A stage's share of a model: its program, bound to weights. allocate() comes first.

    exchange: with the stage's other shards, which each step meets there; None if there are none.
    """

    program: Program
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    exchange: Exchange | None = None
    caches: list[KvCache] = field(default_factory=list, init=False)
    _body: Routine = field(init=False)
    _head: Routine = field(init=False)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the caches, of zeros, and compile the program for them."""
        self.caches = [
            new_cache(
                num_blocks, block_size, shape.kv_heads, shape.head_dim, self.dtype, self.device
            )
            for shape in self.program.caches
        ]
        self._body = self._routine(self.program.operations, "x")
        self._head = self._routine(self.program.head, "x", "logits")

    def forward(self, inputs: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run the stage's layers on T tokens.

        inputs: ids int64 [T] on the first stage, else activations [T, hidden], overwritten.
        Returns activations [T, hidden]. Raises IndexError for an id that the model does not have.
        """
        if inputs.dim() == 2:
            return self._body.run(None, batch, inputs)[0]
        # Not one of the buffers that stay: it becomes the activations, and may travel long.
        sizes = len(inputs), self.program.hidden_size
        x = torch.empty(sizes, dtype=self.dtype, device=self.device)
        return self._body.run(inputs, batch, x)[0]

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, [rows, vocab], of the given rows [rows, hidden]."""
        scores = activations.new_empty(len(activations), self.program.vocab_size)
        return self._head.run(None, None, activations, scores)[1]

    @contextmanager
    def watched(self, around: Around) -> Iterator[None]:
        """Meanwhile each piece of work is what `around` makes of it. allocate() comes before."""
        own = self._body, self._head
        try:
            self._body, self._head = (
                replace(routine, pieces=[(n, around(n, work)) for n, work in routine.pieces])
                for routine in own
            )
            yield
        finally:
            self._body, self._head = own

    def _routine(self, operations: Sequence[Operation], *given: str) -> Routine:
        share = self.program
        widths = {"x": share.hidden_size, "logits": share.vocab_size, **share.widths}
        buffers = Buffers(given, widths, self.dtype, self.device)
        bound = Bound(share, self.weights, self.caches, self.dtype, self.device, self.exchange)
        pieces: list[tuple[str | None, Work]] = []
        for native, run in groupby(operations, lambda operation: is_native(operation, bound)):
            if native:
                pieces.append((None, _call(compile_run(run, bound, buffers))))
            else:
                pieces += [(label(o), work_of(o, bound, buffers)) for o in run]
        return Routine(buffers, pieces, native=any(name is None for name, _ in pieces))


def _call(compiled: Any) -> Work:
    run = compiled.run
    return lambda step: run(step.native)
