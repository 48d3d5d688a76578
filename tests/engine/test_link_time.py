import random

import pytest

from headrace.engine.link_time import LinkTime
from headrace.protocol.messages import Report
from headrace.protocol.ranks import Ranks


def report(
    stage: int, step: int, sent_at: float | None, arrivals: list[tuple[int, float]]
) -> Report:
    return Report(0, step, stage, 0, 0, 0, 0, 0, 0, 0, 0, sent_at, arrivals, 0)


def way(step: int, link_s: float, num_stages: int, busy_s: float = 0.02) -> list[Report]:
    """Reports on one step; every stage's clock starts at a moment of its own."""
    clocks = [1000.0 * stage for stage in range(num_stages)]
    reports = [report(0, step, clocks[0] + 1.0, [])]
    at = 1.0
    for stage in range(1, num_stages):
        arrived, sent = at + link_s, at + link_s + busy_s
        clock = clocks[stage]
        reports.append(report(stage, step, clock + sent, [(step, clock + arrived)]))
        at = sent
    # The first stage notices the feedback in a later step.
    return [*reports, report(0, step + 2, None, [(step, clocks[0] + at + link_s)])]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_it_is_found_without_comparing_clocks(num_stages: int) -> None:
    times = LinkTime(Ranks(num_stages), window=6)
    for step in range(5):
        for one in way(step, 0.025, num_stages):
            times.add(one)
    assert times.seconds == pytest.approx(0.025)


def test_reports_may_come_in_any_order() -> None:
    times = LinkTime(Ranks(3), window=6)
    reports = [one for step in range(8) for one in way(step, 0.01, 3)]
    random.Random(1).shuffle(reports)
    for one in reports:
        times.add(one)
    assert times.seconds == pytest.approx(0.01)


def test_it_follows_the_link_up_and_down() -> None:
    times = LinkTime(Ranks(2), window=6)
    for step in range(120):
        link_s = 0.05 if 40 <= step < 80 else 0.001
        for one in way(step, link_s, 2):
            times.add(one)
        if step == 79:
            assert times.seconds == pytest.approx(0.05)
    assert times.seconds == pytest.approx(0.001)


def test_a_few_late_messages_do_not_count() -> None:
    times = LinkTime(Ranks(2), window=6)
    for step in range(40):
        for one in way(step, 0.5 if step % 5 == 0 else 0.002, 2):
            times.add(one)
    assert times.seconds == pytest.approx(0.002)


def test_steps_without_feedback_are_forgotten() -> None:
    times = LinkTime(Ranks(2), window=3)
    for step in range(1000):
        times.add(report(0, step, 1.0, []))
        times.add(report(1, step, None, [(step, 1.0)]))
    assert times.seconds == 0.0
    assert len(times._ways) <= 4 * 3


def test_a_single_stage_has_no_links() -> None:
    times = LinkTime(Ranks(1), window=3)
    times.add(report(0, 0, None, []))
    assert times.seconds == 0.0
