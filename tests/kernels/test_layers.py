"""All layers in one native call against the same kernels one by one."""

import pytest
import torch

from headrace.kernels.linear import Linear
from headrace.model.layers import Layer, LayerWork, run_layers
from headrace.protocol.model_config import ModelConfig, RopeConfig
from kernels.paged import Sequences, sequences

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 72, 4, 2, 16, 50, 3


def model_config(window: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="Llama",
        vocab_size=1,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_epsilon=1e-5,
        max_positions=100,
        tied_head=False,
        attention_bias=True,
        mlp_bias=False,
        sliding_window=window,
        rope=RopeConfig(theta=1.0),
        dtype="float32",
        eos_token_ids=(),
    )


def random_layer(dtype: torch.dtype) -> Layer:
    def norm() -> torch.Tensor:
        return torch.rand(HIDDEN).to(dtype)

    def linear(outs: int, ins: int, bias: bool = False) -> Linear:
        return Linear(torch.randn(outs, ins) / 8, torch.randn(outs) if bias else None, dtype)

    width = HEADS * HEAD_DIM
    return Layer(
        attention_norm=norm(),
        qkv=linear(width + 2 * KV_HEADS * HEAD_DIM, HIDDEN, bias=True),
        attention_out=linear(HIDDEN, width, bias=True),
        mlp_norm=norm(),
        gate_up=linear(2 * INNER, HIDDEN),
        down=linear(HIDDEN, INNER),
    )


def outputs(
    work: LayerWork, rows: Sequences, x: list[torch.Tensor], cuts: list[list[int]]
) -> list[torch.Tensor]:
    """What the layers give for each sequence's tokens x, cut into chunks at these positions."""
    caches = [rows.cache() for _ in work.layers]
    angles = torch.rand(100, HEAD_DIM // 2, generator=torch.Generator().manual_seed(0)) * 6
    found: list[list[torch.Tensor]] = [[] for _ in x]
    bounds = [[0, *cut, len(tokens)] for cut, tokens in zip(cuts, x, strict=True)]
    for number in range(len(bounds[0]) - 1):
        parts = [(row, b[number], b[number + 1] - b[number]) for row, b in enumerate(bounds)]
        batch = rows.batch(parts)
        inputs = torch.cat([x[row][start : start + count] for row, start, count in parts])
        y = run_layers(work, inputs, angles.cos(), angles.sin(), batch, caches)
        for row, part in enumerate(y.split(batch.query_lens)):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_layers_in_one_call_equal_the_kernels_one_by_one_however_prompts_are_cut(
    native_path: str,
    dtype: torch.dtype,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [random_layer(dtype) for _ in range(LAYERS)]
    work = LayerWork(model_config(window), layers)
    rows = sequences([40, 7], block_size=5, kv_heads=KV_HEADS, group=2, dtype=dtype)
    x = [torch.randn(n, HIDDEN).to(dtype) for n in (40, 7)]
    in_one_call = outputs(work, rows, x, [[], []])
    cut = outputs(work, rows, x, [[1, 33], [2, 6]])
    with monkeypatch.context() as patch:
        patch.setattr(LayerWork, "native_stack", lambda *_: None)
        by_kernel = outputs(work, rows, x, [[], []])
    for whole, chunks, parts in zip(in_one_call, cut, by_kernel, strict=True):
        assert whole.isfinite().all()
        assert torch.equal(whole, chunks)
        assert torch.equal(whole, parts)
