"""A stage's share of a model, loaded, and what computes its steps."""

from collections.abc import Callable
from pathlib import Path

import torch

from headrace.checkpoint.locate import ModelFiles
from headrace.errors import StartError
from headrace.model.llama import LlamaStage, load_llama
from headrace.model.weights import open_tensors
from headrace.pipeline.executor import ModelExecutor
from headrace.protocol.messages import StageConfig


def load_model(
    config: StageConfig, device: torch.device, on_progress: Callable[[float], None]
) -> LlamaStage:
    """The weights of the stage's layers. on_progress: told the part that is done, from 0 to 1."""
    assert config.model_kind != "synthetic"
    source = open_tensors(
        ModelFiles(Path(config.model_path), config.model_kind), config.model_config
    )
    with torch.inference_mode():
        return load_llama(
            config.model_config,
            config.share,
            source,
            getattr(torch, config.dtype),
            device,
            config.max_model_len,
            on_progress,
        )


def model_executor(
    config: StageConfig, model: LlamaStage, num_blocks: int, device: torch.device
) -> ModelExecutor:
    """The model with a cache of so many blocks; StartError if there is no memory for them."""
    try:
        return ModelExecutor(
            model=model,
            max_num_seqs=config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_blocks=-(-config.max_model_len // config.block_size),
            device=device,
        )
    except (RuntimeError, MemoryError) as error:
        raise StartError(
            f"not enough memory for {num_blocks} cache blocks: "
            "lower --kv-cache-memory or --max-model-len"
        ) from error
