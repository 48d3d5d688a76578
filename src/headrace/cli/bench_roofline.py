"""`headrace bench roofline`: the machine's rates, and the limit they set to a load."""

from typing import Annotated, Any, cast

import typer

from headrace.bench.batch_run import Batch
from headrace.checks import check_type
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, print_where, progress


@with_flags
def roofline(
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.")] = 32,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    output_len: options.OutputLen = 64,
    dtype: options.KernelDtype = options.MEASURED["dtype"],
    rounds: Annotated[int, typer.Option(help="How often each rate is measured.")] = 5,
    *,
    engine: Annotated[dict[str, Any], engine_flags(model=options.MEASURED["model"])],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Rates of memory and of matrix products, and the shortest time they leave for a load."""
    # Only here: it brings in all of torch.
    from headrace.bench.roofline import Dtype, measure_roofline

    options.check_load(num_prompts, input_len, output_len, rounds)
    check_type("--dtype", dtype, Dtype)
    batch = Batch(num_prompts, input_len, output_len, seed=0)
    with progress() as say:
        answer = measure_roofline(engine["model"], cast(Any, dtype), batch, rounds, say)
    print_answer(answer, as_json, _print_figures)
    return 0


def _print_figures(answer: dict[str, Any]) -> None:
    print(f"rates: medians of {answer['rounds']}, products of {answer['rows']} rows")
    print_rows(
        [
            {key: rate[key] if key == "threads" else rate[key]["median"] for key in rate}
            for rate in answer["rates"]
        ]
    )
    limit = answer["limit"]
    print(
        f"{limit['model']}, {limit['dtype']} ({limit['arithmetic']} arithmetic): "
        f"{limit['num_prompts']} requests at once, {limit['input_len']} tokens in, "
        f"{limit['output_len']} out"
    )
    print_rows(
        [
            {"part": "prefill", "times": 1, **limit["prefill"]},
            {"part": "decode step", "times": limit["decode_steps"], **limit["decode_step"]},
        ]
    )
    print(
        f"limit: {limit['seconds']:.4g} s, {limit['output_tokens_per_s']:.4g} output tokens a "
        "second"
    )
    print_where(answer)
