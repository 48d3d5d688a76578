"""A program's operations together, however prompts are cut."""

from dataclasses import dataclass, field

import pytest
import torch

from headrace.kernels.kv_cache import KvCache
from headrace.model import interpreter
from headrace.model.architectures.qwen2 import QWEN2
from headrace.model.bind import Weights, bind
from headrace.model.interpreter import Interpreter
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import Program
from headrace.protocol.stored_tensor import StoredTensor
from kernels.paged import Sequences, sequences
from stage_models import described_program

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 72, 4, 2, 16, 50, 3


def llama(window: int | None) -> Program:
    """Layers that are neither first nor last of a model, one without the window."""
    return described_program(
        QWEN2,
        StageShare(0, LAYERS, embeds=False, samples=False),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_theta=1.0,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


@dataclass(frozen=True)
class RandomTensors:
    """Has whatever it is asked for."""

    known: dict[str, torch.Tensor] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return True

    def load(self, tensor: StoredTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if tensor.name not in self.known:
            shape = tensor.shape
            scale = 8 if len(shape) == 2 else 1
            self.known[tensor.name] = torch.randn(shape) / scale
        return self.known[tensor.name].to(dtype or torch.float32)


def random_weights(program: Program, dtype: torch.dtype) -> Weights:
    return bind(program, RandomTensors(), dtype, torch.device("cpu"), 100, lambda _: None)


def unwritten(cache: KvCache) -> None:
    """Every place is infinite or no number: nobody has written it."""
    for memory in (cache.keys, cache.values):
        memory.fill_(torch.nan)
        memory.view(-1)[::3] = torch.inf
        memory.view(-1)[1::3] = -torch.inf


def outputs(
    model: Interpreter, rows: Sequences, x: list[torch.Tensor], cuts: list[list[int]]
) -> list[torch.Tensor]:
    """What the layers give for each sequence's tokens x, cut into chunks at these positions."""
    model.allocate(int(rows.tables.max()) + 1, rows.block_size)
    for cache in model.caches:
        unwritten(cache)
    found: list[list[torch.Tensor]] = [[] for _ in x]
    bounds = [[0, *cut, len(tokens)] for cut, tokens in zip(cuts, x, strict=True)]
    for number in range(len(bounds[0]) - 1):
        parts = [(row, b[number], b[number + 1] - b[number]) for row, b in enumerate(bounds)]
        batch = rows.batch(parts)
        inputs = torch.cat([x[row][start : start + count] for row, start, count in parts])
        y = model.forward(inputs, batch)
        for row, part in enumerate(y.split(batch.query_lens)):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_operations_in_one_call_equal_them_one_by_one_however_prompts_are_cut(
    native_path: str,
    dtype: torch.dtype,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = llama(window)
    model = Interpreter(program, random_weights(program, dtype), dtype, torch.device("cpu"))
    rows = sequences([40, 7], block_size=5, kv_heads=KV_HEADS, group=2, dtype=dtype)
    x = [torch.randn(n, HIDDEN).to(dtype) for n in (40, 7)]
    whole = outputs(model, rows, x, [[], []])
    cut = outputs(model, rows, x, [[1, 33], [2, 6]])
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "is_native", lambda *_: False)
        one_by_one = outputs(model, rows, x, [[], []])
    for together, chunks, alone in zip(whole, cut, one_by_one, strict=True):
        assert together.isfinite().all()
        assert torch.equal(together, chunks)
        assert torch.equal(together, alone)
