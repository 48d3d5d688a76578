"""Decides how a model is served on its hosts: everything that can be known before a process runs.

Nothing is started or allocated here. What is decided once is not worked out again: start.py carries
it out, and everybody else reads it from the deployment.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from headrace.config import EngineConfig
from headrace.deployment.cache_size import CacheLimit, check_max_model_len
from headrace.deployment.capacity import capacities, hop_seconds
from headrace.deployment.host_groups import (
    group_hosts,
    hosts_of_shards,
    joint_capacity,
    joint_links,
)
from headrace.deployment.machine import Cluster
from headrace.deployment.model import Model
from headrace.deployment.partition import (
    balanced_layers,
    check_stage_count,
    layer_costs,
    parse_layer_partition,
    stage_shares,
)
from headrace.deployment.placement import place_partition, place_stages
from headrace.deployment.stage_memory import MemoryNeed, memory_need
from headrace.engine.microbatch_count import MOST_MICROBATCHES, window_of
from headrace.errors import UsageError
from headrace.host.cpus import StageCpus, stage_cpus
from headrace.kernels.quantized_form import FORMS
from headrace.model.shards import shard_program
from headrace.protocol.messages import LinkBackend, LinkEmulation
from headrace.protocol.model_config import ModelSizes, StageShare
from headrace.protocol.ranks import Ranks

Dtype = Literal["float32", "bfloat16", "float16"]
WeightsForm = Literal["stored", "dequantized"]
# Seconds for the stages to meet, which has nothing to do with how long a step may take.
_START_TIMEOUT = 60.0
_ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Seconds for which engine and stages may be paused together while a step is in flight.
_PAUSE = 7 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a model is served: what the user left open is decided, what was said stands in config.

    cluster: the hosts. shares: by stage. hosts: by rank, the number of its host. cpus: by rank, on
    its host. need: what the model takes of memory, by its sizes. dtype: of weights, activations and
    cache, by its torch name. weights: what becomes of quantized ones. max_model_len: positions of
    the longest sequence. max_num_seqs: slots, on every stage. num_microbatches, window: at the
    start; most_microbatches, most_window: that there may ever be (window: steps that are planned
    beyond the newest result). cache: what bounds it; how many blocks that is turns out once the
    weights are loaded. link_backend: what carries tensors between ranks. start_timeout,
    link_timeout, stall_timeout: seconds for the stages to meet, for a message over a link, and in
    which nothing comes back from the stages, and none computes.
    """

    config: EngineConfig
    model: Model
    cluster: Cluster
    ranks: Ranks
    shares: tuple[StageShare, ...]
    hosts: tuple[int, ...]
    need: MemoryNeed
    cpus: tuple[StageCpus, ...]
    dtype: Dtype
    weights: WeightsForm
    max_model_len: int
    max_num_seqs: int
    num_microbatches: int
    most_microbatches: int
    window: int
    most_window: int
    cache: CacheLimit
    link_backend: LinkBackend
    start_timeout: float
    link_timeout: float
    stall_timeout: float

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.ranks.num_stages


def resolve(config: EngineConfig, model: Model, cluster: Cluster) -> Deployment:
    """Decide everything that follows from the user's settings, the model and the hosts.

    Raises UsageError for settings that do not fit the model or the hosts, StartError for what
    cannot fit their memory: a context, and on several hosts the weights.
    """
    ranks = config.ranks
    check_stage_count(model.sizes.num_layers, ranks.num_stages)
    if ranks.num_shards > 1:
        _check_shards(model, ranks.num_shards)
    max_model_len = _max_model_len(config, model.sizes)
    dtype = _dtype(config, model.sizes, cluster)
    weights = _weights(config, model, cluster, dtype)
    need = _memory_need(config, model.sizes, dtype, weights, max_model_len)
    cache = CacheLimit(
        bytes_per_stage=config.kv_cache_bytes, share_of_free=config.gpu_memory_utilization
    )
    if model.synthetic is None and cluster.alone:
        check_max_model_len(
            max_model_len,
            _bytes_per_position(config, model.sizes, dtype),
            cache,
            cluster.hosts[0].free_memory,
        )
    layers, hosts = _placement(config, model.sizes, cluster, need, dtype)
    microbatches, most_microbatches = _microbatches(config)
    return Deployment(
        config=config,
        model=model,
        cluster=cluster,
        ranks=ranks,
        shares=tuple(stage_shares(list(layers))),
        hosts=hosts,
        need=need,
        cpus=_cpus(config, cluster, hosts),
        dtype=dtype,
        weights=weights,
        max_model_len=max_model_len,
        max_num_seqs=config.sequences,
        num_microbatches=microbatches,
        most_microbatches=most_microbatches,
        window=window_of(microbatches, ranks.num_stages),
        most_window=window_of(most_microbatches, ranks.num_stages),
        cache=cache,
        link_backend="local" if config.link_backend == "auto" else config.link_backend,
        start_timeout=max(_START_TIMEOUT, config.stall_timeout),
        link_timeout=_link_timeout(config),
        stall_timeout=_stall_timeout(config, model.sizes),
    )


