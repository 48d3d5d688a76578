"""`headrace bench latency`: one request at a time."""

from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.bench.latency import measure_latency
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, print_spread, print_where, progress
from headrace.config import EngineConfig


@with_flags
def latency(
    input_len: options.InputLen = 32,
    output_len: options.OutputLen = 128,
    rounds: Annotated[int, typer.Option(help="Requests, one after the other.")] = 5,
    *,
    engine: Annotated[
        dict[str, Any],
        engine_flags(
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "weights",
            "layer_partition",
            "cpu_threads",
            "cpu_bind",
            "seed",
            **options.MEASURED,
        ),
    ],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """One request at a time: tokens a second, time to the first token and between tokens."""
    options.check_load(1, input_len, output_len, rounds, least_output=2)
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False, **engine)
    batch = Batch(rounds, input_len, output_len, config.seed)
    with progress() as say:
        measured = measure_latency(batch.fitted(config), batch, say)
    print_answer(measured.as_json(), as_json, _print_figures)
    return 0


def _print_figures(answer: dict[str, Any]) -> None:
    print(
        f"{answer['model']}, pp={answer['pp']}, {answer['dtype']}: one request at a time, "
        f"{answer['input_len']} tokens in, {answer['output_len']} out, rounds: {answer['rounds']}"
    )
    print_spread(answer, ("output_tokens_per_s", "ttft_ms"))
    print_rows([{key: answer[key] for key in ("token_ms_p50", "token_ms_p90", "token_ms_p99")}])
    print_where(answer)
