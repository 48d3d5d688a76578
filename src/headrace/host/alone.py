"""A process on a stage's cores, with its threads and nothing beside it, that answers one task."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

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
    # A file: of a pipe, communicate() forgets what it has not written when its time is over.
    with tempfile.TemporaryFile() as given:
        given.write(task)
        given.seek(0)
        process = start_process(
            [sys.executable, "-P", "-m", __name__, module],
            cpus,
            os.environ,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    try:
        answer, complaints = _communicate(process, check)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        last = (complaints.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise PipelineError(f"{what} failed: {last}")
    return answer


def _communicate(
    process: subprocess.Popen[bytes], check: Callable[[], None]
) -> tuple[bytes, bytes]:
    while True:
        check()
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_LOOK_S)


if __name__ == "__main__":
    keep_out_second_openmp()
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