def _check_shards(model: Model, count: int) -> None:
    """Raises UsageError unless layers can be cut for so many shards."""
    layer = model.program(StageShare(0, 1, embeds=True, samples=True))
    for shard in range(count):
        shard_program(layer, shard, count)


def _placement(
    config: EngineConfig, sizes: ModelSizes, cluster: Cluster, need: MemoryNeed, dtype: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of each stage, and the host of each rank."""
    ranks, layers = config.ranks, None
    if config.layer_partition is not None:
        layers = parse_layer_partition(config.layer_partition, sizes.num_layers, ranks.num_stages)
    costs = layer_costs(sizes)
    if cluster.alone:
        return tuple(layers or balanced_layers(ranks.num_stages, costs)), (0,) * ranks.count
    numbers = cluster.computing
    hosts = capacities([cluster.hosts[number] for number in numbers], dtype, _ELEMENT_SIZES[dtype])
    groups = group_hosts(len(numbers), ranks)
    joint = [joint_capacity(group, hosts, ranks.num_shards) for group in groups]
    if layers is not None:
        placement = place_partition(layers, joint, need)
    else:
        links = {
            (a, b): cluster.links[ends]
            for (a, b) in permutations(range(len(numbers)), 2)
            if (ends := (numbers[a], numbers[b])) in cluster.links
        }
        between = joint_links(groups, links)
        hops = hop_seconds(between, sizes.hidden_size, _ELEMENT_SIZES[dtype])
        placement = place_stages(ranks.num_stages, joint, hops, costs, need)
    by_stage = (hosts_of_shards(groups[at], ranks.num_shards) for at in placement.hosts)
    return placement.layers, tuple(numbers[host] for stage in by_stage for host in stage)


def _cpus(config: EngineConfig, cluster: Cluster, hosts: tuple[int, ...]) -> tuple[StageCpus, ...]:
    """By rank. hosts: by rank. A host's ranks are consecutive, and so are their parts of
    --cpu-bind."""
    bind, counts = config.cpu_bind, Counter(hosts)
    lists = None if bind in ("auto", "none") else bind.split("|")
    if lists is not None and len(lists) != counts.total():
        raise UsageError(f"--cpu-bind {bind} is for {_ranks_in_words(len(lists), config)}")
    cpus: list[StageCpus] = []
    for number, count in counts.items():
        host, first = cluster.hosts[number], len(cpus)
        cpus += stage_cpus(
            count,
            config.cpu_threads,
            bind if lists is None else "|".join(lists[first : first + count]),
            allowed=host.allowed_cpus,
            cores=host.cores,
        )
    return tuple(cpus)


def _ranks_in_words(named: int, config: EngineConfig) -> str:
    """How many cores' lists were named, and how many there should be."""
    stages, shards = config.pipeline_parallel_size, config.tensor_parallel_size
    if shards == 1:
        return f"{named} stages, --pipeline-parallel-size is {stages}"
    return (
        f"{named} ranks, --pipeline-parallel-size {stages} and --tensor-parallel-size {shards} "
        f"make {stages * shards}"
    )


def _max_model_len(config: EngineConfig, model: ModelSizes) -> int:
    wanted = config.max_model_len
    if config.block_size > (wanted or model.max_positions):
        raise UsageError(
            f"--block-size {config.block_size} is more than the {wanted or model.max_positions} "
            "positions of the longest sequence"
        )
    if wanted is not None and wanted > model.max_positions:
        raise UsageError(
            f"--max-model-len {wanted} is more than the {model.max_positions} positions that the "
            "model was made for"
        )
    return wanted or model.max_positions


def _dtype(config: EngineConfig, model: ModelSizes, cluster: Cluster) -> Dtype:
    if config.dtype != "auto":
        return config.dtype
    hosts = [cluster.hosts[number] for number in cluster.computing]
    fast = all(host.computes_bfloat16 or host.native_kernels for host in hosts)
    return "bfloat16" if model.dtype != "float32" and fast else "float32"


def _weights(config: EngineConfig, model: Model, cluster: Cluster, dtype: Dtype) -> WeightsForm:
    hosts = [cluster.hosts[number] for number in cluster.computing]
    if config.weights == "auto":
        # Whoever asks for float32 wants no rounding; products of whole numbers use no tiles yet.
        able = all(host.native_kernels and not host.bfloat16_tiles for host in hosts)
        stays = dtype == "bfloat16" and model.sizes.has_stored and able
        return "stored" if stays else "dequantized"
    if config.weights == "dequantized":
        return "dequantized"
    if not model.sizes.has_stored:
        raise UsageError(
            f"--weights stored: model {config.model} has no weights that could stay as they are, "
            f"in a GGUF file as {', '.join(FORMS)}"
        )
    if dtype == "float16":
        raise UsageError("--weights stored goes with --dtype bfloat16 or float32, not float16")
    without = [host.label for host in hosts if not host.native_kernels]
    if without:
        where = "" if cluster.alone else f" on {', '.join(without)}"
        raise UsageError(
            f"--weights stored needs the native kernels, which are not taken{where}: install a "
            "C++17 compiler, then headrace again, or use --weights dequantized"
        )
    return "stored"


def _microbatches(config: EngineConfig) -> tuple[int, int]:
    """Groups of sequences that take turns: at the start, and the most that there may ever be."""
    if config.num_microbatches is not None:
        return config.num_microbatches, config.num_microbatches
    at_start = min(config.pipeline_parallel_size, config.sequences)
    # Where no token travels there is nothing to hide.
    if config.pipeline_parallel_size == 1:
        return at_start, at_start
    return at_start, min(MOST_MICROBATCHES, config.sequences)


def _memory_need(
    config: EngineConfig,
    model: ModelSizes,
    dtype: str,
    weights: WeightsForm,
    max_model_len: int,
) -> MemoryNeed:
    per_stage = config.kv_cache_bytes
    return memory_need(
        model,
        element_size=_ELEMENT_SIZES[dtype],
        stored=weights == "stored",
        max_model_len=max_model_len,
        max_num_seqs=config.sequences,
        block_size=config.block_size,
        cache_per_stage=per_stage,
        cache_share=config.gpu_memory_utilization if per_stage is None else 1.0,
    )


def _bytes_per_position(config: EngineConfig, model: ModelSizes, dtype: str) -> int:
    """What all stages together hold for each position of the longest sequence.

    Keys and values, a stage's two rotation tables, and its share of the slots' block tables.
    """
    cache = sum(layer.cache_elements for layer in model.layers) * _ELEMENT_SIZES[dtype]
    tables = 4 * model.rotation_elements + 8 * config.sequences // config.block_size
    return cache + config.ranks.count * tables


def _stall_timeout(config: EngineConfig, model: ModelSizes) -> float:
    """--stall-timeout, and what a step spends on emulated links at most."""
    emulation = config.link_emulation or LinkEmulation()
    message_s = 2 * emulation.latency_s
    if emulation.bytes_per_s is not None:
        largest = config.max_num_batched_tokens * model.hidden_size * 4
        message_s += largest / emulation.bytes_per_s
    return config.stall_timeout + config.pipeline_parallel_size * message_s


def _link_timeout(config: EngineConfig) -> float:
    """Seconds after which a stage gives up on a message by itself.

    The engine, which knows what a step may take and what the others do, ends a stall long before.
    So long, since a stage cannot tell that it was paused, and all others with it, overnight say.
    """
    return max(_PAUSE, 10 * config.stall_timeout)
