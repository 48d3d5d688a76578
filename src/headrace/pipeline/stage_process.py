"""A stage's process, started by pipeline/launch.py.

Its arguments are the engine's process and the addresses of its own two sockets. When the engine is
gone, however it went, this process ends too, stopped or not.
"""

import gc
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from headrace.host.engine_folder import remove_abandoned
from headrace.host.parent_end import continue_when_parent_ends
from headrace.host.pinning import keep_out_second_openmp


def _exit_with_engine(engine: int, folder: Path) -> None:
    """End at once, whatever the main thread waits for, when the engine's process is gone.

    Then nobody holds the other end of standard input; except for processes that it has forked
    behind Python's back. So its process is watched too, where the system can do that. The thread
    that started this process does not count: it may end long before the engine.
    """
    ends = [0]
    with suppress(OSError):
        ends.append(os.pidfd_open(engine))
    select.select(ends, [], [])
    remove_abandoned(folder)
    os._exit(1)


def main() -> int:
    """Run one stage; the exit code is 0 only after an ordered stop."""
    # The engine ends its stages itself: signals meant for it, which a supervisor may well send to
    # all of a service's processes, must not race with that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # First of all: the thread below sees that the engine is gone, but not while it is stopped.
    continue_when_parent_ends()
    engine, address, watch_address = sys.argv[1:]
    folder = Path(address.removeprefix("ipc://")).parent
    threading.Thread(target=_exit_with_engine, args=(int(engine), folder), daemon=True).start()
    keep_out_second_openmp()
    stage_cpus = os.sched_getaffinity(0)
    # Modules are no garbage: to look for some while they come takes a sixth of the time.
    gc.disable()
    # Only now, since torch takes seconds to import and the engine may be gone before.
    from headrace.pipeline.stage_worker import run

    gc.enable()
    # OpenMP, which came with torch, has pinned this thread to one core, and would thereby confine
    # to it all threads that are yet to come, those of sockets and links. So not before it computes.
    own_cpu = os.sched_getaffinity(0)
    os.sched_setaffinity(0, stage_cpus)
    return run(address, watch_address, own_cpu)


if __name__ == "__main__":
    sys.exit(main())
