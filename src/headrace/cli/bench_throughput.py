"""`headrace bench throughput`: output tokens a second, all requests at once."""

from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.bench.throughput import measure_throughput
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, print_where, progress
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
            "tensor_parallel_size",
            "weights",
            "layer_partition",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_microbatches",
            "cpu_threads",
            "cpu_bind",
            "seed",
            *options.HOSTS,
            **options.MEASURED,
        ),
    ],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Output tokens a second: greedy, no end-of-text, no prefix cache; the median of the rounds."""
    options.check_load(num_prompts, input_len, output_len, rounds)
    config = EngineConfig(enable_prefix_caching=False, **engine)
    batch = Batch(num_prompts, input_len, output_len, config.seed)
    with progress() as say:
        measured = measure_throughput(batch.fitted(config), batch, rounds, say)
    print_answer(measured.as_json(), as_json, _print_figures)
    return 0


def _print_figures(answer: dict[str, Any]) -> None:
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
