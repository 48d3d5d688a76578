"""Where a rank's time goes: its time line, and from it the report of each step."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from headrace.protocol.messages import Activity, ActivityKind, Report, Timeline
from headrace.protocol.plan import Plan

# Activities remembered: those of some eight thousand steps.
RING_SIZE = 65_536
# Reading the peak memory takes some 50 us, as long as a dozen steps' activities.
_MEMORY_EVERY_S = 0.1

# kind, step, microbatch, of, began: an activity that goes on. With ended: one that is over.
_Going = tuple[ActivityKind, int, int, int, float]
_Ended = tuple[ActivityKind, int, int, int, float, float]


def peak_memory() -> int:
    """The most memory this process ever held, in bytes.

    Not getrusage's figure: that one begins with the peak of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class RankTimeline:
    """What one rank does, one activity after the other, in a ring of fixed size.

    Moments are given by the caller, in seconds of whatever clock it lives by. One thread records;
    show() may be called from any other meanwhile. memory: tells the peak memory in bytes.
    """

    def __init__(self, epoch: int, rank: int, memory: Callable[[], int] = peak_memory) -> None:
        self.rank = rank
        self.epoch = epoch
        self._memory = memory
        self._ring: list[_Ended | None] = [None] * RING_SIZE
        self._count = 0
        self._going: _Going | None = None
        # Activities that have begun while that one goes on.
        self._within = 0
        # The step that the stage is at: steps are done in order, without gaps.
        self._step = 0
        self._microbatches: deque[int] = deque()
        # Since the last report.
        self._seconds: dict[ActivityKind, float] = {}
        self._began: float | None = None
        self._sent_at: float | None = None
        self._arrivals: list[tuple[int, float]] = []
        self._peak_memory = 0
        self._memory_due = float("-inf")

    @property
    def step(self) -> int:
        """The step that the stage is at, or whose plan it waits for."""
        return self._step

    @property
    def computes(self) -> int | None:
        """The step that the stage computes at the moment, if it does."""
        going = self._going
        return going[1] if going is not None and going[0] in ("forward", "sample") else None

    def planned(self, plan: Plan) -> None:
        """The stage was given the next plan; one of another epoch is none."""
        if plan.epoch == self.epoch:
            self._microbatches.append(plan.microbatch)

    def begin(self, kind: ActivityKind, of: int, at: float) -> None:
        """From this moment the stage does this. of: the step whose tensor (or plan) it is about.

        What is done while something else goes on, as during a forward, is not recorded.
        """
        if self._going is not None:
            self._within += 1
            return
        microbatch = self._microbatches[0] if self._microbatches else -1
        self._going = (kind, self._step, microbatch, of, at)
        if kind == "send":
            self._sent_at = at

    def end(self, at: float) -> None:
        """What began last is over."""
        if self._within:
            self._within -= 1
            return
        going = self._going
        assert going is not None, "nothing has begun"
        self._ring[self._count % RING_SIZE] = (*going, at)
        self._count += 1
        self._going = None
        kind, began = going[0], going[4]
        self._seconds[kind] = self._seconds.get(kind, 0.0) + at - began
        if self._began is None:
            self._began = at if kind == "plan_wait" else began

    def arrived(self, step: int, at: float) -> None:
        """What another stage sent for a step was there at this moment."""
        self._arrivals.append((step, at))

    def finish(self, at: float) -> Report:
        """The report of the step that the stage is at, which is done; then comes the next."""
        if at >= self._memory_due:
            self._memory_due = at + _MEMORY_EVERY_S
            self._peak_memory = self._memory()
        seconds = self._seconds.get
        report = Report(
            epoch=self.epoch,
            step=self._step,
            rank=self.rank,
            began=at if self._began is None else self._began,
            ended=at,
            plan_wait_s=seconds("plan_wait", 0.0),
            feedback_wait_s=seconds("feedback_wait", 0.0),
            activation_wait_s=seconds("activation_wait", 0.0),
            send_wait_s=seconds("send_wait", 0.0),
            forward_s=seconds("forward", 0.0),
            sample_s=seconds("sample", 0.0),
            sent_at=self._sent_at,
            arrivals=self._arrivals,
            peak_memory_bytes=self._peak_memory,
        )
        self._seconds, self._began = {}, None
        self._sent_at, self._arrivals = None, []
        self._microbatches.popleft()
        self._step += 1
        return report

    def show(self, last: int, now: float) -> Timeline:
        """At most the last so many activities; the newest may still go on."""
        # In this order: an activity that ends meanwhile is seen twice rather than not at all.
        going, count = self._going, self._count
        shown = range(max(0, count - min(last, RING_SIZE)), count)
        ended = [(n, self._ring[n % RING_SIZE]) for n in shown]
        # Those that were overwritten meanwhile are newer than they should be.
        oldest = self._count - RING_SIZE
        activities = [Activity(*entry) for n, entry in ended if entry is not None and n >= oldest]
        if going is not None and (not ended or ended[-1][1] is None or ended[-1][1][:5] != going):
            activities.append(Activity(*going, None))
        return Timeline(self.rank, now, activities[-last:] if last else [])
