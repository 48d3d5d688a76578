"""`headrace bench overlap`: what deferred token feedback gains over blocking."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.batch_run import Batch
from headrace.bench.plot import check_matplotlib, draw
from headrace.checkpoint.locate import SYNTHETIC
from headrace.checkpoint.synthetic import parse_stage_time
from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.cli.printing import print_answer, print_rows, progress
from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.trace import write_trace


@with_flags
def overlap(
    model: Annotated[str | None, typer.Option(help=options.MODEL_HELP)] = None,
    synthetic_stage_ms: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model, stages that sleep FIXED+PER_ROW milliseconds a step."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.")] = 64,
    input_len: options.InputLen = 32,
    output_len: options.OutputLen = 128,
    rounds: Annotated[int, typer.Option(help="How often each setting runs.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Draw blocking above deferred feedback into a PNG file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the last deferred run's time line, for Perfetto to open."),
    ] = None,
    *,
    engine: Annotated[
        dict[str, Any],
        engine_flags(
            "layer_partition",
            "dtype",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory",
            "num_microbatches",
            "link_backend",
            "link_latency_ms",
            "link_bandwidth_mbps",
            "seed",
            *options.HOSTS,
            "tensor_parallel_size",
            "weights",
            pipeline_parallel_size=2,
        ),
    ],
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """The same requests with deferred and with blocking token feedback, interleaved.

    With --nnodes, other hosts join twice: at the master's port and at the one after it.
    """
    # Only here: it brings in all of torch.
    from headrace.bench.overlap import measure_overlap

    options.check_load(num_prompts, input_len, output_len, rounds, least_output=2)
    config = EngineConfig(
        model=_model(model, synthetic_stage_ms), enable_prefix_caching=False, **engine
    )
    num_stages = config.pipeline_parallel_size
    if num_stages < 2:
        raise UsageError(
            f"--pipeline-parallel-size must be at least 2, not {num_stages}: a single stage waits "
            "for no token"
        )
    options.check_range("--pipeline-parallel-size", num_stages, 2, 64)
    batch = Batch(num_prompts, input_len, output_len, config.seed)
    config = batch.fitted(config)
    if plot is not None:
        check_matplotlib()
        options.check_writable("--plot", plot)
    if trace is not None:
        options.check_writable("--trace", trace)
    with progress() as say:
        wanted = plot is not None or trace is not None
        measured = measure_overlap(config, batch, rounds, say, timelines=wanted)
    if plot is not None:
        draw(plot, measured.title, measured.panels, config.ranks)
    # First, so that a full disk does not lose them.
    print_answer(measured.as_json(), as_json, _print_figures)
    if trace is not None:
        write_trace(trace, measured.timelines["deferred"], measured.title, config.ranks)
    if plot is not None:
        draw(plot, measured.title, measured.panels, config.ranks)
    return 0


def _model(model: str | None, synthetic_stage_ms: str | None) -> str:
    """What runs. Raises UsageError unless it is given one way."""
    if model is not None and synthetic_stage_ms is None:
        return model
    if model is not None or synthetic_stage_ms is None:
        raise UsageError("give either --model or --synthetic-stage-ms")
    parse_stage_time(synthetic_stage_ms)
    return SYNTHETIC + synthetic_stage_ms.strip()


def _print_figures(answer: dict[str, Any]) -> None:
    for key in ("label", "emulated_link"):
        if key in answer:
            print(f"{key.replace('_', ' ')}: {answer[key]}")
    print(
        f"{answer['model']}, pp={answer['pp']}, tp={answer['tp']}, {answer['dtype']}: "
        f"{answer['num_prompts']} requests at once, {answer['input_len']} tokens in, "
        f"{answer['output_len']} out, rounds: {answer['rounds']}"
    )
    settings: dict[str, dict[str, Any]] = {
        name: answer[name] for name in ("deferred", "blocking", "blocking_best")
    }
    print_rows(
        [
            {
                "feedback": name.replace("_", ", "),
                "tokens/s": figures["output_tokens_per_s"],
                "least": figures["output_tokens_per_s_min"],
                "most": figures["output_tokens_per_s_max"],
                "microbatches": figures["num_microbatches"],
                "step ms p50": figures["step_ms_p50"],
            }
            for name, figures in settings.items()
        ]
    )
    print_rows(
        [
            {"feedback": name.replace("_", ", "), "rank": rank, **usage}
            for name, figures in settings.items()
            for rank, usage in enumerate(figures["ranks"])
        ]
    )
    print(
        f"deferred over blocking: x {answer['ratio']:.3g}; over blocking with its best number of "
        f"microbatches: x {answer['ratio_best']:.3g} ({answer['vllm_pr_51650_note']}: "
        f"x {answer['vllm_pr_51650_ratio']})"
    )
    in_pipeline = f"{answer['measured_step_ms']:.4g} ms in the pipeline"
    if "efficiency" in answer:
        print(
            f"a step takes {answer['ideal_step_ms']:.4g} ms on stage {answer['slowest_stage']} "
            f"alone, {in_pipeline}: efficiency {answer['efficiency']:.1%}"
        )
    else:
        print(
            f"a step takes {in_pipeline}; alone, not known: the slowest stage is elsewhere, or has "
            "several shards"
        )
    if "note" in answer:
        print(answer["note"])
