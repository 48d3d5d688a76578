"""How often the stages may be started anew."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import HeadraceError, PipelineError, StartError


@dataclass
class RestartLimit:
    """So many restarts in so many seconds, and no more. restarts: all so far."""

    most: int
    window_s: float
    clock: Callable[[], float] = time.monotonic
    restarts: int = field(default=0, init=False)
    _at: deque[float] = field(default_factory=deque, init=False)

    def count(self, error: HeadraceError) -> str:
        """One restart more, because of this error; in words, which it is. Raises the error if there
        are to be none, and that it is one too many."""
        now = self.clock()
        while self._at and now - self._at[0] > self.window_s:
            self._at.popleft()
        if not self.most:
            raise error
        if len(self._at) >= self.most:
            raise self._given_up(error) from error
        self._at.append(now)
        self.restarts += 1
        return f"restart {len(self._at)} of {self.most} in {self.window_s:g} s"

    def _given_up(self, error: HeadraceError) -> HeadraceError:
        kind = type(error) if isinstance(error, StartError) else PipelineError
        given_up = kind(
            f"{error}; gave up after {self.most} restarts in {self.window_s:g} s (--max-restarts)"
        )
        for line in getattr(error, "__notes__", ()):
            given_up.add_note(line)
        return given_up
