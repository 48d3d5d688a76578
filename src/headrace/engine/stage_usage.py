"""How busy each stage was, added up from its reports."""

import math
from dataclasses import dataclass

from headrace.protocol.messages import Report


@dataclass
class StageUsage:
    """Totals of one stage since the last reset, in seconds of that stage's clock."""

    began: float = math.inf
    ended: float = -math.inf
    busy_s: float = 0.0
    feedback_wait_s: float = 0.0
    activation_wait_s: float = 0.0
    peak_memory_bytes: int = 0
    newest_step: int = -1

    def add(self, report: Report) -> None:
        """Take in one step's report."""
        self.began = min(self.began, report.began)
        self.ended = max(self.ended, report.ended)
        self.busy_s += report.forward_s + report.sample_s
        self.feedback_wait_s += report.feedback_wait_s
        self.activation_wait_s += report.activation_wait_s
        self.peak_memory_bytes = max(self.peak_memory_bytes, report.peak_memory_bytes)
        self.newest_step = max(self.newest_step, report.step)

    @property
    def busy_fraction(self) -> float:
        """Computing time over the time from the first step's start to the last one's end."""
        span = self.ended - self.began
        return self.busy_s / span if span > 0 else 0.0
