"""What the system does for a process when the one that started it ends."""

import ctypes
import signal

# Linux: include/uapi/linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def continue_when_parent_ends() -> None:
    """Have the system continue this process, should it be stopped when its parent ends.

    A stopped process cannot see that by itself, and would stay for ever. To one that runs it makes
    no difference, nor that the same happens when the thread that started this process ends
    (prctl(2), PR_SET_PDEATHSIG).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
