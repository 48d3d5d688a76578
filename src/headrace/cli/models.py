"""`headrace models`: the families of models that run, from which files, and what is refused."""

import json

from rich.console import Console
from rich.table import Table

from headrace.checkpoint.gguf_file import SUPPORTED_KINDS
from headrace.checkpoint.huggingface_config import DTYPES
from headrace.cli import options
from headrace.model.architecture import Architecture
from headrace.model.architectures import ARCHITECTURES

# What no family has.
_ALWAYS = (
    "weights that are pickled (*.bin), quantized otherwise (GPTQ, AWQ, bitsandbytes), or adapters",
    "GGUF files in several parts, or with tensors of other kinds",
    "values of another width than keys, rotating a part of each head, activations and scalings of "
    "rotations that are not known: named when the model is read",
)


def models(as_json: options.AsJson = False, debug: options.Debug = False) -> int:
    """Families of models that run, kinds of files, and what of each family is refused."""
    if as_json:
        print(json.dumps({"families": list(map(_family, ARCHITECTURES)), "refused": _ALWAYS}))
        return 0
    table = Table(show_lines=True)
    for heading in ("models", "config.json", "GGUF", "files", "refused"):
        table.add_column(heading)
    for each in ARCHITECTURES:
        table.add_row(
            ", ".join(each.models),
            f"{each.name}, {each.model_type}",
            _gguf(each) or "-",
            ", ".join(_files(each)),
            "; ".join(each.refused),
        )
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    print(f"safetensors: {', '.join(DTYPES)}, and MXFP4 where it says so")
    print(f"GGUF: {', '.join(kind.name for kind in SUPPORTED_KINDS)}")
    for refused in _ALWAYS:
        print(f"refused of all: {refused}")
    return 0


# Those whose GGUF files call themselves what another family's do.
_GGUF_OF = {"mistral": "llama", "mixtral": "llama"}


def _gguf(each: Architecture) -> str | None:
    return each.gguf or _GGUF_OF.get(each.model_type)


def _files(each: Architecture) -> list[str]:
    return ["safetensors"] + ["MXFP4"] * each.mxfp4 + ["GGUF"] * (_gguf(each) is not None)


def _family(each: Architecture) -> dict[str, object]:
    return {
        "models": each.models,
        "architecture": each.name,
        "model_type": each.model_type,
        "gguf": _gguf(each),
        "files": _files(each),
        "refused": each.refused,
    }
