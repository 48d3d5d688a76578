"""What a process that is forked from an engine's lets go of, so that it does not pass for it."""

import os
import weakref
from typing import Protocol


class _Owner(Protocol):
    def leave(self) -> None:
        """In a fork: hold nothing by which others tell that this process lives."""


_owners: "weakref.WeakSet[_Owner]" = weakref.WeakSet()


def leave_in_forks(owner: _Owner) -> None:
    """Have it leave in every process that is forked from this one, as long as it exists."""
    _owners.add(owner)


def _leave() -> None:
    for owner in list(_owners):
        owner.leave()


os.register_at_fork(after_in_child=_leave)
