"""`python -m headrace` and the `headrace` console script."""

import io
import os
import sys

# As shells have it: 128 and the signal's number.
_INTERRUPTED = 130


def main() -> int:
    """Run the command line; every mistake of the user ends in one line on standard error."""
    _open_standard_streams()
    try:
        # Inside the try, since a Ctrl-C may well come while modules load.
        from headrace.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return _INTERRUPTED


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
