"""How long a message takes between two stages, from the stages' reports."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from headrace.protocol.messages import Report
from headrace.protocol.ranks import Ranks

_MEMORY = 16
# Steps whose parts are kept while some are missing, in windows.
_WINDOWS_KEPT = 4


@dataclass(slots=True)
class _Way:
    """A step's way round the stages. link_s: time on links, once all parts are in."""

    link_s: float = 0.0
    parts: int = 0


@dataclass
class LinkTime:
    """Mean one-way time of a link, without comparing two stages' clocks.

    A step's activations leave the first stage, pass the others, and its feedback comes back. The
    first stage's clock says how long that took. Each other stage's clock says how long the step was
    there, from arrival to departure. What is left was spent on links. The median of recent steps
    counts.

    seconds: of a message between neighbours; 0 before the first is measured, and with one stage.
    """

    ranks: Ranks
    window: int
    seconds: float = field(default=0.0, init=False)
    _ways: dict[int, _Way] = field(default_factory=dict, init=False)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY), init=False)

    def add(self, report: Report) -> None:
        """Take in what one stage saw of one step, and of earlier ones' feedback."""
        # One shard of each stage tells enough: all of a stage's are at the same step.
        if self.ranks.num_stages == 1 or self.ranks.shard_of(report.rank):
            return
        if report.rank == 0:
            if report.sent_at is not None:
                self._add_part(report.step, -report.sent_at)
            for step, at in report.arrivals:
                self._add_part(step, at)
            return
        for step, at in report.arrivals:
            if step == report.step and report.sent_at is not None:
                self._add_part(step, at - report.sent_at)

    def _add_part(self, step: int, seconds: float) -> None:
        way = self._ways.setdefault(step, _Way())
        way.link_s += seconds
        way.parts += 1
        if way.parts == self.ranks.num_stages + 1:
            self._recent.append(way.link_s / self.ranks.num_stages)
            self.seconds = max(0.0, median(self._recent))
            del self._ways[step]
        # Steps without feedback are never complete.
        while len(self._ways) > _WINDOWS_KEPT * self.window:
            del self._ways[next(iter(self._ways))]
