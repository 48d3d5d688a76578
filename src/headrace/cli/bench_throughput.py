"""`headrace bench throughput`: output tokens a second, all requests at once."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.bench.throughput import measure_throughput
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_rows, print_where, progress, rounded
from headrace.config import EngineConfig


@with_flags
def throughput(
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.")] = 32,
    input_len: options.InputLen = 256,
    output_len: options.OutputLen = 64,
    rounds: Annotated[int, typer.Option(help="How often the load runs.")] = 3,
    *,
    engine: Annotated[
        dict[str, Any],
        engine_flags(
            "pipeline_parallel_size",
            "layer_partition",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_microbatches",
            "cpu_threads",
            "cpu_bind",
            "seed",
            **options.MEASURED,
        ),
    ],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Output tokens a second: greedy, no end-of-text, no prefix cache; the median of the rounds."""
    options.check_range("--num-prompts", num_prompts, 1, 100_000)
    options.check_range("--input-len", input_len, 1, 1_000_000)
    options.check_range("--output-len", output_len, 1, 1_000_000)
    options.check_range("--rounds", rounds, 1, 1000)
    config = EngineConfig(enable_prefix_caching=False, **engine)
    batch = Batch(num_prompts, input_len, output_len, config.seed)
    config = replace(
        config,
        max_model_len=batch.max_model_len(config.block_size),
        max_num_seqs=min(config.sequences, num_prompts),
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
