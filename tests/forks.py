"""What happens in a process that is forked from this one."""

import os
import signal
from collections.abc import Callable


def in_fork(use: Callable[[], object]) -> str:
    """What it raises in a process forked from this one; "nothing" if it does not."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        told = "nothing"
        signal.alarm(60)
        try:
            use()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with open(reader, "rb") as pipe:
        told = pipe.read().decode()
    assert status == 0
    return told
