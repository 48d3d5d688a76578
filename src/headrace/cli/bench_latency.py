"""`headrace bench latency`: one request at a time."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.bench.latency import measure_latency
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_rows, print_where, progress, rounded
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
    options.check_range("--input-len", input_len, 1, 1_000_000)
    options.check_range("--output-len", output_len, 2, 1_000_000)
    options.check_range("--rounds", rounds, 1, 1000)
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False, **engine)
    batch = Batch(rounds, input_len, output_len, config.seed)
    config = replace(config, max_model_len=batch.max_model_len(config.block_size))
    with progress() as say:
        measured = measure_latency(config, batch, say)
    answer = rounded(measured.as_json())
    print(json.dumps(answer)) if as_json else _print_answer(answer)
    return 0


def _print_answer(answer: dict[str, Any]) -> None:
    print(
        f"{answer['model']}, pp={answer['pp']}, {answer['dtype']}: one request at a time, "
        f"{answer['input_len']} tokens in, {answer['output_len']} out, rounds: {answer['rounds']}"
    )
    figures = ("output_tokens_per_s", "ttft_ms")
    print_rows(
        [
            {"figure": name, "median": answer[name], "least": answer[f"{name}_min"],
             "most": answer[f"{name}_max"]}
            for name in figures
        ]
    )  # fmt: skip
    print_rows([{key: answer[key] for key in ("token_ms_p50", "token_ms_p90", "token_ms_p99")}])
    print_where(answer)
