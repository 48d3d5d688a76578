import importlib.util
from pathlib import Path

import pytest

from headrace.bench.plot import Panel, check_matplotlib, draw
from headrace.errors import UsageError
from headrace.protocol.messages import Activity, ActivityKind, Timeline
from headrace.protocol.ranks import Ranks

STEP_S, STEPS = 0.01, 30


def timelines(*, blocking: bool, stages: int = 2) -> list[Timeline]:
    """Stages that take as long for each step, with a microbatch each. The last step goes on."""
    every = STEP_S * (stages if blocking else 1)
    lines = []
    for stage in range(stages):
        free_at, activities = 0.0, []
        for step in range(STEPS):
            began = step * every + stage * STEP_S
            kind: ActivityKind = "activation_wait" if stage else "feedback_wait"
            own = (step, step % stages, step)
            activities += [
                Activity(kind, *own, free_at, began),
                Activity("forward", *own, began, began + 0.9 * STEP_S),
                Activity("sample", *own, began + 0.9 * STEP_S, began + STEP_S),
            ]
            free_at = began + STEP_S
        activities.append(Activity("plan_wait", STEPS, -1, STEPS, free_at, None))
        lines.append(Timeline(stage, 10.0, activities))
    return lines


@pytest.mark.parametrize("first_step", [STEPS // 2, STEPS - 3])
def test_time_lines_become_a_png_of_some_thousand_pixels(tmp_path: Path, first_step: int) -> None:
    file = tmp_path / "picture.png"
    panels = [
        Panel("blocking", timelines(blocking=True), first_step),
        Panel("deferred", timelines(blocking=False), first_step),
    ]
    draw(file, "made up", panels, Ranks(2))
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert 900 <= width <= 1100
    assert 200 <= height <= 800


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"--plot needs matplotlib: pip install 'headrace\[plot\]'"
    ):
        check_matplotlib()
