"""What an engine could leave behind when it has ended: processes and files."""

from collections.abc import Iterable
from pathlib import Path

import psutil


def processes_left(processes: Iterable[int]) -> list[str]:
    """Those of these that have not ended, or that nobody took note of, in words."""
    found = []
    for number in processes:
        try:
            process = psutil.Process(number)
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(f"zombie {number}")
            else:
                found.append(f"process {number} ({' '.join(process.cmdline())})")
        except psutil.NoSuchProcess:
            continue
    return found


def files_left(folder: Path) -> list[str]:
    """All that is in this folder of temporary files."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
