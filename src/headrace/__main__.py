"""`python -m headrace` and the `headrace` console script."""

import sys

# Exit codes that shells know: 128 + the signal's number.
_INTERRUPTED = 130


def main() -> int:
    """Run the command line; every mistake of the user ends in one line on standard error."""
    try:
        # Inside the try, since a Ctrl-C may well come while modules load.
        from headrace.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
