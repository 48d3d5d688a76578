"""`headrace bench overhead`: what of a decode step is Python, and where the rest of a step goes."""

from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, print_spread, print_where, progress
from headrace.config import EngineConfig


@with_flags
def overhead(
    num_prompts: Annotated[int, typer.Option(help="Rows of a decode step.")] = 32,
    input_len: options.InputLen = 256,
    output_len: options.OutputLen = 64,
    rounds: Annotated[int, typer.Option(help="How often the run is repeated.")] = 3,
    *,
    engine: Annotated[dict[str, Any], engine_flags("cpu_threads", "cpu_bind", **options.MEASURED)],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Time of a decode step on a single stage, what of it is spent outside the kernels, and where
    the time of decode steps and of prefill steps goes."""
    # Only here: it brings in all of torch.
    from headrace.bench.overhead import measure_overhead

    # Until the last prompts are in, some decode already.
    options.check_load(num_prompts, input_len, output_len, rounds, most_prompts=512, least_output=4)
    batch = Batch(num_prompts, input_len, output_len, seed=0)
    config = EngineConfig(
        max_model_len=batch.max_model_len(EngineConfig.block_size),
        max_num_seqs=num_prompts,
        # The prompts first, and then nothing but decode rows.
        prefill_policy="budget",
        enable_prefix_caching=False,
        **engine,
    )
    with progress() as say:
        measured = measure_overhead(config, batch, rounds, say)
    print_answer(measured.as_json(), as_json, _print_figures)
    return 0


def _print_figures(answer: dict[str, Any]) -> None:
    print(
        f"{answer['model']}, pp=1, {answer['dtype']}: {answer['steps']} decode steps of "
        f"{answer['num_prompts']} rows with {answer['kernel_calls_per_step']} kernel calls "
        f"({answer['kernels']}), rounds: {answer['rounds']}"
    )
    print_spread(answer, ("step_us", "python_us_per_step", "python_share"))
    steps = answer["profile"]
    shares = {f"{kind} (%)": steps[kind]["percent"] for kind in steps}
    print(
        "where the time goes: "
        + ", ".join(
            f"{kind} steps of {of['tokens']} tokens, {of['step_us']:.4g} us"
            for kind, of in steps.items()
        )
    )
    print_rows(
        [
            {"part": part, **{name: percent[part] for name, percent in shares.items()}}
            for part in steps["decode"]["percent"]
        ]
    )
    print_where(answer)
