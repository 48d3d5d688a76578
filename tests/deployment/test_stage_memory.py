"""What is foretold of memory, held against what stages take."""

from pathlib import Path

import pytest
import torch

from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.deployment.stage_memory import MemoryNeed, memory_need
from headrace.execution.model_executor import cache_bytes_per_block
from headrace.protocol.model_config import ModelSizes, StageShare
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_llama


def need_of(sizes: ModelSizes, *, stored: bool = False) -> MemoryNeed:
    """In float32, for a sequence of 100 positions in blocks of 16."""
    return memory_need(
        sizes,
        element_size=4,
        stored=stored,
        max_model_len=100,
        max_num_seqs=8,
        block_size=16,
        cache_per_stage=None,
        cache_share=0.5,
    )


@pytest.mark.parametrize(
    "share",
    [
        StageShare(0, 3, embeds=True, samples=False),
        StageShare(3, 5, embeds=False, samples=False),
        StageShare(28, 30, embeds=False, samples=True),
    ],
)
def test_weights_and_cache_are_foretold(share: StageShare) -> None:
    files = locate_model("smollm2")
    model = read_model(files)
    need = need_of(model.sizes)
    stage = load_stage(files, model, share, max_model_len=100)
    assert need.weights(share) == pytest.approx(stage.weights.nbytes, rel=1e-3)
    block = cache_bytes_per_block(model.program(share), 16, torch.float32)
    assert need.cache(share) == 7 * block


@pytest.mark.parametrize(
    "share",
    [
        StageShare(0, 3, embeds=True, samples=False),
        StageShare(28, 30, embeds=False, samples=True),
        StageShare(0, 30, embeds=True, samples=True),
    ],
)
def test_quantized_weights_that_stay_so_are_foretold(share: StageShare) -> None:
    """The table, which is the output projection too, is there once."""
    files = locate_model("smollm2")
    model = read_model(files)
    stage = load_stage(files, model, share, max_model_len=100, stored=True)
    need = need_of(model.sizes, stored=True)
    assert need.weights(share) == pytest.approx(stage.weights.nbytes, rel=3e-3)
    assert need.weights(share) < 0.25 * need_of(model.sizes).weights(share)


def test_a_table_that_is_also_the_output_projection_counts_on_both_ends(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    model = read_model(ModelFiles(path, "huggingface"))
    whole = StageShare(0, 4, embeds=True, samples=True)
    stage = load_stage(ModelFiles(path, "huggingface"), model, whole)
    # Its vectors are no small part of so small a model.
    assert need_of(model.sizes).weights(whole) == pytest.approx(stage.weights.nbytes, rel=0.02)
