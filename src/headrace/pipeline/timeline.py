"""Where a stage's time goes, step by step."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.protocol.messages import Report

Activity = Literal[
    "plan_wait", "feedback_wait", "activation_wait", "send_wait", "forward", "sample"
]


@dataclass
class StepTimes:
    """Adds up one stage's activities, in seconds, until the step is done."""

    epoch: int
    stage: int
    _seconds: dict[Activity, float] = field(default_factory=dict, init=False)
    _began: float | None = field(default=None, init=False)
    _sent_at: float | None = field(default=None, init=False)
    _arrivals: list[tuple[int, float]] = field(default_factory=list, init=False)

    def add(self, activity: Activity, started: float, ended: float) -> None:
        """Book an activity from `started` to `ended` on time.monotonic's clock."""
        self._seconds[activity] = self._seconds.get(activity, 0.0) + ended - started
        if self._began is None:
            self._began = ended if activity == "plan_wait" else started

    def sent(self, at: float) -> None:
        """What the step gives to another stage was started at this moment."""
        self._sent_at = at

    def arrived(self, step: int, at: float) -> None:
        """What another stage sent for a step was there at this moment."""
        self._arrivals.append((step, at))

    def finish(self, step: int) -> Report:
        """The report of a step that is done; starts anew for the next."""
        ended = time.monotonic()
        began = ended if self._began is None else self._began
        seconds, self._seconds, self._began = self._seconds, {}, None
        sent_at, self._sent_at = self._sent_at, None
        arrivals, self._arrivals = self._arrivals, []
        return Report(
            epoch=self.epoch,
            step=step,
            stage=self.stage,
            began=began,
            ended=ended,
            plan_wait_s=seconds.get("plan_wait", 0.0),
            feedback_wait_s=seconds.get("feedback_wait", 0.0),
            activation_wait_s=seconds.get("activation_wait", 0.0),
            send_wait_s=seconds.get("send_wait", 0.0),
            forward_s=seconds.get("forward", 0.0),
            sample_s=seconds.get("sample", 0.0),
            sent_at=sent_at,
            arrivals=arrivals,
            peak_memory_bytes=peak_memory(),
        )


def peak_memory() -> int:
    """The most memory this process ever held, in bytes.

    Not getrusage's figure: that one begins with the peak of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
