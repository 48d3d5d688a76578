import logging

import pytest

from headrace.engine.stall import LINES_SHOWN, Scene, StallWatch, title
from headrace.errors import StallError
from headrace.protocol.messages import Activity, ActivityKind, Timeline
from headrace.protocol.ranks import Ranks

NOW = 1000.0


def going(stage: int, kind: ActivityKind, of: int, seconds: float) -> Timeline:
    """A stage that has done this for so long."""
    before = Activity("forward", of - 1, 0, of - 1, 0.0, NOW - seconds)
    return Timeline(stage, NOW, [before, Activity(kind, of, 0, of, NOW - seconds, None)])


def scene(*timelines: Timeline, stages: int = 3) -> Scene:
    """Step 7 is due, steps up to 9 were planned; who does not answer was heard 61 s ago."""
    return Scene(
        NOW, 7, 9, [NOW - 61.0] * stages, {line.rank: line for line in timelines}, Ranks(stages)
    )


def measured(stage: int, step: int) -> bool:
    """Nothing is new."""
    return False


def watch(timeout_s: float = 60.0) -> StallWatch:
    target = StallWatch(timeout_s)
    target.runs(NOW - timeout_s)
    target.progress(NOW - timeout_s)
    return target


def stall(target: StallWatch, seen: Scene, predicted_s: float = 0.0) -> StallError:
    with pytest.raises(StallError) as caught:
        target.look(seen, predicted_s, measured)
    assert "\n" not in str(caught.value)
    return caught.value


def test_it_is_time_to_look_once_nothing_came_for_the_timeout() -> None:
    target = StallWatch(60.0)
    target.progress(1.0)
    assert not target.due(60.9)
    assert target.due(61.0)


def test_the_line_begins_with_the_silent_stage_and_tells_every_wait() -> None:
    seen = scene(going(0, "feedback_wait", 6, 60.2), going(2, "activation_wait", 7, 60.1))
    assert str(stall(watch(), seen)) == (
        "the pipeline stood still for 60.0 s at step 7: "
        "stage 1 has given no sign of life for 61.0 s; "
        "stage 0 has waited 60.2 s for the token feedback of step 6 from stage 2; "
        "stage 2 has waited 60.1 s for the activations of step 7 from stage 1 "
        "(if a step may take that long, raise --stall-timeout)"
    )


def test_the_notes_have_the_last_lines_of_who_answers_and_the_last_sign_of_who_does_not() -> None:
    done = [Activity("forward", n, 0, n, NOW - 70 + n, NOW - 69.5 + n) for n in range(20)]
    wait = Activity("feedback_wait", 20, 1, 18, NOW - 30.25, None)
    notes = stall(watch(), scene(Timeline(0, NOW, [*done, wait]), stages=2)).__notes__
    first, *lines = notes[0].splitlines()
    assert first == "stage 0, seconds before now:"
    assert len(lines) == LINES_SHOWN
    assert lines[-2].split() == ["-51.000", "to", "-50.500", "forward", "19,", "at", "step", "19"]
    assert lines[-1].split(maxsplit=3) == [
        "-30.250", "to", "now", "wait for feedback of 18, at step 20",
    ]  # fmt: skip
    assert notes[1] == "stage 1 does not answer; its last sign of life was 61.0 s ago"


@pytest.mark.parametrize("kind", ["forward", "sample", "send"])
def test_a_stage_at_work_puts_the_next_look_off_until_its_patience_ends(kind: ActivityKind) -> None:
    target = watch(timeout_s=2.0)
    target.look(scene(going(0, "feedback_wait", 6, 9.0), going(1, kind, 7, 9.0)), 0.1, measured)
    # Ten seconds, more than the timeout and than twenty times what was predicted.
    assert not target.due(NOW + 0.9)
    assert target.due(NOW + 1.0)


@pytest.mark.parametrize(
    ("timeout_s", "predicted_s", "patience_s"), [(60.0, 1.0, 60.0), (2.0, 3.0, 60.0)]
)
def test_patience_is_the_timeout_or_twenty_times_the_prediction(
    timeout_s: float, predicted_s: float, patience_s: float
) -> None:
    target = watch(timeout_s)
    target.look(scene(going(1, "forward", 7, patience_s - 1.0)), predicted_s, measured)
    assert target.due(NOW + 1.0)
    assert not target.due(NOW + 0.5)


def test_a_stage_that_computes_for_ever_is_an_error_that_says_so() -> None:
    seen = scene(going(1, "forward", 7, 60.0), going(0, "feedback_wait", 6, 59.0), stages=2)
    line = str(stall(watch(), seen))
    assert "step 7: stage 1 has been in forward of step 7 for 60.0 s; stage 0 has waited" in line


