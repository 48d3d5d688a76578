"""Draws stages' time lines: blocking above deferred, over the same span of time."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace.protocol.messages import Activity, Timeline
from headrace.protocol.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Steps of the last panel that the span holds.
_STEPS = 10
_COMPUTES = ("forward", "sample")
# Colour-blind safe (Okabe and Ito 2008), light enough for black numbers.
_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2", "#bbbbbb")
_WAITS = {
    "feedback_wait": ("waits for token feedback", "#fbe3e3", "///"),
    "activation_wait": ("waits for activations", "#eeeeee", ""),
    "send_wait": ("waits until a send is complete", "#dddddd", "..."),
}
# As a part of the width: of a bar with room for a number, and of a wait that can be seen.
_NUMBER_WIDTH = 0.012
_WAIT_WIDTH = 0.002


@dataclass(frozen=True)
class Panel:
    """Time lines of all stages of one run, and the step with which the picture begins."""

    title: str
    timelines: list[Timeline]
    first_step: int


@dataclass(frozen=True)
class _Bar:
    """A step on a stage. Times are in seconds of the stages' clock."""

    step: int
    microbatch: int
    began: float
    ended: float


@dataclass(frozen=True)
class _Wait:
    """What a stage waits for, and when."""

    kind: str
    began: float
    ended: float


def check_matplotlib() -> None:
    """Raises UsageError saying what to install if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'headrace[plot]'")


def draw(path: Path, title: str, panels: list[Panel], ranks: Ranks) -> None:
    """Write a PNG some 1,000 pixels wide, with a panel for each run, one above the other.

    All show as much time as ten steps of the last panel take. The stages' clocks must be one, as
    they are on one machine.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_ranks = len(panels[0].timelines)
    figure = Figure(
        figsize=(10, 1.1 + len(panels) * (0.6 + 0.42 * num_ranks)), dpi=100, layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    span = _span(panels[-1])
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, axis in zip(panels, axes, strict=True):
        _draw_panel(axis, panel, span, ranks)
    axes[-1].set_xlabel("ms")
    _add_legend(figure, panels, span)
    figure.savefig(path, format="png")


def _draw_panel(axis: "Axes", panel: Panel, span: float, ranks: Ranks) -> None:
    origin = _origin(panel)
    for row, timeline in enumerate(panel.timelines):
        for wait in _waits(timeline, origin, span):
            _, colour, hatch = _WAITS[wait.kind]
            axis.barh(
                row,
                (wait.ended - wait.began) * 1e3,
                left=(wait.began - origin) * 1e3,
                height=0.8,
                color=colour,
                hatch=hatch,
                edgecolor="#c9a0a0" if hatch else colour,
                linewidth=0,
            )
        for bar in _bars(timeline, origin, span):
            width = bar.ended - bar.began
            axis.barh(
                row,
                width * 1e3,
                left=(bar.began - origin) * 1e3,
                height=0.8,
                color=_colour(bar.microbatch),
                edgecolor="black",
                linewidth=0.5,
            )
            middle = (bar.began + bar.ended) / 2 - origin
            if width > _NUMBER_WIDTH * span and 0 < middle < span:
                axis.text(
                    middle * 1e3, row, str(bar.step), ha="center", va="center", fontsize=8,
                    clip_on=True,
                )  # fmt: skip
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.set_xlim(0, span * 1e3)
    # The first stage on top.
    axis.set_ylim(len(panel.timelines) - 0.5, -0.5)
    axis.set_yticks(
        range(len(panel.timelines)), [ranks.name(timeline.rank) for timeline in panel.timelines]
    )
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _add_legend(figure: "Figure", panels: list[Panel], span: float) -> None:
    from matplotlib.patches import Patch

    microbatches, waits = set(), set()
    for panel in panels:
        origin = _origin(panel)
        for timeline in panel.timelines:
            microbatches |= {bar.microbatch for bar in _bars(timeline, origin, span)}
            waits |= {wait.kind for wait in _waits(timeline, origin, span)}
    # More would be unreadable, and the colours repeat.
    shown = sorted(microbatches)[: len(_COLOURS)]
    handles = [
        Patch(facecolor=_colour(n), edgecolor="black", linewidth=0.5, label=f"microbatch {n}")
        for n in shown
    ]
    handles += [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#c9a0a0", linewidth=0, label=label)
        for kind, (label, colour, hatch) in _WAITS.items()
        if kind in waits
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 6), fontsize=8,
        frameon=False,
    )  # fmt: skip


def _origin(panel: Panel) -> float:
    """When the first stage begins the panel's first step."""
    return next(bar.began for bar in _steps(panel.timelines[0]) if bar.step >= panel.first_step)


def _span(panel: Panel) -> float:
    """Seconds that ten steps take on the first stage, or as many as there are."""
    bars = [bar for bar in _steps(panel.timelines[0]) if bar.step >= panel.first_step][: _STEPS + 1]
    return (bars[-1].began if len(bars) > _STEPS else bars[-1].ended) - bars[0].began


def _bars(timeline: Timeline, origin: float, span: float) -> Iterator[_Bar]:
    """The steps on this stage that the picture shows a part of."""
    for bar in _steps(timeline):
        if bar.ended > origin and bar.began < origin + span:
            yield bar


def _waits(timeline: Timeline, origin: float, span: float) -> Iterator[_Wait]:
    """The stage's waits that can be seen in the picture."""
    for activity in timeline.activities:
        if activity.kind in _WAITS and activity.ended is not None:
            began, ended = max(activity.began, origin), min(activity.ended, origin + span)
            if ended - began > _WAIT_WIDTH * span:
                yield _Wait(activity.kind, began, ended)


def _steps(timeline: Timeline) -> Iterator[_Bar]:
    """Every step that the stage computed, model and sampler in one."""
    parts: list[Activity] = []
    for activity in timeline.activities:
        if activity.kind not in _COMPUTES or activity.ended is None:
            continue
        if parts and parts[0].step != activity.step:
            yield _bar(parts)
            parts = []
        parts.append(activity)
    if parts:
        yield _bar(parts)


def _bar(parts: list[Activity]) -> _Bar:
    ended = parts[-1].ended
    assert ended is not None
    return _Bar(parts[0].step, parts[0].microbatch, parts[0].began, ended)


def _colour(microbatch: int) -> str:
    return _COLOURS[microbatch % len(_COLOURS)]
