"""Stages' time lines in the Chrome trace event format, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.engine.stall import title
from headrace.protocol.messages import Activity, Timeline
from headrace.protocol.ranks import Ranks

# Reserved colour names, which are all that "cname" may be, from tracing/base/color_scheme.html in
# github.com/catapult-project/catapult: well apart from each other, one for each microbatch in turn.
_MICROBATCH_COLOURS = (
    "thread_state_running",
    "thread_state_iowait",
    "thread_state_runnable",
    "rail_animation",
    "detailed_memory_dump",
    "olive",
    "cq_build_passed",
    "thread_state_uninterruptible",
)
_WAIT_COLOUR = "grey"


def write_trace(file: Path, timelines: Iterable[Timeline], title: str, ranks: Ranks) -> None:
    """Write what trace_events() makes of the time lines. Raises OSError if that fails.

    title: what ran, such as that it was synthetic.
    """
    trace = {
        "traceEvents": trace_events(timelines, ranks),
        "displayTimeUnit": "ms",
        "otherData": {"title": title},
    }
    with file.open("w", encoding="utf-8") as out:
        json.dump(trace, out, separators=(",", ":"))


def trace_events(timelines: Iterable[Timeline], ranks: Ranks) -> list[dict[str, Any]]:
    """One row a rank; an event for each activity, in microseconds since the earliest one.

    The format is described in the "Trace Event Format" document of the catapult project. Work has
    its microbatch's colour, waits are grey. Perfetto does not look at colours in the file (its
    issues 208 and 620) but colours by name, digits left out: so the microbatch is in the name of
    work as a letter.
    """
    lines = list(timelines)
    origin = min((a.began for line in lines for a in line.activities), default=0.0)
    events = []
    for line in lines:
        row = {"pid": 0, "tid": line.rank}
        events.append(
            {**row, "ph": "M", "name": "thread_name", "args": {"name": ranks.name(line.rank)}}
        )
        events.append(
            {**row, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": line.rank}}
        )
        events += [{**row, **_event(activity, origin, line.now)} for activity in line.activities]
    return events


def _event(activity: Activity, origin: float, now: float) -> dict[str, Any]:
    # Whole nanoseconds: what ends when the next begins must do so after rounding, too.
    began = round((activity.began - origin) * 1e9)
    ended = round(((now if activity.ended is None else activity.ended) - origin) * 1e9)
    waits = activity.kind.endswith("_wait")
    name = title(activity)
    return {
        "ph": "X",
        "name": name if waits else f"{name} [{_letters(activity.microbatch)}]",
        "cat": "wait" if waits else "work",
        "cname": _WAIT_COLOUR if waits else _colour(activity.microbatch),
        "ts": began / 1000,
        "dur": (ended - began) / 1000,
        "args": {
            "step": activity.step,
            "microbatch": activity.microbatch,
            "what": activity.kind,
            "of": activity.of,
        },
    }


def _colour(microbatch: int) -> str:
    return _MICROBATCH_COLOURS[microbatch % len(_MICROBATCH_COLOURS)]


def _letters(microbatch: int) -> str:
    """a, b, ... z, aa, ab, ... for 0, 1, ... 25, 26, 27, ..."""
    text = ""
    while microbatch >= 0:
        microbatch, letter = divmod(microbatch, 26)
        text = chr(ord("a") + letter) + text
        microbatch -= 1
    return text
