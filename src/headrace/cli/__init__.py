"""The command line: parses arguments, and turns errors into one line and an exit code."""

import os
import sys
import traceback
from typing import Annotated

import typer

import headrace
from headrace.cli import bench
from headrace.cli.chat import chat
from headrace.cli.generate import generate
from headrace.cli.join import join
from headrace.cli.key import key
from headrace.cli.models import models
from headrace.cli.serve import serve
from headrace.errors import HeadraceError, StallError
from headrace.signals import on_ending_signals, unwind

app = typer.Typer(
    name="headrace",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    # Handed down to every command.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(join)
app.command()(key)
app.command()(models)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """LLM inference split by layers, in which no stage waits for a token."""


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong usage."""
    on_ending_signals(unwind)
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments or ["--help"], prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader has had enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        # One line, whatever the message is made of.
        print("headrace:", " ".join(_message(error).split()), file=sys.stderr)
        if isinstance(error, StallError) and "--debug" not in arguments:
            print("\n".join(error.__notes__), file=sys.stderr)
        return error.exit_code if isinstance(error, HeadraceError | typer.TyperException) else 1


def _message(error: Exception) -> str:
    if isinstance(error, HeadraceError):
        return str(error)
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "headrace"
        return f"{error.format_message().rstrip('.')} (see {command} --help)"
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' * bool(error.filename)}"
    what = f"internal error, {type(error).__name__}: {error}"
    return f"{what} (run with --debug for where it happened)"
