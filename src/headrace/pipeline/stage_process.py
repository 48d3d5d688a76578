"""A stage's process, started by pipeline/launch.py with the addresses of its two sockets.

Standard input is a pipe that the engine's process holds open: when it closes, the engine is gone,
and this process ends too.
"""

import os
import signal
import sys
import threading

from headrace.pipeline.pinning import keep_out_second_openmp


def _exit_with_engine() -> None:
    """End at once, whatever the main thread waits for, when the engine's process is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> int:
    """Run one stage; the exit code is 0 only after an ordered stop."""
    # The engine ends its stages itself; a Ctrl-C meant for it must not race with that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_engine, daemon=True).start()
    keep_out_second_openmp()
    stage_cpus = os.sched_getaffinity(0)
    # Only now, since torch takes seconds to import and the engine may be gone before.
    from headrace.pipeline.stage_worker import run

    # OpenMP, which came with torch, has pinned this thread to one core, and would thereby confine
    # to it all threads that are yet to come, those of sockets and links. So not before it computes.
    own_cpu = os.sched_getaffinity(0)
    os.sched_setaffinity(0, stage_cpus)
    return run(sys.argv[1], sys.argv[2], own_cpu)


if __name__ == "__main__":
    sys.exit(main())
