import tempfile
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.timeline import RING_SIZE, RankTimeline, peak_memory
from headrace.pipeline.watch import Watch, answer_when_asked, ask, connect_watch, on_clock_of_asker
from headrace.protocol.messages import Activity, ActivityKind, Timeline
from headrace.protocol.plan import Plan


def timeline() -> RankTimeline:
    return RankTimeline(epoch=0, rank=1, memory=lambda: 7)


def plan(step: int, microbatch: int = 0, epoch: int = 0) -> Plan:
    return Plan(epoch, step, microbatch, [], [], [], [])


def record(target: RankTimeline, kind: ActivityKind, of: int, began: float, ended: float) -> None:
    target.begin(kind, of, began)
    target.end(ended)


def test_activities_know_their_step_its_microbatch_and_the_step_they_are_about() -> None:
    target = timeline()
    record(target, "plan_wait", 0, 1.0, 2.0)
    target.planned(plan(0, microbatch=5))
    target.planned(plan(1, microbatch=6, epoch=9))
    target.planned(plan(1, microbatch=4))
    record(target, "forward", 0, 2.0, 3.0)
    target.finish(3.0)
    record(target, "feedback_wait", 0, 3.0, 3.5)
    assert target.show(10, 4.0) == Timeline(
        1,
        4.0,
        [
            Activity("plan_wait", 0, -1, 0, 1.0, 2.0),
            Activity("forward", 0, 5, 0, 2.0, 3.0),
            Activity("feedback_wait", 1, 4, 0, 3.0, 3.5),
        ],
    )


def test_what_goes_on_is_shown_without_an_end_and_once_it_ended_with_one() -> None:
    target = timeline()
    record(target, "plan_wait", 0, 1.0, 2.0)
    target.begin("forward", 0, 2.0)
    assert target.show(1, 2.5).activities == [Activity("forward", 0, -1, 0, 2.0, None)]
    target.end(3.0)
    assert target.show(1, 3.5).activities == [Activity("forward", 0, -1, 0, 2.0, 3.0)]
    assert target.show(0, 3.5).activities == []


def test_the_report_adds_up_the_step_and_then_starts_anew() -> None:
    target = timeline()
    target.planned(plan(0))
    target.planned(plan(1))
    record(target, "plan_wait", 0, 1.0, 2.0)
    record(target, "activation_wait", 0, 2.0, 2.5)
    target.arrived(0, 2.25)
    record(target, "forward", 0, 2.5, 3.0)
    record(target, "forward", 0, 3.0, 3.25)
    record(target, "sample", 0, 3.25, 3.5)
    record(target, "send_wait", 0, 3.5, 3.625)
    record(target, "send", 0, 3.625, 3.75)
    report = target.finish(4.0)
    assert (report.epoch, report.step, report.rank) == (0, 0, 1)
    assert (report.began, report.ended) == (2.0, 4.0)
    assert (report.plan_wait_s, report.feedback_wait_s, report.activation_wait_s) == (1.0, 0.0, 0.5)
    assert (report.forward_s, report.sample_s, report.send_wait_s) == (0.75, 0.25, 0.125)
    assert (report.sent_at, report.arrivals, report.peak_memory_bytes) == (3.625, [(0, 2.25)], 7)
    empty = target.finish(5.0)
    assert (empty.step, empty.began, empty.ended, empty.sent_at) == (1, 5.0, 5.0, None)
    assert (empty.forward_s, empty.arrivals) == (0.0, [])


def test_the_memory_is_not_read_at_every_step() -> None:
    reads = iter([99, 100])
    target = RankTimeline(0, 0, memory=lambda: next(reads))
    for step in range(5):
        target.planned(plan(step))
    peaks = [target.finish(at).peak_memory_bytes for at in (0.0, 0.01, 0.09, 0.1, 0.11)]
    assert peaks == [99, 99, 99, 100, 100]
    assert peak_memory() > 0


def test_the_newest_activities_are_kept_and_the_oldest_make_room() -> None:
    target = timeline()
    for n in range(RING_SIZE + 10):
        record(target, "forward", n, float(n), n + 0.5)
    kept = [activity.of for activity in target.show(2 * RING_SIZE, 0.0).activities]
    assert kept == list(range(10, RING_SIZE + 10))
    assert [activity.of for activity in target.show(2, 0.0).activities] == kept[-2:]


def test_a_reader_in_another_thread_sees_every_activity_once_and_in_order() -> None:
    target = timeline()
    ended = threading.Event()
    seen: list[Timeline] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(target.show(50, 0.0))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(20_000):
        record(target, "forward", n, float(n), n + 0.5)
    ended.set()
    reader.join()
    for shown in seen:
        numbers = [activity.of for activity in shown.activities]
        assert numbers == sorted(set(numbers))
    assert seen


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield f"ipc://{folder}/watch"


def test_a_stage_answers_also_while_it_computes(address: str) -> None:
    target = timeline()
    record(target, "plan_wait", 0, 1.0, 2.0)
    target.begin("forward", 0, 2.0)
    with zmq.Context() as ours, zmq.Context() as theirs:
        # The stage may come later than the question.
        socket = connect_watch(ours, address)
        answer_when_asked(theirs, address, Watch(target))
        (answer,) = ask([socket], 8, 60.0)
        assert [activity.kind for activity in answer.activities] == ["plan_wait", "forward"]
        assert answer.now <= time.monotonic()
        # The thread ends with the context of the stage.
        theirs.term()
        assert ask([socket], 8, 0.01) == []
        socket.close()


def test_an_answer_that_came_too_late_is_not_taken_for_that_of_the_next_question(
    address: str,
) -> None:
    with zmq.Context() as ours, zmq.Context() as theirs:
        socket = connect_watch(ours, address)
        assert ask([socket], 1, 0.01) == []
        # Now the stage is there, and has both questions to answer.
        target = timeline()
        record(target, "forward", 0, 0.0, 1.0)
        record(target, "forward", 1, 1.0, 2.0)
        answer_when_asked(theirs, address, Watch(target))
        (answer,) = ask([socket], 2, 60.0)
        assert len(answer.activities) == 2
        socket.close()
        theirs.term()


ACTIVITY = Activity("forward", 0, 0, 0, 99.0, None)


@given(now=st.floats(5.0, 7.0))
def test_a_stage_whose_clock_may_be_ours_is_not_moved(now: float) -> None:
    shown = Timeline(0, now, [ACTIVITY])
    assert on_clock_of_asker(shown, 5.0, 7.0) is shown


def test_another_hosts_moments_are_moved_to_our_clock() -> None:
    shown = Timeline(0, 100.0, [Activity("send", 0, 0, 0, 98.0, 99.0), ACTIVITY])
    moved = on_clock_of_asker(shown, 5.0, 7.0)
    assert moved.now == 6.0
    assert [(a.began, a.ended) for a in moved.activities] == [(4.0, 5.0), (5.0, None)]
