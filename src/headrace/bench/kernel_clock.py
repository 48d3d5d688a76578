"""How long a stage computes, and in which operations: a clock around each piece of work that its
model has for a step, and around sampling.

Everything else that a step does is the step's Python. Of an operation by torch, or of one kernel
called from Python, that call counts as the operation's; of operations that run in one native call
only what the call itself tells.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from headrace.kernels import path
from headrace.model.interpreter import Interpreter
from headrace.protocol.program import label
from headrace.sampling import sampler

SAMPLING = "sampling"


@dataclass
class KernelClock:
    """seconds: of operations, by what a profile calls them. calls: of pieces of work."""

    parts: list[str]
    seconds: dict[str, float] = field(init=False)
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.seconds = dict.fromkeys(self.parts, 0.0)

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds by part, and calls, since this was called last."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = dict.fromkeys(self.parts, 0.0), 0
        return taken

    def around(self, part: str | None, work: Any) -> Any:
        """The work, timed; part: None for a native program, which tells its parts' time itself.

        What that costs, some 0.2 us a call, counts as Python.
        """
        if part is None:
            return self._around_native(work)

        def timed(*arguments: Any) -> Any:
            began = perf_counter()
            answer = work(*arguments)
            self.seconds[part] += perf_counter() - began
            self.calls += 1
            return answer

        return timed

    def _around_native(self, work: Any) -> Any:
        take_profile = path.native.take_profile
        # What was spent before is not asked for.
        take_profile()

        def timed(*arguments: Any) -> None:
            work(*arguments)
            self.calls += 1
            for part, seconds in take_profile().items():
                # Parts of other programs of this process are told, too, without any time.
                if seconds:
                    self.seconds[part] += seconds

        return timed


def parts_of(model: Interpreter) -> list[str]:
    """What a step's time is spent on, in the order of a step."""
    operations = [*model.program.operations, *model.program.head]
    return [*dict.fromkeys(label(operation) for operation in operations), SAMPLING]


@contextmanager
def timed_kernels(model: Interpreter) -> Iterator[KernelClock]:
    """While it lasts, the time of all that the model computes is added up. The model must have its
    caches."""
    clock = KernelClock(parts_of(model))
    sampling: list[tuple[Any, str]] = [(sampler, "choose_by_torch")]
    if path.has_native():
        sampling.append((path.native, "choose"))
    own = [(owner, name, getattr(owner, name)) for owner, name in sampling]
    try:
        for owner, name, call in own:
            setattr(owner, name, clock.around(SAMPLING, call))
        with model.watched(clock.around):
            yield clock
    finally:
        for owner, name, call in own:
            setattr(owner, name, call)
