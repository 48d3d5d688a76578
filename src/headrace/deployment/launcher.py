"""Brings up a whole engine: the one place that knows both the engine and the pipeline."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.checkpoint.config import config_from_gguf, config_from_huggingface
from headrace.checkpoint.generation_config import (
    SamplingDefaults,
    in_words,
    sampling_defaults_of_directory,
    sampling_defaults_of_gguf,
)
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import SYNTHETIC, ModelFiles, locate_model
from headrace.checkpoint.synthetic import (
    parse_stage_time,
    synthetic_config,
    synthetic_tokenizer,
)
from headrace.checkpoint.tokenizer import (
    Tokenizer,
    tokenizer_from_huggingface,
    tokenizer_of_gguf,
)
from headrace.config import EngineConfig
from headrace.deployment.cache_size import check_max_model_len, choose_num_blocks
from headrace.deployment.partition import (
    balanced_layers,
    check_stage_count,
    layer_costs,
    parse_layer_partition,
    stage_shares,
)
from headrace.engine.engine import Engine, Pipeline
from headrace.engine.limits import SchedulerConfig
from headrace.engine.microbatch_count import MicrobatchTuner, window_of
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepCost, prior_cost
from headrace.errors import ModelError, UsageError
from headrace.host.cpus import StageCpus, computes_bfloat16, stage_cpus
from headrace.kernels import has_native_kernels
from headrace.model.architectures.llama import llama_program
from headrace.pipeline.launch import StageProcesses, bind_master
from headrace.protocol.messages import LinkEmulation, Loaded, Loading, StageConfig, SyntheticTime
from headrace.protocol.model_config import ModelConfig, StageShare
from headrace.protocol.program import Program

if TYPE_CHECKING:
    from headrace.simulation.virtual_links import VirtualClock
    from headrace.simulation.virtual_stages import VirtualStages

_log = logging.getLogger(__name__)

# Seconds for the stages to meet, which has nothing to do with how long a step may take.
_START_TIMEOUT = 60.0
# Seconds for which engine and stages may be paused together while a step is in flight.
_PAUSE = 7 * 86_400.0


@dataclass(frozen=True)
class RunningEngine:
    """An engine that is ready, with what there is to know about it. load_s: how long that took.
    sampling_defaults: what the model's makers recommend, for requests that say nothing."""

    engine: Engine
    stages: StageProcesses
    stage_configs: list[StageConfig]
    cpus: list[StageCpus]
    tokenizer: Tokenizer
    model_config: ModelConfig
    sampling_defaults: SamplingDefaults
    shares: list[StageShare]
    loaded: list[Loaded]
    dtype: str
    max_model_len: int
    num_blocks: int
    load_s: float


