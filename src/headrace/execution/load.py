"""A stage's share of a model, loaded, and what computes its steps."""

from collections.abc import Callable
from pathlib import Path

import torch

from headrace.checkpoint.locate import ModelFiles
from headrace.errors import StartError
from headrace.execution.executor import Executor
from headrace.execution.model_executor import ModelExecutor
from headrace.execution.synthetic_executor import SyntheticExecutor
from headrace.kernels.exchange import Exchange
from headrace.kernels.path import has_native, runs_native
from headrace.model.bind import bind
from headrace.model.interpreter import Interpreter
from headrace.model.weights import gguf_file, open_tensors
from headrace.protocol.messages import RankConfig


def load_model(
    config: RankConfig, device: torch.device, on_progress: Callable[[float], None]
) -> Interpreter | None:
    """The stage's program bound to its weights; None if it is synthetic.

    on_progress: told the part that is done, from 0 to 1. Raises StartError for shards without
    native kernels, which add up for them, and for weights that only those take; and ModelError for
    tensors that cannot be loaded.
    """
    if config.model_kind == "synthetic":
        return None
    exchange = _exchange(config)
    source = open_tensors(ModelFiles(Path(config.model_path), config.model_kind))
    dtype = getattr(torch, config.dtype)
    stored = None
    if config.weights == "stored":
        if not runs_native(device, dtype):
            raise StartError("--weights stored needs the native kernels, of a CPU")
        stored = gguf_file(source)
    with torch.inference_mode():
        weights = bind(
            config.program,
            source,
            dtype,
            device,
            config.max_model_len,
            on_progress,
            stored=stored,
        )
    return Interpreter(config.program, weights, dtype, device, exchange)


def stage_executor(
    config: RankConfig, model: Interpreter | None, num_blocks: int, device: torch.device
) -> Executor:
    """What runs the loaded model with a cache of so many blocks; StartError if there is no memory
    for them."""
    if model is None:
        assert config.synthetic is not None
        return SyntheticExecutor(
            config.synthetic, config.program.hidden_size, getattr(torch, config.dtype), device
        )
    try:
        return ModelExecutor(
            model=model,
            max_num_seqs=config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_blocks=-(-config.max_model_len // config.block_size),
            device=device,
            samples=config.rank == config.ranks.sampler,
            exchange=model.exchange,
        )
    except (RuntimeError, MemoryError) as error:
        raise StartError(
            f"not enough memory for {num_blocks} cache blocks: "
            "lower --kv-cache-memory or --max-model-len"
        ) from error


def _exchange(config: RankConfig) -> Exchange | None:
    """With the stage's other shards, if there are any."""
    if config.ranks.num_shards == 1:
        return None
    if not has_native():
        raise StartError(
            f"--tensor-parallel-size {config.ranks.num_shards} needs the native kernels, which are "
            "missing: install a C++17 compiler, then headrace again"
        )
    return Exchange()
