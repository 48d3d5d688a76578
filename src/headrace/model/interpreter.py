"""Runs a program: what each operation means, by kernels/*.py, on any device."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from headrace.kernels import elementwise
from headrace.kernels.attention import paged_attention, rotate_and_write
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.kv_cache import KvCache, new_cache
from headrace.model.bind import Weights, rotation_of
from headrace.protocol import program
from headrace.protocol.program import Operation, Program


@dataclass(frozen=True)
class Step:
    """What operations work on: ids int64 [T] on the first stage, buffers by place, the batch."""

    ids: torch.Tensor | None
    buffers: list[torch.Tensor]
    batch: AttentionBatch | None


# An operation with its weights, cache and places of buffers, which are looked up once.
Work = Callable[[Step], None]


@dataclass
class Buffers:
    """Places of buffers, and room for their contents, which all steps share.

    A place is a buffer [T, width], or its view by heads [T, width / head_dim, head_dim]. given:
    buffers that each step brings; they have the first places.
    """

    given: tuple[str, ...]
    widths: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    _places: dict[tuple[str, int], int] = field(init=False)
    _views: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    _room: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._places = {(name, 0): place for place, name in enumerate(self.given)}

    def place(self, name: str, head_dim: int = 0) -> int:
        """Of the buffer, or of its view by heads of this width."""
        known = self._places.get((name, head_dim))
        if known is not None:
            return known
        if head_dim:
            self.place(name)
        place = self._places[name, head_dim] = len(self._places)
        if head_dim:
            self.views(name).append((place, head_dim))
        return place

    def views(self, name: str) -> list[tuple[int, int]]:
        """Places of the buffer's views by heads, and the heads' widths; grows with them."""
        return self._views.setdefault(name, [])

    def of_step(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """All places' contents for as many tokens as the given buffers have."""
        tokens = len(given[0])
        found = list(given)
        for name, head_dim in list(self._places)[len(given) :]:
            if head_dim:
                found.append(found[self._places[name, 0]].view(tokens, -1, head_dim))
                continue
            room = self._room.get(name)
            if room is None or len(room) < tokens:
                room = torch.empty(tokens, self.widths[name], dtype=self.dtype, device=self.device)
                self._room[name] = room
            found.append(room[:tokens])
        return found