def launch(
    config: EngineConfig,
    on_progress: Callable[[Loading], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    on_tokenizer: Callable[[Tokenizer], None] = lambda _: None,
) -> RunningEngine:
    """Read the model's files, start the stages and wait until they are ready.

    check: called once a second or more often meanwhile; what it raises ends the start.
    on_tokenizer: given the tokenizer meanwhile; what it raises does, too.
    Raises UsageError, ModelError, StartError or PipelineError; no process is left behind then.
    """
    started = time.monotonic()
    files = locate_model(config.model)
    model_config, read_defaults, load_tokenizer = _read_model(files, config.pipeline_parallel_size)
    sampling_defaults = read_defaults() if config.generation_config == "auto" else {}
    if sampling_defaults:
        _log.info(
            "sampling defaults of the model, for what requests leave out: %s (generation_config; "
            "--generation-config none: without)",
            in_words(sampling_defaults),
        )
    shares = _shares(config, model_config)
    max_model_len = _max_model_len(config, model_config)
    dtype = _dtype(config, model_config)
    if files.kind != "synthetic":
        check_max_model_len(
            max_model_len,
            _bytes_per_position(config, model_config, dtype),
            config.gpu_memory_utilization if config.kv_cache_bytes is None else 1.0,
        )
    cpus = stage_cpus(config.pipeline_parallel_size, config.cpu_threads, config.cpu_bind)
    # Only stages on several ranks meet, and only they need an address.
    pipelined = config.pipeline_parallel_size > 1
    master = bind_master(config.master_addr, config.master_port) if pipelined else None
    try:
        stage_configs = [
            StageConfig(
                epoch=0,
                stage=number,
                num_stages=len(shares),
                share=share,
                model_path=str(files.path.resolve()),
                model_kind=files.kind,
                program=_program(files, model_config, share),
                synthetic=_synthetic(files),
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=config.sequences,
                block_size=config.block_size,
                window=config.window,
                blocking_feedback=config.token_feedback == "blocking",
                start_timeout=max(_START_TIMEOUT, config.stall_timeout),
                link_timeout=_link_timeout(config),
                link_emulation=config.link_emulation,
                master_addr=config.master_addr,
                master_port=master.getsockname()[1] if master else 0,
                store_fd=master.fileno() if master and number == 0 else None,
            )
            for number, share in enumerate(shares)
        ]
        stages = StageProcesses(stage_configs, cpus)
    finally:
        if master:
            master.close()
    try:
        # Meanwhile the stages load.
        tokenizer = load_tokenizer()
        _check_vocabulary(files, tokenizer, model_config)
        model_config = _with_end_tokens(model_config, tokenizer)
        on_tokenizer(tokenizer)
        loaded = stages.wait_loaded(on_progress, check)
        for note in sorted({stage.note for stage in loaded if stage.note}):
            _log.warning(note)
        bytes_per_block = [stage.cache_bytes_per_block for stage in loaded]
        num_blocks = stages.reserve_cache(
            bytes_per_block,
            lambda promised: choose_num_blocks(
                bytes_per_block,
                config.block_size,
                max_model_len,
                config.sequences,
                config.kv_cache_bytes,
                config.gpu_memory_utilization,
                promised,
            ),
        )
        stages.allocate_cache(num_blocks, on_progress, check)
        engine = _engine(
            config,
            model_config,
            stages,
            tokenizer,
            max_model_len,
            num_blocks,
            priors=_priors(model_config, shares, loaded),
        )
    except BaseException:
        stages.close(drain=False)
        raise
    return RunningEngine(
        engine=engine,
        stages=stages,
        stage_configs=stage_configs,
        cpus=cpus,
        tokenizer=tokenizer,
        model_config=model_config,
        sampling_defaults=sampling_defaults,
        shares=shares,
        loaded=loaded,
        dtype=dtype,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        load_s=time.monotonic() - started,
    )


@dataclass(frozen=True)
class VirtualEngine:
    """An engine whose stages exist in virtual time only. clock: theirs."""

    engine: Engine
    stages: "VirtualStages"
    clock: "VirtualClock"


def launch_virtual(config: EngineConfig) -> VirtualEngine:
    """An engine for a synthetic model, on a clock that moves only while the engine waits.

    Links take what the config's emulation says, and no time without; plans and results take none.
    """
    # Stages in this very process need torch, which takes seconds to import: not for real ones.
    import torch

    from headrace.execution.synthetic_executor import SyntheticExecutor
    from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork
    from headrace.simulation.virtual_stages import VirtualStages

    stage_time = parse_stage_time(config.model.removeprefix(SYNTHETIC))
    num_stages = config.pipeline_parallel_size
    model_config = synthetic_config(num_stages)
    max_model_len = _max_model_len(config, model_config)
    emulation = config.link_emulation or LinkEmulation()
    clock = VirtualClock()
    network = VirtualNetwork(
        clock, num_stages, lambda _: emulation.latency_s, emulation.bytes_per_s
    )
    executor = SyntheticExecutor(
        stage_time, model_config.hidden_size, torch.float32, real_time=False
    )
    stages = VirtualStages(
        clock,
        network,
        [executor] * num_stages,
        config.window,
        config.sequences,
        blocking_feedback=config.token_feedback == "blocking",
        compute_s=lambda stage, plan, kind: executor.seconds(plan) if kind == "forward" else 0.0,
    )
    num_blocks = -(-max_model_len // config.block_size) * config.sequences
    engine = _engine(
        config,
        model_config,
        stages,
        synthetic_tokenizer(),
        max_model_len,
        num_blocks,
        lambda: clock.now,
    )
    return VirtualEngine(engine, stages, clock)


def _engine(
    config: EngineConfig,
    model_config: ModelConfig,
    stages: Pipeline,
    tokenizer: Tokenizer,
    max_model_len: int,
    num_blocks: int,
    clock: Callable[[], float] = time.monotonic,
    priors: Sequence[StepCost] = (),
) -> Engine:
    num_stages = config.pipeline_parallel_size
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.sequences,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_microbatches=config.microbatches,
            window=window_of(config.microbatches, num_stages),
            eos_token_ids=frozenset(model_config.eos_token_ids),
            prefix_caching=config.enable_prefix_caching,
            prefill_policy=config.prefill_policy,
            num_stages=num_stages,
            max_itl_s=None if config.max_itl_ms is None else config.max_itl_ms / 1e3,
        ),
        clock,
    )
    # Nothing to choose where the user did, and where no token travels.
    tuned = config.num_microbatches is None and num_stages > 1
    return Engine(
        scheduler=scheduler,
        pipeline=stages,
        tokenizer=tokenizer.core,
        vocab_size=model_config.vocab_size,
        num_stages=num_stages,
        seed=config.seed,
        stall_timeout=_stall_timeout(config, model_config),
        max_logprobs=config.max_logprobs,
        priorities=config.scheduling_policy == "priority",
        tuner=MicrobatchTuner(config.most_microbatches) if tuned else None,
        clock=clock,
        priors=list(priors),
    )


