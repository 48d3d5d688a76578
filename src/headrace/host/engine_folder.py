"""An engine's folder among the temporary files: its sockets, its stages' logs, its promises.

The folder is locked as long as its engine lives (flock). So the next engine to start can tell those
that nobody owns any more, as a SIGKILL leaves them, and removes them; and engines of one user know
what memory the others were promised and have not touched yet.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from headrace.host.memory import memory_of

_NAME = re.compile(r"headrace-[0-9a-f]{8}")
# What lies in one: nothing else is ever removed.
_CONTENT = re.compile(
    r"(rank|watch)-\d+(-\d+)?|(activations|feedback|sums)-\d+-\d+|rank-\d+\.log|promises(\.new)?"
)
_PROMISES = "promises"
# Seconds to wait for other engines to make their promises, which takes them none.
_PATIENCE_S = 5.0
_LOOK_S = 0.01


class EngineFolder:
    """A new folder, which only this user may enter; removed by remove(), and at exit at last."""

    def __init__(self) -> None:
        # By process, the bytes that it may come to have.
        self._promised: dict[int, int] = {}
        for folder in _folders():
            if (lock := _lock(folder)) is not None:
                remove_abandoned(folder)
                os.close(lock)
        while not self._make():
            pass

    def _make(self) -> bool:
        """Whether there is a folder, and still is once it is locked: another engine may have taken
        it for an abandoned one."""
        self.path = Path(tempfile.gettempdir()) / f"headrace-{secrets.token_hex(4)}"
        # Before there is one, so that no interrupt can come in between.
        self._removing = weakref.finalize(self, _remove_own, self.path, os.getpid())
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            self._removing.detach()
            return False
        self._lock = _lock(self.path, wait=True)
        if not self.path.exists():
            self.remove()
            return False
        return True

    def remove(self) -> None:
        """Remove it, and give up the lock; may be called again."""
        self._removing()
        self.leave()

    def leave(self) -> None:
        """Forget the lock, which in a process forked from the owner's does not give it up."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    @contextmanager
    def promising(self) -> Iterator[int]:
        """Meanwhile no other engine makes promises. Gives the bytes of memory that the others were
        promised and have not touched."""
        with _alone():
            yield sum(_untouched(folder) for folder in _folders() if folder != self.path)

    def promise(self, cache_bytes: Mapping[int, int]) -> None:
        """Let other engines know how many bytes each stage, by its process, is yet to take. What
        others were promised before stays."""
        for pid, size in cache_bytes.items():
            self._promised[pid] = (memory_of(pid) or 0) + size
        # Nothing of those that have ended: others may come to have their numbers.
        self._promised = {p: b for p, b in self._promised.items() if memory_of(p) is not None}
        full = list(self._promised.items())
        new = self.path / f"{_PROMISES}.new"
        new.write_bytes(msgspec.json.encode(full))
        new.rename(self.path / _PROMISES)


def remove_abandoned(folder: Path) -> None:
    """Remove an engine's folder whose engine is gone, unless there is anything else in it than an
    engine puts there."""
    with suppress(OSError):
        names = os.listdir(folder)
        if all(_CONTENT.fullmatch(name) for name in names):
            for name in names:
                # Its stages may be doing the same.
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def _remove_own(folder: Path, owner: int) -> None:
    # A fork of the owner inherits what is to be done at exit.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _folders() -> list[Path]:
    """Folders of this user's engines, the living and the dead."""
    folders = []
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700:
                        folders.append(Path(entry.path))
    return folders


def _lock(folder: Path, wait: bool = False) -> int | None:
    """A descriptor that locks the folder until it is closed; None if somebody else has it locked,
    it is gone, or its file system knows no such locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _alone() -> Iterator[None]:
    deadline = time.monotonic() + _PATIENCE_S
    folder = Path(tempfile.gettempdir())
    # Anybody may lock the directory of temporary files, also one who means harm: not for ever.
    while (lock := _lock(folder)) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _untouched(folder: Path) -> int:
    """Bytes promised to the stages of an engine that lives, beyond what they have."""
    if (lock := _lock(folder)) is not None:
        os.close(lock)
        return 0
    try:
        full = msgspec.json.decode((folder / _PROMISES).read_bytes(), type=list[tuple[int, int]])
    except (OSError, msgspec.DecodeError):
        return 0
    return sum(max(0, size - taken) for pid, size in full if (taken := memory_of(pid)) is not None)