@dataclass
class Interpreter:
    """A stage's share of a model: its program, bound to weights. allocate() comes first."""

    program: Program
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    caches: list[KvCache] = field(default_factory=list, init=False)
    _body: list[Work] = field(default_factory=list, init=False)
    _head: list[Work] = field(default_factory=list, init=False)
    _body_buffers: Buffers = field(init=False)
    _head_buffers: Buffers = field(init=False)

    def __post_init__(self) -> None:
        widths = self.program.widths
        self._body_buffers = Buffers(("x",), widths, self.dtype, self.device)
        self._head_buffers = Buffers(("x", "logits"), widths, self.dtype, self.device)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the caches, of zeros, and all that operations look up."""
        self.caches = [
            new_cache(
                num_blocks, block_size, shape.kv_heads, shape.head_dim, self.dtype, self.device
            )
            for shape in self.program.caches
        ]
        self._body = self._work(self.program.operations, self._body_buffers)
        self._head = self._work(self.program.head, self._head_buffers)

    def forward(self, inputs: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run the stage's layers on T tokens.

        inputs: ids int64 [T] on the first stage, else activations [T, hidden], overwritten.
        Returns activations [T, hidden].
        """
        ids, x = None, inputs
        if inputs.dim() == 1:
            # Not one of the buffers that stay: it becomes the activations, and may travel long.
            x = torch.empty(
                len(inputs), self.program.hidden_size, dtype=self.dtype, device=self.device
            )
            ids = inputs
        step = Step(ids, self._body_buffers.of_step(x), batch)
        for work in self._body:
            work(step)
        return step.buffers[0]

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, [rows, vocab], of the given rows [rows, hidden]."""
        scores = activations.new_empty(len(activations), self.program.vocab_size)
        step = Step(None, self._head_buffers.of_step(activations, scores), None)
        for work in self._head:
            work(step)
        return step.buffers[1]

    @contextmanager
    def watched(self, around: Callable[[str, Work], Work]) -> Iterator[None]:
        """Meanwhile each piece of work is what `around` makes of it, given what a profile calls it.

        allocate() comes before."""
        own = self._body, self._head
        operations = self.program.operations, self.program.head
        try:
            self._body, self._head = (
                [around(label(operation), work) for operation, work in zip(*pair, strict=True)]
                for pair in zip(operations, own, strict=True)
            )
            yield
        finally:
            self._body, self._head = own

    def _work(self, operations: Iterable[Operation], buffers: Buffers) -> list[Work]:
        return [
            work_of(self.program, operation, self.weights, buffers, self.caches)
            for operation in operations
        ]


def label(operation: Operation) -> str:
    """What a profile calls the operation."""
    match operation:
        case program.Linear():
            return operation.label
        case program.GatedActivation():
            return operation.activation
        case program.Add():
            # The residual's, which elsewhere is part of a norm.
            return "norm"
    return str(operation.__struct_config__.tag)


def work_of(
    share: Program,
    operation: Operation,
    weights: Weights,
    buffers: Buffers,
    caches: list[KvCache],
) -> Work:
    """The operation by kernels/*.py, one call a kernel."""
    match operation:
        case program.Embed():
            return _embed(operation, weights, buffers)
        case program.Norm():
            return _norm(operation, weights, buffers)
        case program.HeadNorm():
            return _head_norm(operation, weights, buffers)
        case program.Linear():
            return _linear(operation, weights, buffers)
        case program.Rotate():
            return _rotate(share, operation, weights, buffers, caches)
        case program.Attention():
            return _attention(operation, weights, buffers, caches)
        case program.GatedActivation(activation=activation):
            source, out = buffers.place(operation.source), buffers.place(operation.out)

            def activate(step: Step) -> None:
                elementwise.activate_and_multiply(
                    step.buffers[source], activation, step.buffers[out]
                )

            return activate
        case program.Add():
            to, added = buffers.place(operation.to), buffers.place(operation.source)

            def add(step: Step) -> None:
                step.buffers[to].add_(step.buffers[added])

            return add
        case program.SoftCap(cap=cap):
            capped = buffers.place(operation.buffer)
            return lambda step: elementwise.soft_cap(step.buffers[capped], cap)


def _embed(operation: program.Embed, weights: Weights, buffers: Buffers) -> Work:
    table, scale, x = weights.tables[operation.table], operation.scale, buffers.place("x")

    def work(step: Step) -> None:
        assert step.ids is not None
        elementwise.embed(step.ids, table, scale, step.buffers[x])

    return work


def _norm(operation: program.Norm, weights: Weights, buffers: Buffers) -> Work:
    weight, epsilon = weights.vectors[operation.weight], operation.epsilon
    source, out = buffers.place(operation.source), buffers.place(operation.out)
    if operation.delta is None:

        def work(step: Step) -> None:
            elementwise.rms_norm(step.buffers[source], weight, epsilon, step.buffers[out])

        return work
    delta = buffers.place(operation.delta)

    def adding(step: Step) -> None:
        elementwise.add_rms_norm(
            step.buffers[source], step.buffers[delta], weight, epsilon, step.buffers[out]
        )

    return adding


def _head_norm(operation: program.HeadNorm, weights: Weights, buffers: Buffers) -> Work:
    weight, epsilon = weights.vectors[operation.weight], operation.epsilon
    heads = buffers.place(operation.buffer, operation.head_dim)
    first, end = operation.first, operation.first + operation.heads

    def work(step: Step) -> None:
        elementwise.head_norm(step.buffers[heads][:, first:end], weight, epsilon)

    return work


def _linear(operation: program.Linear, weights: Weights, buffers: Buffers) -> Work:
    linear = weights.matrices[operation.weight]
    source, out = buffers.place(operation.source), buffers.place(operation.out)
    views = buffers.views(operation.out)

    def work(step: Step) -> None:
        own = step.buffers
        room = own[out]
        result = linear(own[source], room)
        if result is not room:
            own[out] = result
            for view, head_dim in views:
                own[view] = result.view(len(result), -1, head_dim)

    return work


def _rotate(
    share: Program,
    operation: program.Rotate,
    weights: Weights,
    buffers: Buffers,
    caches: list[KvCache],
) -> Work:
    cache = caches[operation.cache]
    qkv = buffers.place(operation.qkv, cache.head_dim)
    rotation = rotation_of(share, operation)
    cos, sin = (None, None) if rotation is None else weights.rotations[rotation]

    def work(step: Step) -> None:
        assert step.batch is not None
        rotate_and_write(step.buffers[qkv], cos, sin, cache, step.batch)

    return work


def _attention(
    operation: program.Attention, weights: Weights, buffers: Buffers, caches: list[KvCache]
) -> Work:
    cache, scale = caches[operation.cache], operation.scale
    qkv = buffers.place(operation.qkv, cache.head_dim)
    out = buffers.place(operation.out, cache.head_dim)
    window, soft_cap = operation.window, operation.soft_cap
    sinks = None if operation.sinks is None else weights.sinks[operation.sinks]

    def work(step: Step) -> None:
        assert step.batch is not None
        own = step.buffers
        paged_attention(own[qkv], cache, step.batch, scale, window, sinks, soft_cap, own[out])

    return work
