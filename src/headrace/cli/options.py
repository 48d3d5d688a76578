"""Options that several commands have and no settings declare, and checks of such options."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.setting import declared_settings

MODEL_HELP = declared_settings(EngineConfig)["model"].setting.help
# As vLLM's users name it, and the other way.
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Another way to name the model.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token; default: the model's, or 1.")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Likeliest tokens up to this probability; default: the model's, or 1."),
]
InputLen = Annotated[int, typer.Option(help="Tokens of each prompt, at random.")]
OutputLen = Annotated[int, typer.Option(help="Tokens that each answer has.")]
KernelDtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]

# Settings by which benches run on several hosts, as `headrace serve` does.
HOSTS = (
    "nnodes", "master_addr", "master_port", "interface", "cluster_key_file", "insecure_links",
    "join_timeout",
)  # fmt: skip
# What benches run unless they are told.
MEASURED = {"model": "smollm2", "dtype": "bfloat16"}


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


def check_range(flag: str, value: int, low: int, high: int) -> None:
    """Raises UsageError naming the flag for a value outside the range, ends included."""
    if not low <= value <= high:
        raise UsageError(f"{flag} must be from {low} to {high}, not {value}")


def check_load(
    num_prompts: int,
    input_len: int,
    output_len: int,
    rounds: int,
    *,
    most_prompts: int = 100_000,
    least_output: int = 1,
) -> None:
    """Raises UsageError naming the flag for a bench's load that is out of range."""
    check_range("--num-prompts", num_prompts, 1, most_prompts)
    check_range("--input-len", input_len, 1, 1_000_000)
    check_range("--output-len", output_len, least_output, 1_000_000)
    check_range("--rounds", rounds, 1, 1000)


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
