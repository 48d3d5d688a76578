"""Whether processes' memory stays as it was: a line through what they had, one for each life."""

import statistics
import time
from dataclasses import dataclass, field

import psutil

from census import memory_mib

# The first part of a life is not judged: caches, allocators and time lines fill.
_WARM_UP = 1 / 3
# The rest must be so many samples, or nothing can be said of it.
_LEAST_SAMPLES = 20
# What a line may rise, whichever is more: so many MiB in an hour, or in all; less than that is what
# allocators keep a little more or less of from one moment to the next.
MOST_MIB_PER_HOUR = 16.0
MOST_MIB = 3.0


@dataclass
class Life:
    """A process from its start to its end. samples: moments in seconds, and MiB."""

    name: str
    process: int
    samples: list[tuple[float, float]] = field(default_factory=list)

    @property
    def judged(self) -> list[tuple[float, float]]:
        """The samples after its warm-up; none if they are too few to say anything."""
        if not self.samples:
            return []
        began, ended = self.samples[0][0], self.samples[-1][0]
        late = [(at, mib) for at, mib in self.samples if at >= began + _WARM_UP * (ended - began)]
        return late if len(late) >= _LEAST_SAMPLES else []

    @property
    def slope(self) -> float | None:
        """MiB an hour, by least squares; None if there is not enough to say."""
        if not (late := self.judged):
            return None
        at, mib = zip(*late, strict=True)
        return 3600 * statistics.linear_regression(at, mib).slope

    @property
    def bound(self) -> float:
        """The most that the slope may be, MiB an hour."""
        late = self.judged
        return max(MOST_MIB_PER_HOUR, 3600 * MOST_MIB / (late[-1][0] - late[0][0]))

    def __str__(self) -> str:
        seconds = self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0
        told = f"{self.name}: {seconds:.0f} s"
        if (slope := self.slope) is None:
            return f"{told}, too short to be judged"
        sizes = [mib for _, mib in self.judged]
        return (
            f"{told}, {sizes[0]:.1f} to {sizes[-1]:.1f} MiB (at most {max(sizes):.1f}), "
            f"slope {slope:+.1f} MiB an hour (bound {self.bound:.0f})"
        )


@dataclass
class MemoryWatch:
    """The lives of all processes that were ever seen, by process id."""

    lives: dict[int, Life] = field(default_factory=dict)

    def sample(self, processes: dict[str, int]) -> None:
        """Note what these have now, by name."""
        for name, process in processes.items():
            try:
                mib = memory_mib(process)
            except psutil.NoSuchProcess:
                continue
            self.lives.setdefault(process, Life(name, process)).samples.append(
                (time.monotonic(), mib)
            )

    def problems(self, must_be_judged: list[str]) -> list[str]:
        """Lives that grew, and names of which no life was long enough to be judged."""
        judged = [
            (life, slope) for life in self.lives.values() if (slope := life.slope) is not None
        ]
        grew = [f"memory grew: {life}" for life, slope in judged if slope > life.bound]
        names = {life.name for life, _ in judged}
        return grew + [
            f"no life of {name} was long enough to judge its memory"
            for name in must_be_judged
            if name not in names
        ]
