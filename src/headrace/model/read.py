"""A model's sizes and program, from a Hugging Face directory or a GGUF file."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.gguf_metadata import GgufMetadata, refuse_other_gguf_files
from headrace.checkpoint.gguf_tokenizer import end_ids
from headrace.checkpoint.huggingface_config import (
    DTYPES,
    dtype_of,
    eos_ids,
    read_huggingface_config,
    refuse_other_kinds,
)
from headrace.checkpoint.json_file import read_json_object
from headrace.checkpoint.safetensors_files import StoredTensor, stored_tensors
from headrace.checkpoint.tensor_check import check_tensors
from headrace.errors import ModelError
from headrace.model.architecture import Architecture, Blueprint, Design
from headrace.model.architectures import ARCHITECTURES
from headrace.model.sizes import model_sizes
from headrace.model.stored_form import quantized_kinds
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import Program

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """All that a directory's configuration says. dtype: the weights' own."""

    design: Design
    dtype: str
    eos_token_ids: tuple[int, ...]


def model_from_huggingface(path: Path) -> Blueprint:
    """Read config.json and generation_config.json of a model directory.

    What it says is held against the headers of the weights. Runs no code of the directory's. Raises
    ModelError for damaged files and for what is not supported, naming it.
    """
    raw = read_json_object(path / "config.json")
    refuse_other_kinds(path)
    # First what the model is: whatever else is wrong matters less.
    architecture = _named_by_config(path, raw)
    tensors = stored_tensors(path)
    said = describe_huggingface(path, raw, architecture, tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    unused = check_tensors(path, _parts(said.design), shapes)
    for name in shapes.keys() - set(unused):
        tensor = tensors[name]
        packed = architecture.mxfp4 and tensor.dtype == "U8"
        if tensor.dtype not in DTYPES and not packed:
            raise ModelError(
                f"model {path}: tensor {name} is stored as {tensor.dtype}; supported are "
                f"{', '.join(DTYPES)}"
            )
    # Older files hold what follows from the configuration.
    unused = [name for name in unused if not name.endswith("rotary_emb.inv_freq")]
    if unused:
        _log.warning(
            f"model {path}: {len(unused)} of its tensors are not used, as a {architecture.name} "
            f"has none such: {unused[0][:100]!r}"
        )
    if raw.get("auto_map"):
        _log.warning(f"model {path}: its own code (auto_map) is not run; it may differ")
    sizes = model_sizes(architecture.name, said.design, said.dtype, said.eos_token_ids)
    return Blueprint(sizes, said.design.program)


def describe_huggingface(
    path: Path,
    raw: Mapping[str, Any],
    architecture: Architecture,
    tensors: Mapping[str, StoredTensor],
) -> Description:
    """What a config.json says of a model with these tensors, whose shapes are not looked at.

    Equal to what transformers makes of it; ModelError for what that would not be.
    """
    config = read_huggingface_config(
        path,
        raw,
        tensors,
        architecture.config_class,
        architecture.fields,
        architecture.ignored_fields,
        mxfp4=architecture.mxfp4,
    )
    return Description(architecture.from_huggingface(config), dtype_of(config), eos_ids(config))


def model_from_gguf(file: GgufFile) -> Blueprint:
    """Read the metadata of a GGUF file, and hold them against its tensors.

    Raises ModelError for what is missing or unsupported.
    """
    refuse_other_gguf_files(file)
    named = str(file.metadata.get("general.architecture", "(none named)"))
    known = {each.gguf: each for each in ARCHITECTURES if each.gguf is not None}
    architecture = known.get(named)
    if architecture is None or architecture.from_gguf is None:
        raise ModelError(
            f"model {file.path}: GGUF architecture {named[:100]} is not supported; "
            f"supported are {', '.join(map(str, known))}"
        )
    metadata = GgufMetadata(file, named, architecture.ignored_gguf_keys)
    design = architecture.from_gguf(metadata)
    metadata.refuse_unread()
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    # As in llama.cpp, a tensor too many is one that the file's maker counted on.
    for name in check_tensors(file.path, _parts(design), shapes):
        raise ModelError(
            f"model {file.path}: tensor {name[:100]!r} is none of a {architecture.name}'s, so "
            "the file is of another kind or damaged"
        )
    stored = file.tensors["token_embd.weight"].kind
    dtype = "float32" if stored == GGMLQuantizationType.F32 else "bfloat16"
    kinds = quantized_kinds(file)
    sizes = model_sizes(architecture.name, design, dtype, end_ids(file), kinds)
    return Blueprint(sizes, design.program)


def _named_by_config(path: Path, raw: Mapping[str, Any]) -> Architecture:
    """By model_type, as in transformers, or else by its architectures."""
    names = raw.get("architectures") or []
    names = list(map(str, names)) if isinstance(names, list) else [str(names)]
    of_type = {each.model_type: each for each in ARCHITECTURES}
    # A base model is the same without an output projection: transformers loads it all the same.
    of_name = {each.name: each for each in ARCHITECTURES}
    of_name |= {each.base_name: each for each in ARCHITECTURES}
    model_type = str(raw.get("model_type") or "")
    known = [of_name[name] for name in names if name in of_name]
    if (not names or known) and model_type in of_type:
        return of_type[model_type]
    if known and not model_type:
        return known[0]
    called = ", ".join(names)[:200] or "(none named)"
    if known or not names:
        called += f" with model_type {model_type[:100]!r}"
    own = " (and needs code of its own, auto_map, which is never run)" * bool(raw.get("auto_map"))
    raise ModelError(
        f"model {path}: architecture {called}{own} is not supported; supported are "
        f"{', '.join(each.name for each in ARCHITECTURES)}"
    )


def _parts(design: Design) -> Iterator[Program]:
    """The model in pieces: its two ends, then each layer."""
    yield design.program(StageShare(0, 0, embeds=True, samples=True))
    for number in range(design.decoder.num_layers):
        yield design.program(StageShare(number, number + 1, embeds=False, samples=False))
