"""A process on a stage's cores, with its threads and nothing beside it, that answers one task."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable

from headrace.errors import PipelineError
from headrace.host.cpus import StageCpus
from headrace.host.pinning import keep_out_second_openmp, start_process

# Seconds between two looks whether it is still wanted.
_LOOK_S = 0.2


def answer_alone(
    module: str,
    what: str,
    cpus: StageCpus,
    task: bytes,
    check: Callable[[], None] = lambda: None,
) -> bytes:
    """What the module writes to standard output, run with the task on standard input.

    what: the process, for people. check: called once a second or more often; what it raises ends
    the process. Raises PipelineError, with the last line that it complained in, if the process
    fails.
    """
    process = start_process(
        [sys.executable, "-P", "-m", __name__, module],
        cpus,
        os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        answer, complaints = _communicate(process, task, check)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        last = (complaints.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise PipelineError(f"{what} failed: {last}")
    return answer


def _communicate(
    process: subprocess.Popen[bytes], task: bytes, check: Callable[[], None]
) -> tuple[bytes, bytes]:
    given: bytes | None = task
    while True:
        check()
        try:
            return process.communicate(given, timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            # The next call goes on where this one was, and takes no task.
            given = None


if __name__ == "__main__":
    keep_out_second_openmp()
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
