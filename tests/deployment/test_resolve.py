"""What follows from settings, model and machine: pure, so on machines that nobody has."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.config import EngineConfig
from headrace.deployment.cache_size import CacheLimit
from headrace.deployment.machine import Cluster
from headrace.deployment.model import Model
from headrace.deployment.resolve import Deployment, resolve
from headrace.errors import StartError, UsageError
from headrace.host.cpus import StageCpus
from headrace.protocol.hosts import HostFacts
from headrace.protocol.model_config import StoredSize
from machines import FOUR_CORES, MODEL, SIZES, unlike_hosts


def decide(host: HostFacts = FOUR_CORES, model: Model = MODEL, **settings: Any) -> Deployment:
    return resolve(EngineConfig(model="model.gguf", **settings), model, Cluster(hosts=(host,)))


def decide_on(cluster: Cluster, **settings: Any) -> Deployment:
    return resolve(EngineConfig(model="model.gguf", **settings), MODEL, cluster)


def of_dtype(dtype: str) -> Model:
    return dataclasses.replace(MODEL, sizes=replace(SIZES, dtype=dtype))


def of_quantized() -> Model:
    return dataclasses.replace(MODEL, sizes=replace(SIZES, head_stored=StoredSize(8, 5)))


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
    host = replace(FOUR_CORES, computes_bfloat16=computes, native_kernels=native)
    assert decide(host, of_dtype(checkpoint), dtype=wanted).dtype == found


@pytest.mark.parametrize(
    ("wanted", "dtype", "native", "tiles", "found"),
    [
        ("auto", "auto", True, False, "stored"),
        ("auto", "bfloat16", True, False, "stored"),
        ("auto", "float32", True, False, "dequantized"),
        ("auto", "float16", True, False, "dequantized"),
        ("auto", "auto", True, True, "dequantized"),
        ("auto", "bfloat16", False, False, "dequantized"),
        ("stored", "float32", True, True, "stored"),
        ("dequantized", "auto", True, False, "dequantized"),
    ],
)
def test_quantized_weights_stay_where_that_is_faster_and_nobody_wants_no_rounding(
    wanted: str, dtype: str, native: bool, tiles: bool, found: str
) -> None:
    host = replace(FOUR_CORES, native_kernels=native, bfloat16_tiles=tiles)
    assert decide(host, of_quantized(), weights=wanted, dtype=dtype).weights == found
    if wanted == "auto":
        # There are none.
        assert decide(host, weights=wanted, dtype=dtype).weights == "dequantized"


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


def test_unlike_hosts_share_layers_by_speed_and_each_its_own_cores() -> None:
    found = decide_on(unlike_hosts(), pipeline_parallel_size=2)
    assert found.hosts == (0, 1)
    assert [share.num_layers for share in found.shares] == [11, 19]
    assert found.cpus == (StageCpus([0, 2, 4, 6], 4), StageCpus([1, 3], 2))


def test_a_hosts_stages_share_its_cores() -> None:
    found = decide_on(unlike_hosts(), pipeline_parallel_size=3)
    assert found.hosts == (0, 1, 1)
    assert found.cpus == (StageCpus([0, 2, 4, 6], 4), StageCpus([1], 1), StageCpus([3], 1))


def test_on_several_hosts_a_partition_and_a_binding_go_by_stage() -> None:
    found = decide_on(
        unlike_hosts(), pipeline_parallel_size=2, layer_partition="20,10", cpu_bind="0-1|3"
    )
    assert [share.num_layers for share in found.shares] == [20, 10]
    assert found.cpus == (StageCpus([0, 1], 2), StageCpus([3], 1))
    with pytest.raises(UsageError, match="may not use core 0, only 1,3"):
        decide_on(unlike_hosts(), pipeline_parallel_size=2, cpu_bind="0|0")
    with pytest.raises(UsageError, match="is for 3 stages"):
        decide_on(unlike_hosts(), pipeline_parallel_size=2, cpu_bind="0|1|3")


def test_a_host_with_little_memory_has_few_layers() -> None:
    found = decide_on(
        unlike_hosts(fast_free=150 << 20), pipeline_parallel_size=2, max_model_len=512
    )
    # At the start of the pipeline it holds the table of tokens, at its end the output projection.
    placed = dict(zip(found.hosts, found.shares, strict=True))
    assert found.need.free(
        np.array(found.need.weights(placed[1]) + found.need.per_stage),
        np.array(found.need.cache(placed[1])),
    ) <= (150 << 20)
    assert placed[1].num_layers < 19


def test_hosts_that_cannot_hold_the_model_are_named() -> None:
    with pytest.raises(StartError, match=r"bob has 0.0977 GiB free and needs .* for layers"):
        decide_on(unlike_hosts(slow_free=100 << 20, fast_free=100 << 20), pipeline_parallel_size=2)


def test_all_hosts_compute_in_one_dtype() -> None:
    hosts = unlike_hosts().hosts
    poor = Cluster(hosts=(hosts[0], replace(hosts[1], native_kernels=False)))
    assert decide_on(unlike_hosts(), pipeline_parallel_size=2).dtype == "bfloat16"
    assert decide_on(poor, pipeline_parallel_size=2).dtype == "float32"


def test_a_host_that_others_left_is_asked_for_the_memory_of_all() -> None:
    left = Cluster(hosts=unlike_hosts().hosts[:1])
    found = decide_on(left, pipeline_parallel_size=2)
    assert found.hosts == (0, 0)
    assert [share.num_layers for share in found.shares] == [16, 14]
    small = Cluster(hosts=unlike_hosts(slow_free=300 << 20).hosts[:1])
    with pytest.raises(StartError, match=r"ada has 0.293 GiB free and needs .* layers 0 to 29"):
        decide_on(small, pipeline_parallel_size=2)
