"""`python -m headrace` and the `headrace` console script."""

import sys

# As shells have it: 128 and the signal's number.
_INTERRUPTED = 130


def main() -> int:
    """Run the command line; every mistake of the user ends in one line on standard error."""
    try:
        # Inside the try, since a Ctrl-C may well come while modules load.
        from headrace.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
