"""Every family, from either kind of files, in every layout: `pytest -s` prints the matrix."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from gguf_conversion import convert
from greedy import run_stages
from model.test_architectures import FAMILIES, PROMPT, load_reference
from model.test_mxfp4 import write_models
from tiny_checkpoints import write_tiny_llama

# By what people call them: how the four layers are split, and shards.
LAYOUTS = {"pp=1": ([4], 1), "pp=2": ([1, 3], 1), "tp=2": ([4], 2), "pp=2 tp=2": ([1, 3], 2)}


def worst_error(path: Path, reference: Any, layers: list[int], shards: int) -> float:
    """Of logits in float32; the greedy tokens must be equal."""
    tokens, logits = run_stages(path, layers, PROMPT, outputs=8, chunk=16, shards=shards)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    return float((logits - expected).abs().max())


@pytest.fixture(scope="module")
def matrix() -> Any:
    rows: list[str] = []
    yield rows
    print("\nlargest error of a logit in float32, greedy tokens equal to transformers'")
    print("| architecture | files | " + " | ".join(LAYOUTS) + " |")
    print("| --- " * (2 + len(LAYOUTS)) + "|")
    print("\n".join(rows))


@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=FAMILIES.keys())
def test_logits_and_greedy_tokens_are_transformers_in_every_layout(
    tmp_path: Path, name: str, options: dict[str, Any], matrix: list[str]
) -> None:
    path = write_tiny_llama(
        tmp_path / "model", architecture=name, **options | {"num_hidden_layers": 4}
    )
    reference = load_reference(path)
    for kind, file in (
        ("safetensors", path),
        ("GGUF", convert(path, tmp_path / "model.gguf")),
    ):
        errors = [worst_error(file, reference, *layout) for layout in LAYOUTS.values()]
        matrix.append(f"| {name} | {kind} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")
        assert max(errors) < 1e-4


def test_mxfp4_gives_its_numbers_tokens_in_every_layout(tmp_path: Path, matrix: list[str]) -> None:
    packed, plain = write_models(tmp_path)
    reference = load_reference(plain)
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    for kind, file in (
        ("MXFP4 in safetensors", packed),
        ("MXFP4 in GGUF", convert(plain, tmp_path / "model.gguf", experts=mxfp4)),
    ):
        errors = [worst_error(file, reference, *layout) for layout in LAYOUTS.values()]
        matrix.append(f"| GptOss | {kind} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")
        assert max(errors) < 1e-4
