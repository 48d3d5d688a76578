"""`headrace bench microbatches`: the number that the engine chooses against every fixed one."""

import json
from typing import Annotated, Any

import typer

from headrace.checkpoint.synthetic import parse_stage_time
from headrace.cli import options
from headrace.cli.printing import print_rows, progress, rounded

_Stages = Annotated[
    list[int], typer.Option("--pipeline-parallel-size", "-pp", help="Stages; repeatable.")
]
_StageMs = Annotated[
    list[str],
    typer.Option(help="What a step takes a stage, FIXED+PER_ROW milliseconds; repeatable."),
]
_Prompts = Annotated[list[int], typer.Option(help="Requests, all at once; repeatable.")]
_LatencyMs = Annotated[list[float], typer.Option(help="What a message takes, one way; repeatable.")]


def microbatches(
    pipeline_parallel_size: _Stages = [2, 4],  # noqa: B006
    synthetic_stage_ms: _StageMs = ["2+0.3", "10+0.1", "20+0"],  # noqa: B006
    num_prompts: _Prompts = [16, 64, 256],  # noqa: B006
    link_latency_ms: _LatencyMs = [0.0, 10.0, 25.0, 50.0],  # noqa: B006
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Auto, m = pp and the best of all fixed numbers of microbatches, on synthetic stages in
    virtual time."""
    # Only here: it brings in all of torch.
    from headrace.bench.microbatches import cases, compare

    for value in pipeline_parallel_size:
        options.check_range("--pipeline-parallel-size", value, 2, 64)
    for value in num_prompts:
        options.check_range("--num-prompts", value, 1, 4096)
    for text in synthetic_stage_ms:
        parse_stage_time(text)
    wanted = list(cases(pipeline_parallel_size, synthetic_stage_ms, num_prompts, link_latency_ms))
    rows: list[dict[str, Any]] = []
    with progress() as say:
        for number, case in enumerate(wanted, start=1):
            say(f"case {number} of {len(wanted)}")
            rows.append(rounded(compare(case).as_json()))
    if as_json:
        print(json.dumps({"pipeline": "synthetic, virtual time", "cases": rows}))
    else:
        print("Synthetic stages and links, in virtual time, auto once it had time to settle:")
        print_rows(rows)
    return 0
