"""How a stage's process, and each of its OpenMP threads, gets to its cores."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import StartError
from headrace.host.cpus import StageCpus


def start_process(
    arguments: list[str], stage: StageCpus, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Popen(arguments) on the stage's cores with its OpenMP threads, each pinned to one of them.

    options are Popen's. What the environment itself says about threads and pinning is replaced.
    OpenMP also pins the thread that loads it, to the first of the cores, and with it all threads
    that this one starts from then on.
    """
    before = os.sched_getaffinity(0)
    try:
        if stage.cpus:
            # A process inherits the cores of the thread that starts it, so none of its threads was
            # ever elsewhere.
            try:
                os.sched_setaffinity(0, stage.cpus)
            except OSError as error:
                raise StartError(
                    f"cannot keep a stage to cores {stage.cpus}: {error.strerror}; try "
                    "--cpu-bind none"
                ) from error
        return subprocess.Popen(arguments, env={**environment, **_openmp(stage)}, **options)
    finally:
        os.sched_setaffinity(0, before)


def keep_out_second_openmp() -> None:
    """For the start of a process that computes, before anything large is imported.

    The gguf package would import sentencepiece for tokenizers that no stage needs, and that may
    bring an OpenMP runtime of its own, to fight torch's for the cores.
    """
    sys.modules["sentencepiece"] = None  # type: ignore[assignment]


def _openmp(stage: StageCpus) -> dict[str, str]:
    """Variables of the OpenMP specification, and MKL's, from which torch takes its threads."""
    threads = str(stage.threads)
    # Otherwise MKL, and torch with it, starts no more threads than there are physical cores.
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "MKL_DYNAMIC": "FALSE"}
    if not stage.cpus:
        return {**variables, "OMP_PROC_BIND": "false"}
    places = ",".join(f"{{{cpu}}}" for cpu in stage.cpus)
    return {**variables, "OMP_PROC_BIND": "close", "OMP_PLACES": places}
