"""Whether a file holds the tensors that a model is made of, in the shapes it asks for."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.errors import ModelError
from headrace.protocol.program import (
    Attention,
    Embed,
    Experts,
    HeadNorm,
    Linear,
    Norm,
    Program,
    Rotate,
)
from headrace.protocol.stored_tensor import StoredTensor


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
            for name, shape in tensor.stored:
                if name in shapes:
                    check_shape(path, name, shapes[name], shape)
                    used.add(name)
                elif not tensor.optional:
                    raise ModelError(f"model {path}: tensor {name} is missing")
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
            case Experts(gate_up=gate_up, down=down, count=count):
                for part in (*gate_up.parts, *gate_up.biases, *down.parts, *down.biases):
                    found += part.of_experts(count)
            case Rotate(factors=factors, long_factors=long_factors):
                found += [factors, long_factors]
            case Attention(sinks=sinks):
                found.append(sinks)
    return [tensor for tensor in found if tensor is not None]


def check_shape(path: Path, name: str, found: tuple[int, ...], configured: tuple[int, ...]) -> None:
    """Raises ModelError if a tensor has another shape than the configuration asks for.

    Sizes of 1 may be left out, as llama.cpp's converter does.
    """
    if [n for n in found if n != 1] != [n for n in configured if n != 1]:
        raise ModelError(
            f"model {path}: tensor {name} has shape {list(found)}, "
            f"the configuration asks for {list(configured)}"
        )
