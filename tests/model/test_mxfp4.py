"""Experts in MXFP4, in either kind of files, give what their numbers give in float32."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_conversion import convert
from greedy import run_stages
from headrace.checkpoint.locate import locate_model
from headrace.errors import ModelError
from headrace.model.mxfp4 import dequantized
from headrace.model.read import model_from_huggingface
from headrace.protocol.model_config import StageShare
from model.test_architectures import GPT_OSS, PROMPT, load_reference
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_llama

# Widths of whole blocks of 32.
SIZES = GPT_OSS | {"hidden_size": 64, "intermediate_size": 32}


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks [..., columns / 32, 16] and scales of the shape of these rows."""
    generator = torch.Generator().manual_seed(rows.numel())
    shape = (*rows.shape[:-1], rows.shape[-1] // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def write_models(path: Path) -> tuple[Path, Path]:
    """A GPT-OSS whose experts are in MXFP4, and the same in float32."""
    plain = write_tiny_llama(path / "plain", architecture="GptOss", **SIZES)
    packed = write_tiny_llama(path / "packed", architecture="GptOss", **SIZES)
    tensors = load_file(plain / "model.safetensors")
    held = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        # Stored the other way round than the plain weights.
        blocks, scales = quantize(tensor.transpose(1, 2))
        del held[name]
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = torch.stack([dequantized(*each) for each in zip(blocks, scales, strict=True)])
        tensors[name] = values.float().transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(held, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return packed, plain


def test_a_byte_holds_two_neighbours_the_first_in_its_low_half() -> None:
    block = torch.zeros(1, 1, 16, dtype=torch.uint8)
    block[0, 0, 0], block[0, 0, 3] = 0x91, 0x7F
    values = dequantized(block, torch.tensor([[128]], dtype=torch.uint8))[0]
    assert values[:2].tolist() == [1.0, -1.0]
    assert values[6:8].tolist() == [-12.0, 12.0]
    assert values.count_nonzero() == 4


def test_all_numbers_of_mxfp4_are_those_of_the_gguf_package() -> None:
    halves = torch.arange(16, dtype=torch.uint8)
    both = torch.cat((halves, halves.flip(0)))
    for scale in (0, 1, 2, 100, 127, 200, 250):
        block = (both[0::2] | both[1::2] << 4).view(1, 1, 16)
        own = dequantized(block, torch.tensor([[scale]], dtype=torch.uint8)).float()
        theirs = np.concatenate(([scale], (both[:16] | both[16:] << 4).numpy())).astype(np.uint8)
        expected = gguf.quants.dequantize(theirs[None], gguf.GGMLQuantizationType.MXFP4)
        assert np.array_equal(own.numpy(), expected)


def test_all_experts_numbers_are_those_that_transformers_unpacks() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = quantize(torch.empty(3, 40, 96))
    # With the output last, as transformers' experts have their weights.
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    for own in range(3):
        assert torch.equal(dequantized(blocks[own], scales[own]), expected[own])


@pytest.mark.parametrize("layers", [[4], [2, 2]], ids=str)
def test_a_directory_in_mxfp4_gives_transformers_tokens_of_its_numbers(
    tmp_path: Path, layers: list[int]
) -> None:
    packed, plain = write_models(tmp_path)
    tokens, logits = run_stages(packed, layers, PROMPT, outputs=8, chunk=16)
    with torch.inference_mode():
        given = torch.tensor([PROMPT + tokens])
        expected = load_reference(plain)(given).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_file_in_mxfp4_gives_the_tokens_of_its_numbers(tmp_path: Path) -> None:
    _, plain = write_models(tmp_path)
    kind = gguf.GGMLQuantizationType.MXFP4
    file = convert(plain, tmp_path / "model.gguf", experts=kind)
    expected = run_stages(plain, [4], PROMPT, outputs=8, chunk=16)
    found = run_stages(file, [2, 2], PROMPT, outputs=8, chunk=16)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=0)


def test_a_stage_reads_its_own_experts_alone(tmp_path: Path) -> None:
    packed, _ = write_models(tmp_path)
    files = locate_model(str(packed))
    model = read_model(files)
    whole = load_stage(files, model).weights.nbytes
    halves = [
        load_stage(files, model, share).weights.nbytes
        for share in (
            StageShare(0, 2, embeds=True, samples=False),
            StageShare(2, 4, embeds=False, samples=True),
        )
    ]
    assert sum(halves) == whole


def test_blocks_of_another_shape_and_other_quantizations_are_refused(tmp_path: Path) -> None:
    packed, _ = write_models(tmp_path)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    save_file(tensors | {name: tensors[name][:, :, :, :8].contiguous()}, file)
    with pytest.raises(ModelError, match="down_proj_blocks has shape"):
        model_from_huggingface(packed)
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq"}
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="gptq"):
        model_from_huggingface(packed)