def _priors(model: ModelConfig, shares: list[StageShare], loaded: list[Loaded]) -> list[StepCost]:
    """What a step is taken to cost each stage, as long as none was measured."""
    layer = layer_costs(model).layer
    return [
        prior_cost(stage.weight_bytes, layer * share.num_layers)
        for share, stage in zip(shares, loaded, strict=True)
    ]


def _read_model(
    files: ModelFiles, num_stages: int
) -> tuple[ModelConfig, Callable[[], SamplingDefaults], Callable[[], Tokenizer]]:
    """The model's configuration, and what reads its sampling defaults, and loads its tokenizer when
    there is time."""
    path = files.path
    if files.kind == "synthetic":
        return synthetic_config(num_stages), dict, synthetic_tokenizer
    if files.kind == "gguf":
        file = read_gguf(path)
        return (
            config_from_gguf(file),
            lambda: sampling_defaults_of_gguf(file),
            lambda: tokenizer_of_gguf(file),
        )
    return (
        config_from_huggingface(path),
        lambda: sampling_defaults_of_directory(path),
        lambda: tokenizer_from_huggingface(path),
    )


def _program(files: ModelFiles, model: ModelConfig, share: StageShare) -> Program:
    """What a stage runs; nothing, on activations of the model's size, if it is synthetic."""
    if files.kind == "synthetic":
        return Program(model.hidden_size, model.vocab_size, (), (), (), {})
    return llama_program(model, share, gguf=files.kind == "gguf")


def _with_end_tokens(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The tokenizer's end-of-text token added. Files write -1, or an id beyond the vocabulary, for
    a token that they do not have: it could never come."""
    ends = {*model.eos_token_ids, *tokenizer.end_ids}
    known = tuple(sorted(token for token in ends if 0 <= token < model.vocab_size))
    return replace(model, eos_token_ids=known)


def _synthetic(files: ModelFiles) -> SyntheticTime | None:
    return parse_stage_time(str(files.path)) if files.kind == "synthetic" else None


def _stall_timeout(config: EngineConfig, model: ModelConfig) -> float:
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


def _shares(config: EngineConfig, model: ModelConfig) -> list[StageShare]:
    num_stages = config.pipeline_parallel_size
    check_stage_count(model.num_layers, num_stages)
    if config.layer_partition is None:
        return stage_shares(balanced_layers(model.num_layers, num_stages, layer_costs(model)))
    return stage_shares(parse_layer_partition(config.layer_partition, model.num_layers, num_stages))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
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


def _bytes_per_position(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    """What all stages together hold for each position of the longest sequence.

    Keys and values, a stage's two rotation tables, and its share of the slots' block tables.
    """
    size = 4 if dtype == "float32" else 2
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    tables = 4 * model.head_dim + 8 * config.sequences // config.block_size
    return cache + config.pipeline_parallel_size * tables


def _dtype(config: EngineConfig, model: ModelConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    fast = computes_bfloat16() or has_native_kernels()
    return "bfloat16" if model.dtype != "float32" and fast else "float32"


def _check_vocabulary(files: ModelFiles, tokenizer: Tokenizer, model: ModelConfig) -> None:
    # Added tokens may lie beyond the weights: the engine refuses those when they are used.
    size = tokenizer.core.get_vocab_size(with_added_tokens=False)
    if size > model.vocab_size:
        raise ModelError(
            f"model {files.path}: its tokenizer has {size} tokens, its weights {model.vocab_size}: "
            "the tokenizer belongs to another model"
        )
