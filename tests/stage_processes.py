"""An engine's stages as the system sees them: child processes of the engine's."""

import re

import psutil


def stage_processes(engine: int) -> dict[int, int]:
    """Process ids of living stages by rank. engine: the process id of the engine's process."""
    found = {}
    for child in psutil.Process(engine).children():
        try:
            # Among a stage's arguments are its sockets.
            rank = re.search(r"/rank-(\d+)( |$)", " ".join(child.cmdline()))
            if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                found[int(rank[1])] = child.pid
        except psutil.NoSuchProcess:
            continue
    return dict(sorted(found.items()))
