"""`headrace bench`: measure Headrace itself."""

import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from headrace.bench.engine_cost import engine_cost
from headrace.bench.figures import SETTINGS
from headrace.cli.bench_kernels import kernels
from headrace.cli.bench_latency import latency
from headrace.cli.bench_microbatches import microbatches
from headrace.cli.bench_overhead import overhead
from headrace.cli.bench_overlap import overlap
from headrace.cli.bench_roofline import roofline
from headrace.cli.bench_serve import serve
from headrace.cli.bench_throughput import throughput
from headrace.cli.options import check_range
from headrace.cli.printing import print_rows, rounded
from headrace.errors import UsageError
from headrace.protocol.checks import check_type

app = typer.Typer(rich_markup_mode=None, help="Measure Headrace itself.")
app.command()(throughput)
app.command()(latency)
app.command()(serve)
app.command()(roofline)
app.command()(overhead)
app.command()(kernels)
app.command()(overlap)
app.command()(microbatches)


@app.callback()
def _bench() -> None:
    """Measure Headrace itself."""


@app.command()
def scheduler(
    running: Annotated[
        int | None, typer.Option(help="Measure what a plan with so many decode rows costs.")
    ] = None,
    context_len: Annotated[int, typer.Option(help="With --running: positions each has.")] = 128,
    workload: Annotated[
        str | None, typer.Option(help="mixed: compare prefill policies under a mixed load.")
    ] = None,
    prefill_policy: Annotated[
        str | None, typer.Option(help="With --workload: budget or even alone; default: both.")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option("--pipeline-parallel-size", "-pp", help="Stages; default: 4, 2 with --model."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Run the load on this model in real time, not on a virtual pipeline."),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(help="With --model: positions of the longest request.")
    ] = 1024,
    requests: Annotated[
        int | None, typer.Option(help="Requests of the load; default: 800, 40 with --model.")
    ] = None,
    load: Annotated[
        float, typer.Option(help="Arrival rate, over what the pipeline could serve at most.")
    ] = 0.85,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> int:
    """What the scheduler costs (--running 256), and what it gains (--workload mixed)."""
    if (running is None) == (workload is None):
        raise UsageError("give either --running N or --workload mixed")
    if running is not None:
        check_range("--running", running, 1, 4096)
        check_range("--context-len", context_len, 1, 131072)
        cost = asdict(engine_cost(running, context_len))
        print(json.dumps(cost)) if as_json else print_rows([cost])
        return 0
    check_type("--workload", workload, Literal["mixed"])
    check_type("--prefill-policy", prefill_policy, Literal["budget", "even"] | None)
    settings = [s for s in SETTINGS if prefill_policy in (None, s.prefill_policy)]
    num_stages = pipeline_parallel_size or (4 if model is None else 2)
    count = requests or (800 if model is None else 40)
    check_range("--pipeline-parallel-size", num_stages, 1, 64)
    check_range("--requests", count, 2, 100_000)
    if not 0 < load <= 10:
        raise UsageError(f"--load must be above 0 and at most 10, not {load}")
    if model is None:
        # Not needed for --running, and real_load brings in all of torch.
        from headrace.bench.replay import replay_policies

        answer = replay_policies(
            settings, num_stages=num_stages, requests=count, load=load, seed=seed
        )
    else:
        from headrace.bench.real_load import run_policies

        check_range("--max-model-len", max_model_len, 256, 131072)
        answer = run_policies(
            settings,
            model=model,
            num_stages=num_stages,
            requests=count,
            load=load,
            seed=seed,
            max_model_len=max_model_len,
        )
    print(json.dumps(rounded(answer))) if as_json else _print_comparison(answer)
    return 0


def _print_comparison(answer: dict[str, Any]) -> None:
    print(
        f"{answer['requests']} requests, {answer['requests_per_s']:.3g} a second "
        f"(load {answer['load']:g}), pp={answer['pp']}, {answer['pipeline']} pipeline: "
        f"{answer['shape']}"
    )
    print_rows(answer["policies"])
    if "prediction_error_median" in answer:
        print(f"median error of predicted step times: {answer['prediction_error_median']:.1%}")
    if "even_over_best_budget" in answer:
        best = answer["best_budget"]["max_num_batched_tokens"]
        ratios = answer["even_over_best_budget"].items()
        print(
            f"even over budget {best}, that with the fewest bubbles: "
            + ", ".join(f"{name.replace('_', ' ')} x {ratio:.2f}" for name, ratio in ratios)
        )
