"""`headrace key`: a new key for the hosts of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import options
from headrace.host.cluster_key import write_cluster_key


def key(
    file: Annotated[Path, typer.Argument(help="Where it is written; it must be new.")],
    debug: options.Debug = False,
) -> int:
    """Make a key that lets hosts in: copy it to each of them, for --cluster-key-file."""
    write_cluster_key(file)
    print(f"wrote {file}, readable by you alone: copy it to every host, and show it to nobody")
    return 0