def test_a_stage_at_work_that_was_never_measured_is_waited_for_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = watch()
    seen = scene(going(0, "feedback_wait", 6, 500.0), going(1, "forward", 7, 500.0), stages=2)
    with caplog.at_level(logging.WARNING):
        target.look(seen, 0.1, lambda stage, step: (stage, step) == (1, 7))
    (line,) = caplog.messages
    assert line.startswith("stage 1 has computed step 7 for 500 s: it is the first of its kind")
    assert not target.due(NOW + 59.9)
    assert target.due(NOW + 60.0)
    # Another one that was measured is judged all the same.
    stall(target, scene(going(0, "forward", 6, 61.0), going(1, "forward", 7, 500.0), stages=2))


def test_one_that_only_waits_is_no_better_for_never_having_been_measured() -> None:
    seen = scene(going(0, "feedback_wait", 6, 61.0), going(1, "activation_wait", 7, 61.0), stages=2)
    with pytest.raises(StallError):
        watch().look(seen, 0.1, lambda stage, step: True)


def test_time_in_which_the_engine_did_not_run_is_not_waiting() -> None:
    target = StallWatch(60.0)
    target.runs(0.0)
    target.progress(0.0)
    # Thirty seconds of waiting, then an hour's pause in the middle of a wait, and then the rest.
    for second in range(1, 31):
        target.runs(float(second), 1.0)
    target.runs(3631.0, 1.0)
    for second in range(3632, 3660):
        target.runs(float(second), 1.0)
        assert not target.due(second)
    target.runs(3661.0, 1.0)
    assert target.due(3661.0)


def test_nor_is_time_in_which_it_did_something_else() -> None:
    target = StallWatch(60.0)
    target.runs(0.0)
    target.progress(0.0)
    target.runs(500.0)
    target.runs(501.0, 1.0)
    assert not target.due(501.0)


def test_a_stage_that_was_paused_at_work_has_not_worked_meanwhile() -> None:
    target = StallWatch(60.0)
    target.runs(NOW - 630.0)
    target.progress(NOW - 630.0)
    target.runs(NOW - 10.0, 10.0)
    target.runs(NOW, 10.0)
    # Since before the pause of 610 seconds.
    target.look(scene(going(0, "forward", 7, 620.0), stages=1), 0.1, measured)
    assert not target.due(NOW + 49.0)
    assert target.due(NOW + 50.0)


def test_one_stage_beyond_its_patience_is_enough_while_another_computes_on() -> None:
    seen = scene(going(0, "forward", 8, 1.0), going(1, "forward", 7, 61.0), stages=2)
    stall(watch(), seen)


def test_a_stage_between_two_activities_is_at_work() -> None:
    def after(seconds: float) -> Scene:
        ended = Activity("activation_wait", 7, 0, 7, NOW - 99.0, NOW - seconds)
        return scene(Timeline(0, NOW, [ended]), stages=1)

    target = watch()
    target.look(after(59.0), 0.0, measured)
    assert not target.due(NOW)
    line = str(stall(target, after(60.0)))
    assert "stage 0 has done nothing since wait for activations of 7, for 60.0 s" in line


def test_a_lost_plan_is_told_from_one_that_was_not_sent() -> None:
    seen = scene(
        going(0, "plan_wait", 10, 60.0),
        going(1, "activation_wait", 9, 60.0),
        going(2, "plan_wait", 9, 60.0),
    )
    line = str(stall(watch(), seen))
    assert "step 7: stage 2 has waited 60.0 s for plan 9 from the engine, which was sent" in line
    assert line.split(";")[2].startswith(" stage 0 has waited 60.0 s for the next plan (10)")


def test_a_send_that_nobody_takes_names_the_receiver() -> None:
    seen = scene(going(0, "send_wait", 3, 60.0), going(1, "send_wait", 4, 60.0), stages=2)
    line = str(stall(watch(), seen))
    assert "stage 0 has waited 60.0 s for stage 1 to take the activations of step 3" in line
    assert "stage 1 has waited 60.0 s for stage 0 to take the token feedback of step 4" in line


def test_a_stage_that_never_began_is_told() -> None:
    assert "stage 0 has not begun" in str(stall(watch(), scene(Timeline(0, NOW, []), stages=1)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("forward", "forward 12"),
        ("send", "send 12"),
        ("plan_wait", "wait for plan 12"),
        ("feedback_wait", "wait for feedback of 12"),
        ("activation_wait", "wait for activations of 12"),
        ("send_wait", "wait for sending of 12"),
    ],
)
def test_activities_have_short_names(kind: ActivityKind, name: str) -> None:
    assert title(Activity(kind, 13, 0, 12, 0.0, 1.0)) == name
