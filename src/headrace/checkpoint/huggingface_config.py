"""A model directory's config.json, as transformers reads it, and what it says of every model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint.config_fields import LAYER_KINDS, check_fields
from headrace.checkpoint.generation_config import generation_config, token_ids
from headrace.checkpoint.json_file import one_line
from headrace.checkpoint.safetensors_files import StoredTensor
from headrace.errors import ModelError

# How safetensors write the dtypes that are read.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class HuggingFaceConfig:
    """raw: the file's fields. values: transformers' reading of them (defaults, types, and all ways
    to write rope), but for num_layers and layer_kinds. tensors: all that the directory has.

    layer_kinds: layer_types, full_attention or sliding_attention of each layer; None if the file
    does not say.
    """

    path: Path
    raw: Mapping[str, Any]
    values: Any
    num_layers: int
    layer_kinds: Sequence[str] | None
    tensors: Mapping[str, StoredTensor]


def read_huggingface_config(
    path: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    config_class: str,
    fields: frozenset[str],
    ignored: frozenset[str],
    *,
    mxfp4: bool = False,
) -> HuggingFaceConfig:
    """The fields as this class of transformers reads them.

    fields: those that make the model. ignored: those that are there and mean nothing to it. mxfp4:
    weights may be quantized so. Runs no code of the directory's. Raises ModelError for fields whose
    meaning is unknown, and for values that make no sense to transformers.
    """
    check_fields(path, raw, fields, ignored, mxfp4=mxfp4)
    # Slow to import, and only this kind of model needs it.
    import transformers

    kind = getattr(transformers, config_class)
    given = {name: raw[name] for name in fields & raw.keys()}
    # One kind for each layer, which transformers would write down for any number of them.
    given.pop("layer_types", None)
    if hasattr(kind, "layer_types"):
        given |= {"layer_types": list(LAYER_KINDS), "num_hidden_layers": len(LAYER_KINDS)}
    num_layers = raw.get("num_hidden_layers", kind.num_hidden_layers)
    if not isinstance(num_layers, int) or isinstance(num_layers, bool):
        raise ModelError(
            f"model {path}: config.json cannot be used: num_hidden_layers is "
            f"{str(num_layers)[:50]!r}, not a whole number"
        )
    try:
        values = kind(**given)
        # As the model does once more when it is made: only then do all fields count.
        values.standardize_rope_params()
    except Exception as error:
        raise ModelError(f"model {path}: config.json cannot be used: {one_line(error)}") from error
    layer_kinds = _layer_kinds(path, raw, num_layers) if "layer_types" in fields else None
    return HuggingFaceConfig(path, raw, values, num_layers, layer_kinds, tensors)


def _layer_kinds(path: Path, raw: Mapping[str, Any], num_layers: int) -> Sequence[str] | None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in LAYER_KINDS for kind in kinds):
        raise ModelError(f"model {path}: layer_types may hold {' and '.join(LAYER_KINDS)} only")
    if len(kinds) != num_layers:
        raise ModelError(
            f"model {path}: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    return kinds


def dtype_of(config: HuggingFaceConfig) -> str:
    """The weights' dtype by the configuration, or else by the first of them, as in transformers."""
    named = config.raw.get("dtype") or config.raw.get("torch_dtype")
    if named is None:
        stored = config.tensors.values()
        return next((DTYPES[t.dtype] for t in stored if t.dtype in DTYPES), "float32")
    dtype = str(named).removeprefix("torch.")
    if dtype not in DTYPES.values():
        raise ModelError(
            f"model {config.path}: dtype {dtype[:50]} is not supported; supported are "
            f"{', '.join(DTYPES.values())}"
        )
    return dtype


def eos_ids(config: HuggingFaceConfig) -> tuple[int, ...]:
    """All end-of-text tokens, those of config.json and those of generation_config.json; the
    tokenizer may have more."""
    path = config.path
    named = config.raw.get("eos_token_id", config.values.eos_token_id)
    generation = generation_config(path).get("eos_token_id")
    found = token_ids(path / "config.json", "eos_token_id", named) | token_ids(
        path / "generation_config.json", "eos_token_id", generation
    )
    return tuple(sorted(found))


def refuse_other_kinds(path: Path) -> None:
    """Raises ModelError for directories that are no model by themselves, or whose weights are not
    what they seem."""
    for name, what in {
        "adapter_config.json": "holds an adapter (LoRA), which is no model by itself: merge it "
        "into its base model (merge_and_unload of peft) and give that",
        "quantize_config.json": "has weights quantized by GPTQ (quantize_config.json), which are "
        "not supported for directories; use the original weights or a GGUF file",
        "quant_config.json": "has quantized weights (quant_config.json), which are not supported "
        "for directories; use the original weights or a GGUF file",
    }.items():
        if (path / name).is_file():
            raise ModelError(f"model {path}: the directory {what}")
