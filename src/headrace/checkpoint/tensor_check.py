"""Whether a file holds the tensors that a model is made of, in the shapes it asks for."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.errors import ModelError
from headrace.protocol.program import (
    Attention,
    Embed,
    HeadNorm,
    Linear,
    Norm,
    Program,
    Rotate,
    StoredTensor,
)


def check_tensors(
    path: Path, programs: Iterable[Program], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Hold programs against the tensors that are really there, before anything believes a size.

    programs: of all parts of the model, each as small as can be, made one by one. shapes: of all
    tensors, by their names in the file. Returns the names of tensors that the model does not use.
    Raises ModelError for the first tensor that is missing or of another shape, so the work is
    bounded by what the file holds.
    """
    used = set()
    for program in programs:
        for tensor in tensors_of(program):
            if tensor.name in shapes:
                check_shape(path, tensor.name, shapes[tensor.name], tensor.shape)
                used.add(tensor.name)
            elif not tensor.optional:
                raise ModelError(f"model {path}: tensor {tensor.name} is missing")
    return [name for name in shapes if name not in used]


def tensors_of(program: Program) -> list[StoredTensor]:
    """Every tensor that the program names, in the order of its operations; some come twice."""
    found: list[StoredTensor | None] = []
    for operation in (*program.operations, *program.head):
        match operation:
            case Embed(table=table):
                found.append(table)
            case Norm(weight=weight) | HeadNorm(weight=weight):
                found.append(weight.tensor)
            case Linear(weight=matrix):
                found += [*matrix.parts, *matrix.biases]
            case Rotate(factors=factors):
                found.append(factors)
            case Attention(sinks=sinks):
                found.append(sinks)
    return [tensor for tensor in found if tensor is not None]


def check_shape(path: Path, name: str, found: tuple[int, ...], configured: tuple[int, ...]) -> None:
    """Raises ModelError if a tensor has another shape than the configuration asks for."""
    if tuple(found) != configured:
        raise ModelError(
            f"model {path}: tensor {name} has shape {list(found)}, "
            f"the configuration asks for {list(configured)}"
        )
