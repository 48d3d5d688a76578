"""The command line: parses arguments, and turns errors into one line and an exit code."""

import os
import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

import headrace
from headrace.cli.generate import generate
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace", no_args_is_help=False, add_completion=False, rich_markup_mode=None
)
app.command()(generate)


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
    signal.signal(signal.SIGTERM, _on_terminate)
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments or ["--help"], prog_name="headrace", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        print(f"headrace: {error.format_message()} (see headrace --help)", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has had enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except HeadraceError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if "--debug" in arguments:
            raise
        print(
            f"headrace: internal error, {type(error).__name__}: {error} (run with --debug for "
            "where it happened)",
            file=sys.stderr,
        )
        return 1


def _on_terminate(number: int, frame: object) -> NoReturn:
    """Unwind, so that the stages are ended on the way out."""
    sys.exit(128 + number)
