"""What follows from settings, model and machine: pure, so on machines that nobody has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.synthetic import synthetic_tokenizer
from headrace.config import EngineConfig
from headrace.deployment.cache_size import CacheLimit
from headrace.deployment.machine import Machine
from headrace.deployment.model import Model
from headrace.deployment.resolve import Deployment, resolve
from headrace.errors import StartError, UsageError
from headrace.host.cpus import StageCpus
from headrace.protocol.model_config import LayerSize, ModelSizes, StageShare
from headrace.protocol.program import Program

FOUR_CORES = Machine(
    allowed_cpus=frozenset(range(8)),
    cores=(0, 2, 4, 6),
    free_memory=8 << 30,
    computes_bfloat16=False,
    native_kernels=True,
)
SIZES = ModelSizes(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    layers=(LayerSize(products=3_538_944, cache_elements=2 * 3 * 64),) * 30,
    rotation_elements=64,
    embedding_products=576,
    head_products=49152 * 576,
    max_positions=8192,
    dtype="bfloat16",
    eos_token_ids=(2,),
)


def no_program(share: StageShare) -> Program:
    """Nothing is run."""
    raise AssertionError


MODEL = Model(
    files=ModelFiles(Path("model.gguf"), "gguf"),
    sizes=SIZES,
    program=no_program,
    sampling_defaults={},
    synthetic=None,
    read_tokenizer=synthetic_tokenizer,
)


def decide(machine: Machine = FOUR_CORES, model: Model = MODEL, **settings: Any) -> Deployment:
    return resolve(EngineConfig(model="model.gguf", **settings), model, machine)


def of_dtype(dtype: str) -> Model:
    from msgspec.structs import replace as changed

    return replace(MODEL, sizes=changed(SIZES, dtype=dtype))


@pytest.mark.parametrize(
    ("computes", "native", "checkpoint", "wanted", "found"),
    [
        (False, True, "bfloat16", "auto", "bfloat16"),
        (True, False, "float16", "auto", "bfloat16"),
        (False, False, "bfloat16", "auto", "float32"),
        (True, True, "float32", "auto", "float32"),
        (False, False, "bfloat16", "float16", "float16"),
    ],
)
def test_the_dtype_is_bfloat16_where_that_is_fast_and_loses_nothing(
    computes: bool, native: bool, checkpoint: str, wanted: str, found: str
) -> None:
    machine = replace(FOUR_CORES, computes_bfloat16=computes, native_kernels=native)
    assert decide(machine, of_dtype(checkpoint), dtype=wanted).dtype == found


def test_stages_share_layers_by_cost_and_cores_evenly() -> None:
    found = decide(pipeline_parallel_size=2)
    assert [share.num_layers for share in found.shares] == [16, 14]
    assert found.cpus == (StageCpus([0, 2], 2), StageCpus([4, 6], 2))


def test_what_the_user_says_of_layers_and_cores_is_taken() -> None:
    found = decide(
        pipeline_parallel_size=2, layer_partition="10,20", cpu_bind="0-1|7", cpu_threads=1
    )
    assert [share.num_layers for share in found.shares] == [10, 20]
    assert found.cpus == (StageCpus([0, 1], 1), StageCpus([7], 1))


def test_more_stages_than_cores_are_not_pinned() -> None:
    assert decide(pipeline_parallel_size=5).cpus == (StageCpus([], 1),) * 5


def test_lengths_are_the_models_unless_less_is_wanted() -> None:
    assert decide().max_model_len == 8192
    assert decide(max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 8193}, "--max-model-len 8193 is more than the 8192 positions"),
        ({"max_model_len": 8, "block_size": 9}, "--block-size 9 is more than the 8 positions"),
        ({"pipeline_parallel_size": 31}, "--pipeline-parallel-size 31 is more than the model's 30"),
        ({"layer_partition": "29"}, "--layer-partition 29 adds up to 29, the model has 30"),
        ({"cpu_bind": "8"}, "--cpu-bind 8: this process may not use core 8, only 0-7"),
        ({"cpu_bind": "0|1"}, r"--cpu-bind .* is for 2 stages"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decide(**settings)


def test_a_context_that_cannot_fit_is_refused_before_anything_is_loaded() -> None:
    small = replace(FOUR_CORES, free_memory=64 << 20)
    with pytest.raises(StartError, match=r"--max-model-len 8192 takes .* room for less than"):
        decide(small)
    # Of a limit in bytes all may be cache.
    assert decide(small, max_model_len=2048, kv_cache_memory="60MiB").cache == CacheLimit(
        bytes_per_stage=60 << 20, share_of_free=0.5
    )


def test_one_stage_has_one_group_and_several_have_one_each_at_first() -> None:
    alone, three = decide(), decide(pipeline_parallel_size=3)
    assert (alone.num_microbatches, alone.most_microbatches) == (1, 1)
    assert three.num_microbatches == 3 < three.most_microbatches
    assert three.window < three.most_window
    chosen = decide(pipeline_parallel_size=3, num_microbatches=4)
    assert (chosen.num_microbatches, chosen.most_microbatches) == (4, 4)
    assert chosen.window == chosen.most_window


def test_a_stage_waits_far_longer_for_a_message_than_the_engine_does() -> None:
    found = decide(pipeline_parallel_size=2, stall_timeout=90)
    assert found.stall_timeout == found.start_timeout == 90
    assert found.link_timeout >= 7 * 86_400
    # Emulated links may take their time: there and back on each stage's edge, and the bytes.
    slow = decide(pipeline_parallel_size=2, link_latency_ms=1000, link_bandwidth_mbps=8)
    assert slow.stall_timeout == pytest.approx(60 + 2 * (2 + 512 * 576 * 4 / 1e6))
