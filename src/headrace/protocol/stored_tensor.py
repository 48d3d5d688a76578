"""A tensor as a program names it, and what of the checkpoint's files it is."""

from collections.abc import Iterator

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


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the checkpoint's files, by its name there.

    shape: [outs, ins] of a matrix, [width] of a vector. paired_heads: GGUF stores the rows of
    so many heads with rotated pairs next to each other, to be undone; 0: as they are. optional:
    zeros if the files do not have it. An expert's is in a Stack, or one by itself, whose name has
    {} in place of the expert's number until of_expert() puts it there.
    """

    name: str
    shape: tuple[int, ...]
    paired_heads: int = 0
    optional: bool = False
    stack: Stack | None = None

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
        stack = self.stack
        if stack is None:
            return ((self.name, self.shape),)
        rows, columns = self.shape[0] * stack.step, self.shape[1:]
        if stack.mxfp4:
            blocks = (stack.experts, rows, columns[0] // MX_BLOCK)
            return (f"{self.name}_blocks", (*blocks, MX_BYTES)), (f"{self.name}_scales", blocks)
        own = (*columns, rows) if stack.transposed else (rows, *columns)
        return ((self.name, (stack.experts, *own)),)
