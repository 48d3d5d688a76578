"""The engine that a deployment asks for, over whatever pipeline."""

import time
from collections.abc import Callable, Sequence

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.deployment.resolve import Deployment
from headrace.engine.engine import Engine, Pipeline
from headrace.engine.limits import SchedulerConfig
from headrace.engine.microbatch_count import MicrobatchTuner
from headrace.engine.pace import Pace
from headrace.engine.prefill_order import PrefillOrder
from headrace.engine.recorder import Recorder
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepCost


def new_engine(
    deployment: Deployment,
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    *,
    num_blocks: int,
    epoch: int,
    clock: Callable[[], float] = time.monotonic,
    priors: Sequence[StepCost] = (),
    recorder: Recorder | None = None,
    order: PrefillOrder | None = None,
) -> Engine:
    """An engine without requests. num_blocks: of the cache, on every stage. clock: in seconds.
    priors: what a step is taken to cost each stage, as long as none was measured. recorder: told
    what the engine plans and what comes of it. order: whose prefill goes first, None for the
    scheduler's own."""
    config, num_stages = deployment.config, deployment.num_stages
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=deployment.max_model_len,
            max_num_seqs=deployment.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_microbatches=deployment.num_microbatches,
            window=deployment.window,
            eos_token_ids=deployment.model.end_token_ids(tokenizer),
            prefix_caching=config.enable_prefix_caching,
            prefill_policy=config.prefill_policy,
            num_stages=num_stages,
            max_itl_s=None if config.max_itl_ms is None else config.max_itl_ms / 1e3,
            epoch=epoch,
        ),
        clock,
        order,
    )
    # Nothing to choose where the user did, and where no token travels.
    tuned = config.num_microbatches is None and num_stages > 1
    return Engine(
        scheduler=scheduler,
        pipeline=pipeline,
        tokenizer=tokenizer.core,
        vocab_size=deployment.model.sizes.vocab_size,
        pace=Pace(
            deployment.ranks,
            deployment.most_window,
            MicrobatchTuner(deployment.most_microbatches) if tuned else None,
            priors,
        ),
        seed=config.seed,
        stall_timeout=deployment.stall_timeout,
        max_logprobs=config.max_logprobs,
        priorities=config.scheduling_policy == "priority",
        clock=clock,
        recorder=recorder,
    )
