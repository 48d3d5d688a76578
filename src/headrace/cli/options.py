"""The engine's options as commands share them, and checks of options that the engine lacks."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.config import EngineConfig
from headrace.errors import UsageError

MODEL_HELP = "GGUF file, Hugging Face directory, or smollm2."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
# As vLLM's users name it, and the other way.
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Another way to name the model.")]
PipelineParallelSize = Annotated[
    int, typer.Option("--pipeline-parallel-size", "-pp", help="Number of stages.")
]
LayerPartition = Annotated[
    str | None, typer.Option(help="Layers per stage, such as 19,11; default: by cost.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Positions a sequence may have; default: the model's.")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Sequences that run at the same time; default: 256.")
]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens in one step.")]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(help="KV cache a stage, such as 2GiB; default: a part of the free memory."),
]
SchedulingPolicy = Annotated[
    str, typer.Option(help="fcfs: first come, first served; priority: requests may have one.")
]
PrefillPolicy = Annotated[
    str, typer.Option(help="even: steps of the same cost; budget: always as many tokens.")
]
MaxItlMs = Annotated[
    float | None,
    typer.Option(
        help="The most between two tokens while prompts are read; default: 9 times what it is "
        "while none are."
    ),
]
BlockSize = Annotated[int, typer.Option(help="Positions in a KV-cache block.")]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(help="KV cache of all stages, as a part of the memory free after loading."),
]
EnablePrefixCaching = Annotated[
    bool, typer.Option(help="Keep blocks of ended requests for others that begin the same.")
]
TokenFeedback = Annotated[
    str, typer.Option(help="deferred, or blocking to measure what engines used to do.")
]
NumMicrobatches = Annotated[
    str, typer.Option(help="Groups of sequences that take turns; auto: as many as pay.")
]
LinkLatencyMs = Annotated[
    float, typer.Option(help="Emulate links that take so long for a message, one way.")
]
LinkBandwidthMbps = Annotated[
    float | None, typer.Option(help="Emulate links of so many megabits a second.")
]
CpuThreads = Annotated[
    int | None,
    typer.Option(help="OpenMP threads of each stage; default: one on each of its cores."),
]
CpuBind = Annotated[
    str,
    typer.Option(help="auto: disjoint cores, a thread each; none; or each stage's, as 0-3|4-7."),
]
GenerationConfig = Annotated[
    str,
    typer.Option(help="auto: the model's sampling defaults for what is left out; none: not."),
]
Seed = Annotated[int, typer.Option(help="Base of the random numbers.")]
MasterAddr = Annotated[str, typer.Option(help="Address where stages meet.")]
MasterPort = Annotated[int, typer.Option(help="Its port; 0 picks a free one.")]
StallTimeout = Annotated[
    float, typer.Option(help="Seconds in which no stage gets on, nor computes, that are an error.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


def engine_settings(context: typer.Context) -> dict[str, Any]:
    """Those of the command's flags that are settings of the engine, but for the model.

    Raises UsageError for a --num-microbatches that is none.
    """
    names = {field.name for field in fields(EngineConfig)} - {"model"}
    settings = {name: value for name, value in context.params.items() if name in names}
    return settings | {"num_microbatches": parse_num_microbatches(settings["num_microbatches"])}


def one_model(command: str, argument: str | None, option: str | None) -> str:
    """What either way names. Raises UsageError for none, and for two."""
    if argument and option and argument != option:
        raise UsageError(
            f"{command} has one model, but {argument!r} and --model {option!r} were given"
        )
    model = argument or option
    if not model:
        raise UsageError(f"{command} needs the model, as in: headrace {command} smollm2")
    return model


def parse_num_microbatches(text: str) -> int | None:
    """The number, or None for auto. Raises UsageError for anything else."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--num-microbatches must be auto or a number, not {text!r}") from None


def check_range(flag: str, value: int, low: int, high: int) -> None:
    """Raises UsageError naming the flag for a value outside the range, ends included."""
    if not low <= value <= high:
        raise UsageError(f"{flag} must be from {low} to {high}, not {value}")


def check_writable(flag: str, path: Path) -> None:
    """Raises UsageError naming the flag if the file could not be written; leaves no file behind."""
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag} {path} cannot be written: {reason}") from error
    if not existed:
        path.unlink()
