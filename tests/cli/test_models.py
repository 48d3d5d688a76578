"""`headrace models` tells of every family, and what it says is refused is."""

import json
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.errors import ModelError
from headrace.model.architecture import Architecture
from headrace.model.architectures import ARCHITECTURES
from stage_models import described_program
from tiny_checkpoints import write_tiny_llama


def test_every_family_is_listed_with_names_files_and_what_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["models", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [f["architecture"] for f in told["families"]] == [each.name for each in ARCHITECTURES]
    for family in told["families"]:
        assert family["models"]
        assert family["refused"]
        assert family["gguf"]
        assert {"safetensors", "GGUF"} <= set(family["files"])
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    for word in ("gpt-oss-20b", "MXFP4", "Q4_K", "clip_qkv", "pickled"):
        assert word in shown


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_what_is_said_to_be_refused_is(tmp_path: Path, architecture: Architecture) -> None:
    name = architecture.name.removesuffix("ForCausalLM")
    path = write_tiny_llama(tmp_path, architecture=name, pad_token_id=None)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    odd = {
        "activations other than": {"hidden_act": "relu", "hidden_activation": "relu"},
        "activations other than swiglu": {"swiglu_alpha": 1.5},
        "rotating only": {"partial_rotary_factor": 0.5, "rope_parameters": None},
        "clipped": {"clip_qkv": 1.0},
    }
    tried = 0
    for refused in architecture.refused:
        known = [key for key in odd if refused.startswith(key)]
        if not known:
            continue
        fields = odd[max(known, key=len)]
        with pytest.raises(ModelError):
            described_program(architecture, **(config | fields))
        tried += 1
    assert tried
