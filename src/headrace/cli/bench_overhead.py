"""`headrace bench overhead`: what of a decode step is Python, and where the rest of a step goes."""

import json
from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_rows, print_where, progress, rounded
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

    options.check_range("--num-prompts", num_prompts, 1, 512)
    options.check_range("--input-len", input_len, 1, 1_000_000)
    # Until the last prompts are in, some decode already.
    options.check_range("--output-len", output_len, 4, 1_000_000)
    options.check_range("--rounds", rounds, 1, 1000)
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
        answer = rounded(measure_overhead(config, batch, rounds, say).as_json())
    print(json.dumps(answer)) if as_json else _print_answer(answer)
    return 0


def _print_answer(answer: dict[str, Any]) -> None:
    print(
        f"{answer['model']}, pp=1, {answer['dtype']}: {answer['steps']} decode steps of "
        f"{answer['num_prompts']} rows with {answer['kernel_calls_per_step']} kernel calls "
        f"({answer['kernels']}), rounds: {answer['rounds']}"
    )
    figures = ("step_us", "python_us_per_step", "python_share")
    print_rows(
        [
            {
                "figure": name,
                "median": answer[name],
                "least": answer[f"{name}_min"],
                "most": answer[f"{name}_max"],
            }
            for name in figures
        ]
    )
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
