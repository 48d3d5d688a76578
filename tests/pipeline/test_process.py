"""A rank's process on this host: how its end is learned."""

import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.pipeline.process import LocalProcess, is_readable


class InterruptedLock:
    """A signal comes as soon as somebody has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._lock.acquire(blocking)
        signal.raise_signal(signal.SIGINT)
        return taken

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("look", [LocalProcess.kill, LocalProcess.poll])
@pytest.mark.parametrize("told", [True, False], ids=["pidfd", "without"])
def test_a_look_that_is_interrupted_leaves_its_end_to_be_learned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    told: bool,
    look: Callable[[LocalProcess], object],
) -> None:
    popen = subprocess.Popen(["sleep", "1000"])
    death = io.FileIO(os.pidfd_open(popen.pid), "r")
    process = LocalProcess(popen, "", "", death if told else None, tmp_path / "log")
    os.kill(popen.pid, signal.SIGKILL)
    assert is_readable(death, 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(popen, "_waitpid_lock", lock := InterruptedLock())
        with pytest.raises(KeyboardInterrupt):
            look(process)
    monkeypatch.setattr(popen, "_waitpid_lock", lock._lock)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL
    death.close()
