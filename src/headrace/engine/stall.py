"""The deadline of every wait in the pipeline: when it stands still, and what is said about that.

The stages themselves wait without looking at the clock. Here is who knows what a step may take and
what all the others do.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from headrace.errors import StallError
from headrace.protocol.messages import Activity, Timeline
from headrace.protocol.ranks import Ranks

_log = logging.getLogger(__name__)

# Activities of each stage that a stall's error shows: about a step's.
LINES_SHOWN = 8
# Computing is not standing still for at least so long, and so many times what was predicted.
_LEAST_PATIENCE_S = 10.0
_PATIENCE = 20
# Seconds in which a stage that lives shows its time line, however busy its machine is.
_LEAST_ANSWER_S, _MOST_ANSWER_S = 1.0, 5.0
# Seconds of which a stage is not to be blamed for, and how many such pauses are remembered.
_PAUSE_S = 0.5
_PAUSES = 64


@dataclass
class StallWatch:
    """Decides when stages that give nothing back are stuck. Moments are on the engine's clock.

    timeout_s: how long the engine waits in vain while a step is in flight, unless a stage computes.
    Time in which the engine itself did not run, or did something else, is not waiting: in a paused
    container, say, the stages stood still too.
    """

    timeout_s: float
    _progress_at: float = field(default=0.0, init=False)
    _look_at: float = field(default=0.0, init=False)
    _ran_at: float = field(default=math.inf, init=False)
    # When each pause ended, and its seconds.
    _pauses: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_PAUSES), init=False
    )

    def runs(self, now: float, waited_s: float = 0.0) -> None:
        """The engine runs at this moment; since it last said so it meant to wait for the stages,
        for waited_s at most."""
        lost_s = now - self._ran_at - waited_s
        self._ran_at = now
        if lost_s > 0:
            self._progress_at += lost_s
            self._look_at += lost_s
        if lost_s > _PAUSE_S:
            self._pauses.append((now, lost_s))

    def progress(self, now: float) -> None:
        """A stage got on, or there is nothing it could do."""
        self._progress_at = now
        self._look_at = now + self.timeout_s

    def due(self, now: float) -> bool:
        """Whether it is time to ask the stages what they do."""
        return now >= self._look_at

    @property
    def answer_s(self) -> float:
        """How long to wait for their answers."""
        return min(_MOST_ANSWER_S, max(_LEAST_ANSWER_S, self.timeout_s))

    def look(self, scene: "Scene", predicted_s: float, is_new: Callable[[int, int], bool]) -> None:
        """Raises StallError, or puts off the next look for the time that stages may still compute.

        predicted_s: of the dearest step in flight, on the slowest stage. is_new: whether a rank
        was never measured at work such as a step's, so that nobody knows how long that takes.
        """
        patience_s = max(self.timeout_s, _LEAST_PATIENCE_S, _PATIENCE * predicted_s)
        ends, stuck = [], []
        for rank, timeline in scene.timelines.items():
            since = _busy_since(timeline)
            if since is None:
                continue
            since += sum(lost_s for at, lost_s in self._pauses if at > since)
            step = timeline.activities[-1].step
            if is_new(rank, step):
                _log.warning(
                    "%s has computed step %d for %.0f s: it is the first of its kind and "
                    "size, and may take its time",
                    scene.ranks.name(rank),
                    step,
                    scene.now - since,
                )
                # Looked at again all the same: it may be stuck behind something else.
                ends.append(scene.now + self.timeout_s)
            else:
                ends.append(since + patience_s)
                if ends[-1] <= scene.now:
                    stuck.append(rank)
        if not ends or stuck:
            silent = [rank for rank in range(scene.ranks.count) if rank not in scene.timelines]
            error = _stall_error(scene, scene.now - self._progress_at)
            error.ranks = (*silent, *stuck)
            raise error
        self._look_at = min(ends)


@dataclass(frozen=True)
class Scene:
    """What was seen of the ranks at one moment.

    due: the oldest step in flight; newest: the newest one planned. signs_of_life: when each rank
    last sent anything. timelines: of the ranks that answered, by rank.
    """

    now: float
    due: int
    newest: int
    signs_of_life: Items[float]
    timelines: Mapping[int, Timeline]
    ranks: Ranks


def title(activity: Activity) -> str:
    """A short name, such as "forward 12" or "wait for feedback of 10"."""
    match activity.kind:
        case "plan_wait":
            return f"wait for plan {activity.of}"
        case "feedback_wait":
            return f"wait for feedback of {activity.of}"
        case "activation_wait":
            return f"wait for activations of {activity.of}"
        case "send_wait":
            return f"wait for sending of {activity.of}"
    return f"{activity.kind} {activity.of}"


def _busy_since(timeline: Timeline) -> float | None:
    """Since when the stage has been at work; None while it waits, or has not begun."""
    if not timeline.activities:
        return None
    newest = timeline.activities[-1]
    if newest.ended is not None:
        # In between: it prepares what comes next.
        return newest.ended
    return None if newest.kind.endswith("_wait") else newest.began


def _stall_error(scene: Scene, still_s: float) -> StallError:
    """One line that names whoever holds up the others first; the time lines are its notes."""
    ranks = range(scene.ranks.count)
    told = sorted((_guilt(scene, rank), rank) for rank in ranks)
    error = StallError(
        f"the pipeline stood still for {still_s:.1f} s at step {scene.due}: "
        f"{'; '.join(_told(scene, rank) for _, rank in told)} "
        "(if a step may take that long, raise --stall-timeout)"
    )
    for rank in ranks:
        error.add_note("\n".join(_lines(scene, rank)))
    return error


def _guilt(scene: Scene, rank: int) -> int:
    """Smaller for stages that rather hold up the others than wait for them."""
    timeline = scene.timelines.get(rank)
    if timeline is None:
        return 0
    if _busy_since(timeline) is not None:
        return 1
    newest = timeline.activities[-1] if timeline.activities else None
    if newest is not None and newest.kind == "plan_wait":
        return 2 if newest.of <= scene.newest else 4
    return 3


def _told(scene: Scene, rank: int) -> str:
    """What one rank does and for how long, and whom it waits for."""
    timeline, name = scene.timelines.get(rank), scene.ranks.name(rank)
    if timeline is None:
        silent_s = scene.now - scene.signs_of_life[rank]
        return f"{name} has given no sign of life for {silent_s:.1f} s"
    if not timeline.activities:
        return f"{name} has not begun"
    newest = timeline.activities[-1]
    if newest.ended is not None:
        between_s = scene.now - newest.ended
        return f"{name} has done nothing since {title(newest)}, for {between_s:.1f} s"
    seconds = f"{scene.now - newest.began:.1f} s"
    waits = f"{name} has waited {seconds} for"
    # The same shard of the first stage, the last, and those next to this one.
    ranks, shards = scene.ranks, scene.ranks.num_shards
    first = ranks.shard_of(rank)
    last = ranks.number(ranks.num_stages - 1, first)
    match newest.kind:
        case "plan_wait" if newest.of <= scene.newest:
            return f"{waits} plan {newest.of} from the engine, which was sent and so is lost"
        case "plan_wait":
            return f"{waits} the next plan ({newest.of}) from the engine"
        case "feedback_wait":
            return f"{waits} the token feedback of step {newest.of} from {ranks.name(last)}"
        case "activation_wait":
            return f"{waits} the activations of step {newest.of} from {ranks.name(rank - shards)}"
        case "send_wait" if rank == last:
            return f"{waits} {ranks.name(first)} to take the token feedback of step {newest.of}"
        case "send_wait":
            return (
                f"{waits} {ranks.name(rank + shards)} to take the activations of step {newest.of}"
            )
    return f"{name} has been in {newest.kind} of step {newest.step} for {seconds}"


def _lines(scene: Scene, rank: int) -> Iterable[str]:
    """A rank's time line for people, the newest activity last."""
    timeline, name = scene.timelines.get(rank), scene.ranks.name(rank)
    if timeline is None:
        silent_s = scene.now - scene.signs_of_life[rank]
        yield f"{name} does not answer; its last sign of life was {silent_s:.1f} s ago"
        return
    yield f"{name}, seconds before now:"
    for activity in timeline.activities[-LINES_SHOWN:]:
        began = f"{activity.began - scene.now:.3f}"
        ended = "now" if activity.ended is None else f"{activity.ended - scene.now:.3f}"
        yield f"  {began:>10} to {ended:>8}  {title(activity)}, at step {activity.step}"
