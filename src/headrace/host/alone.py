"""A process on a stage's cores, with its threads and nothing beside it, that answers one task."""

import os
import runpy
import subprocess
import sys

from headrace.errors import PipelineError
from headrace.host.cpus import StageCpus
from headrace.host.pinning import keep_out_second_openmp, start_process


def answer_alone(module: str, what: str, cpus: StageCpus, task: bytes) -> bytes:
    """What the module writes to standard output, run with the task on standard input.

    what: the process, for people. Raises PipelineError, with the last line that it complained in,
    if the process fails.
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
        answer, complaints = process.communicate(task)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        last = (complaints.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise PipelineError(f"{what} failed: {last}")
    return answer


if __name__ == "__main__":
    keep_out_second_openmp()
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
