"""How busy each rank was, added up from its reports."""

import math

import msgspec

from headrace.protocol.messages import Report


class RankUsage(msgspec.Struct, frozen=True, gc=False):
    """Totals of one rank over some steps, in seconds of its own clock. newest_step: of this
    epoch, the last that it reported on."""

    began: float = math.inf
    ended: float = -math.inf
    busy_s: float = 0.0
    feedback_wait_s: float = 0.0
    activation_wait_s: float = 0.0
    peak_memory_bytes: int = 0
    newest_step: int = -1

    def plus(self, report: Report) -> "RankUsage":
        """The totals with one more step's report."""
        return RankUsage(
            min(self.began, report.began),
            max(self.ended, report.ended),
            self.busy_s + report.forward_s + report.sample_s,
            self.feedback_wait_s + report.feedback_wait_s,
            self.activation_wait_s + report.activation_wait_s,
            max(self.peak_memory_bytes, report.peak_memory_bytes),
            max(self.newest_step, report.step),
        )

    @property
    def busy_fraction(self) -> float:
        """Computing time over the time from the first step's start to the last one's end."""
        span = self.ended - self.began
        return self.busy_s / span if span > 0 else 0.0
