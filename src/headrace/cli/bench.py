"""`headrace bench`: measure Headrace itself."""

import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from headrace.bench.engine_cost import engine_cost
from headrace.bench.figures import SETTINGS
from headrace.checks import check_type
from headrace.cli.bench_all_reduce import all_reduce
from headrace.cli.bench_kernels import kernels
from headrace.cli.bench_latency import latency
from headrace.cli.bench_links import links
from headrace.cli.bench_microbatches import microbatches
from headrace.cli.bench_overhead import overhead
from headrace.cli.bench_overlap import overlap
from headrace.cli.bench_roofline import roofline
from headrace.cli.bench_serve import serve
from headrace.cli.bench_throughput import throughput
from headrace.cli.options import check_range
from headrace.cli.printing import print_rows, rounded
from headrace.errors import UsageError

app = typer.Typer(rich_markup_mode=None, help="Measure Headrace itself.")
app.command()(throughput)
app.command()(latency)
app.command()(serve)
app.command()(roofline)
app.command()(overhead)
app.command()(kernels)
app.command()(links)
app.command()(all_reduce)
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
        str | None,
        typer.Option(
            help="mixed: compare prefill policies under a mixed load; long: what one long prompt "
            "does to short ones and to running streams."
        ),
    ] = None,
    prefill_policy: Annotated[
        str | None, typer.Option(help="With --workload mixed: budget or even alone.")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size",
            "-pp",
            help="Stages; default: 2, 4 for mixed without --model.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Run the load on this model in real time, not on a virtual pipeline."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Positions of the longest request; default: 8192 for long, 1024 for mixed with "
            "--model."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of a mixed load; default: 800, 40 with --model. Short prompts of a long "
            "one; default: 20."
        ),
    ] = None,
    load: Annotated[
        float, typer.Option(help="Mixed: arrival rate, over what the pipeline could serve at most.")
    ] = 0.85,
    seed: Annotated[int, typer.Option(help="Of a mixed load's arrivals and lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> int:
    """What the scheduler costs (--running 256), and what it gains (--workload mixed or long)."""
    if (running is None) == (workload is None):
        raise UsageError("give either --running N or --workload mixed or long")
    if running is not None:
        check_range("--running", running, 1, 4096)
        check_range("--context-len", context_len, 1, 131072)
        cost = asdict(engine_cost(running, context_len))
        print(json.dumps(cost)) if as_json else print_rows([cost])
        return 0
    check_type("--workload", workload, Literal["mixed", "long"])
    num_stages = pipeline_parallel_size or (4 if workload == "mixed" and model is None else 2)
    check_range("--pipeline-parallel-size", num_stages, 1, 64)
    if workload == "long":
        count = 20 if requests is None else requests
        check_range("--requests", count, 1, 1000)
        positions = 8192 if max_model_len is None else max_model_len
        check_range("--max-model-len", positions, 64, 131072)
        answer = _long(model, num_stages, count, positions)
        print(json.dumps(rounded(answer))) if as_json else _print_orders(answer)
        return 0
    check_type("--prefill-policy", prefill_policy, Literal["budget", "even"] | None)
    settings = [s for s in SETTINGS if prefill_policy in (None, s.prefill_policy)]
    count = requests if requests is not None else (800 if model is None else 40)
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

        positions = 1024 if max_model_len is None else max_model_len
        check_range("--max-model-len", positions, 256, 131072)
        answer = run_policies(
            settings,
            model=model,
            num_stages=num_stages,
            requests=count,
            load=load,
            seed=seed,
            max_model_len=positions,
        )
    print(json.dumps(rounded(answer))) if as_json else _print_comparison(answer)
    return 0


def _long(model: str | None, num_stages: int, requests: int, positions: int) -> dict[str, Any]:
    if model is None:
        from headrace.bench.replay import replay_orders

        return replay_orders(num_stages=num_stages, requests=requests, max_model_len=positions)
    from headrace.bench.real_load import run_orders

    return run_orders(
        model=model, num_stages=num_stages, requests=requests, max_model_len=positions
    )


def _print_orders(answer: dict[str, Any]) -> None:
    print(
        f"A prompt of {answer['long_prompt']} tokens beside {answer['streams']} running streams, "
        f"then {answer['requests']} of {answer['short_prompt']} tokens, one a second; "
        f"pp={answer['pp']}, {answer['pipeline']} pipeline:"
    )
    print_rows(answer["orders"])


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
        ratios = [(n, r) for n, r in answer["even_over_best_budget"].items() if r is not None]
        print(
            f"even over budget {best}, that with the fewest bubbles: "
            + ", ".join(f"{name.replace('_', ' ')} x {ratio:.2f}" for name, ratio in ratios)
        )
