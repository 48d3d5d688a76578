"""Models and their programs without any process, for tests."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import ModelFiles
from headrace.execution.model_executor import StageModel
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.exchange import Exchange, memory_size
from headrace.model.architecture import Architecture, Blueprint
from headrace.model.architectures.mistral import MISTRAL
from headrace.model.bind import bind
from headrace.model.interpreter import Interpreter
from headrace.model.read import describe_huggingface, model_from_gguf, model_from_huggingface
from headrace.model.shards import shard_program
from headrace.model.weights import TensorSource, open_tensors
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import Program


def read_model(files: ModelFiles) -> Blueprint:
    """Of a real model's files."""
    if files.kind == "gguf":
        return model_from_gguf(read_gguf(files.path))
    return model_from_huggingface(files.path)


def whole(model: Blueprint) -> Program:
    """The program of all of it."""
    return model.program(StageShare(0, model.sizes.num_layers, embeds=True, samples=True))


def described_program(
    architecture: Architecture, share: StageShare | None = None, **fields: Any
) -> Program:
    """What config.json with these fields describes, without files. share: None for all of it."""
    design = describe_huggingface(Path("model"), fields, architecture, {}).design
    layers = design.decoder.num_layers
    return design.program(share or StageShare(0, layers, embeds=True, samples=True))


def small_mistral(**fields: Any) -> Program:
    """3 layers of 2 heads of 4 numbers, one of them a key-value head."""
    sizes: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "sliding_window": None,
    }  # fmt: skip
    return described_program(MISTRAL, **(sizes | fields))


def load_stage(
    files: ModelFiles,
    model: Blueprint,
    share: StageShare | None = None,
    *,
    max_model_len: int | None = None,
    source: TensorSource | None = None,
    shard: tuple[int, int] = (0, 1),
    stored: bool = False,
) -> Interpreter:
    """In float32, as a stage loads it. share: None for all of it; max_model_len: None for the
    model's own. shard: which of how many. stored: quantized weights stay as they are."""
    program = whole(model) if share is None else model.program(share)
    program = shard_program(program, *shard)
    cpu, dtype = torch.device("cpu"), torch.float32
    length = max_model_len or model.sizes.max_positions
    with torch.inference_mode():
        source = source or open_tensors(files)
        file = read_gguf(files.path) if stored else None
        weights = bind(program, source, dtype, cpu, length, lambda _: None, stored=file)
    return Interpreter(program, weights, dtype, cpu, Exchange() if shard[1] > 1 else None)


class ShardedStage:
    """All shards of a stage in one process, a thread each, as one model."""

    def __init__(self, shards: list[Interpreter]) -> None:
        self.program, self.dtype = shards[0].program, shards[0].dtype
        self._shards = shards
        self._threads = ThreadPoolExecutor(len(shards))
        memory = os.memfd_create("shards")
        os.ftruncate(memory, memory_size(len(shards)))
        for number, shard in enumerate(shards):
            assert shard.exchange is not None
            shard.exchange.join(memory, number, len(shards), spin_s=0.0, check=_fail_if_late)
        os.close(memory)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        for shard in self._shards:
            shard.allocate(num_blocks, block_size)

    def forward(self, inputs: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        first, *others = self._all(lambda shard: shard.forward(inputs.clone(), batch))
        # Or the next stage's shards would differ.
        assert all(torch.equal(first, other) for other in others)
        return first

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        return self._all(lambda shard: shard.logits(activations.clone()))[0]

    def _all(self, work: Callable[[Interpreter], torch.Tensor]) -> list[torch.Tensor]:
        def inferring(shard: Interpreter) -> torch.Tensor:
            with torch.inference_mode():
                return work(shard)

        return list(self._threads.map(inferring, self._shards))


def _fail_if_late(shard: int, waited_s: float) -> None:
    assert waited_s < 30, f"shard {shard} does not come"


def load_shards(
    files: ModelFiles,
    model: Blueprint,
    share: StageShare | None,
    count: int,
    *,
    stored: bool = False,
) -> StageModel:
    """A stage of so many shards."""
    if count == 1:
        return load_stage(files, model, share, stored=stored)
    return ShardedStage(
        [load_stage(files, model, share, shard=(n, count), stored=stored) for n in range(count)]
    )
