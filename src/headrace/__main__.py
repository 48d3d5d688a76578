"""`python -m headrace` and the `headrace` console script."""

import io
import os
import signal
import sys

from headrace.signals import exit_at_once, exit_code, on_ending_signals


def main() -> int:
    """Run the command line; every mistake of the user ends in one line on standard error."""
    on_ending_signals(exit_at_once)
    _open_standard_streams()
    try:
        from headrace.cli import run

        code = run(sys.argv[1:])
        # It is over, and in order: what comes now must not change that.
        on_ending_signals(signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        return exit_code(signal.SIGINT)


def _open_standard_streams() -> None:
    """Fill in streams that the caller closed, or sockets would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    # Text that the terminal's encoding lacks must not end the command.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
