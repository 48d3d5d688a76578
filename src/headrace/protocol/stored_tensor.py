"""A tensor as a program names it, and what of the checkpoint's files it is."""

from collections.abc import Iterable, Iterator

import msgspec

# Of MXFP4: numbers of a block that share a scale, and bytes that hold them.
MX_BLOCK, MX_BYTES = 32, 16


class Stack(msgspec.Struct, frozen=True, array_like=True):
    """Where the tensor of one expert lies among those of all, in one tensor [experts, ...].

    expert: its number. step: it has every so many of the rows, the others are other tensors'.
    first: of its rows. transposed: the files' rows are its columns; step counts columns then.
    mxfp4: the files hold its numbers in 4 bits, `name`_blocks [experts, rows, columns / 32, 16],
    a byte for elements 2j and 2j + 1 of a row, and `name`_scales [experts, rows, columns / 32].
    """

    experts: int
    expert: int = 0
    step: int = 1
    first: int = 0
    transposed: bool = False
    mxfp4: bool = False


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Which part of a tensor a shard has. whole: the tensor's shape. axis: along which it is cut.
    ranges: first and end of what the shard has along it, in ascending order."""

    whole: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[int, int], ...]


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the checkpoint's files, by its name there.

    shape: [outs, ins] of a matrix, [width] of a vector. paired_heads: GGUF stores the rows of
    so many heads with rotated pairs next to each other, to be undone; 0: as they are. optional:
    zeros if the files do not have it. An expert's is in a Stack, or one by itself, whose name has
    {} in place of the expert's number until of_expert() puts it there. cut: shape and heads are
    those of a part, and the files have more.
    """

    name: str
    shape: tuple[int, ...]
    paired_heads: int = 0
    optional: bool = False
    stack: Stack | None = None
    cut: Cut | None = None

    def of_expert(self, expert: int) -> "StoredTensor":
        """The expert's own, of a tensor that stands for all of them."""
        if self.stack is None:
            return msgspec.structs.replace(self, name=self.name.format(expert))
        stack = msgspec.structs.replace(self.stack, expert=expert)
        return msgspec.structs.replace(self, stack=stack)

    def of_experts(self, count: int) -> Iterator["StoredTensor"]:
        """All that the files have for so many experts."""
        if self.stack is not None:
            yield self
            return
        for expert in range(count):
            yield self.of_expert(expert)

    @property
    def stored(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the files' tensors that hold it."""
        stack, shape = self.stack, self.shape if self.cut is None else self.cut.whole
        if stack is None:
            return ((self.name, shape),)
        rows, columns = shape[0] * stack.step, shape[1:]
        if stack.mxfp4:
            blocks = (stack.experts, rows, columns[0] // MX_BLOCK)
            return (f"{self.name}_blocks", (*blocks, MX_BYTES)), (f"{self.name}_scales", blocks)
        own = (*columns, rows) if stack.transposed else (rows, *columns)
        return ((self.name, (stack.experts, *own)),)


def cut_to(tensor: StoredTensor, axis: int, ranges: Iterable[tuple[int, int]]) -> StoredTensor:
    """What a shard has of a tensor that is not cut yet: along the axis, these ranges of it, in
    ascending order. Heads, if rows are heads, are cut whole."""
    kept = _joined(ranges)
    assert tensor.cut is None
    if kept == ((0, tensor.shape[axis]),):
        return tensor
    size = sum(end - first for first, end in kept)
    shape = tuple(size if at == axis else n for at, n in enumerate(tensor.shape))
    heads = tensor.paired_heads
    if axis == 0 and heads:
        assert heads * size % tensor.shape[0] == 0
        heads = heads * size // tensor.shape[0]
    cut = Cut(tensor.shape, axis, kept)
    return msgspec.structs.replace(tensor, shape=shape, paired_heads=heads, cut=cut)


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same without empty ones, and with neighbours as one."""
    found: list[tuple[int, int]] = []
    for first, end in ranges:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], end
        elif end > first:
            found.append((first, end))
    return tuple(found)
