"""`headrace bench throughput`: output tokens a second, all requests at once."""

import json
from typing import Annotated, Any, cast

import typer

from headrace.bench.batch_run import Batch
from headrace.bench.throughput import measure_throughput
from headrace.cli import options
from headrace.cli.printing import print_rows, print_where, progress, rounded
from headrace.config import EngineConfig


def throughput(
    model: options.Model = "smollm2",
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.")] = 32,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt, at random.")] = 256,
    output_len: Annotated[int, typer.Option(help="Tokens that each answer has.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often the load runs.")] = 3,
    pipeline_parallel_size: options.PipelineParallelSize = 1,
    layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "bfloat16",
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = EngineConfig.max_num_batched_tokens,
    num_microbatches: options.NumMicrobatches = "auto",
    cpu_threads: options.CpuThreads = None,
    cpu_bind: options.CpuBind = "auto",
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Output tokens a second: greedy, no end-of-text, no prefix cache; the median of the rounds."""
    options.check_range("--num-prompts", num_prompts, 1, 100_000)
    options.check_range("--input-len", input_len, 1, 1_000_000)
    options.check_range("--output-len", output_len, 1, 1_000_000)
    options.check_range("--rounds", rounds, 1, 1000)
    batch = Batch(num_prompts, input_len, output_len, seed)
    config = EngineConfig(
        model=model,
        pipeline_parallel_size=pipeline_parallel_size,
        layer_partition=layer_partition,
        dtype=cast(Any, dtype),
        max_model_len=batch.max_model_len(EngineConfig.block_size),
        max_num_seqs=min(max_num_seqs or min(256, max_num_batched_tokens), num_prompts),
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=False,
        num_microbatches=options.parse_num_microbatches(num_microbatches),
        cpu_threads=cpu_threads,
        cpu_bind=cpu_bind,
        seed=seed,
    )
    with progress() as say:
        measured = measure_throughput(config, batch, rounds, say)
    answer = rounded(measured.as_json())
    print(json.dumps(answer)) if as_json else _print_answer(answer)
    return 0


def _print_answer(answer: dict[str, Any]) -> None:
    print(
        f"{answer['model']}, pp={answer['pp']}, {answer['dtype']}: {answer['num_prompts']} "
        f"requests, {answer['max_num_seqs']} at once, {answer['input_len']} tokens in, "
        f"{answer['output_len']} out, rounds: {answer['rounds']}"
    )
    keys = (
        "output_tokens_per_s", "output_tokens_per_s_min", "output_tokens_per_s_max",
        "total_tokens_per_s", "ready_s", "num_microbatches", "step_ms_p50",
    )  # fmt: skip
    print_rows([{key: answer[key] for key in keys}])
    print_rows([{"stage": number, **stage} for number, stage in enumerate(answer["stages"])])
    print_where(answer)
