"""Lines between hosts, measured: what is found is what they are, in a bounded time."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline import line
from headrace.pipeline.line import figures_by, take_part
from headrace.protocol.cluster import (
    AnswerLine,
    LineFailed,
    LineMeasured,
    LineOpen,
    MeasureLine,
    ToldOfLine,
)

SECRET, OTHER = b"\1" * 32, b"\2" * 32
HERE = "interface lo, 127.0.0.1"


class VirtualLine:
    """Takes a message so long each way, and its bytes so long besides; only until a deadline."""

    def __init__(self, latency_s: float, bytes_per_s: float, deadline: float) -> None:
        self.latency_s, self.bytes_per_s, self.left_s = latency_s, bytes_per_s, deadline

    def round_trip(self, size: int) -> tuple[float, bool]:
        taken_s = 2 * self.latency_s + size / self.bytes_per_s
        answered = taken_s <= self.left_s
        taken_s = min(taken_s, self.left_s)
        self.left_s -= taken_s
        return taken_s, answered


@given(
    latency_s=st.floats(1e-6, 0.3),
    bytes_per_s=st.floats(125e3, 20e9),
)
def test_a_line_is_found_as_it_is_soon(latency_s: float, bytes_per_s: float) -> None:
    virtual = VirtualLine(latency_s, bytes_per_s, 1e9)
    found = figures_by(virtual.round_trip)
    assert found is not None
    small_s = 256 / bytes_per_s
    assert found.latency_s == pytest.approx(latency_s + small_s / 2)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)
    assert 1e9 - virtual.left_s < 1.5 + 75 * latency_s


@given(latency_s=st.floats(1e-6, 1.0), bytes_per_s=st.floats(100.0, 125e3))
def test_on_a_slow_line_bulk_is_cut_short_and_still_tells(
    latency_s: float, bytes_per_s: float
) -> None:
    virtual = VirtualLine(latency_s, bytes_per_s, 10.0)
    found = figures_by(virtual.round_trip)
    assert virtual.left_s >= 0.0
    if found is None:
        assert 2 * latency_s + 256 / bytes_per_s > 10.0
    else:
        assert found.bytes_per_s >= bytes_per_s * 0.95


class Answering:
    """A host that answers, in a thread. said: what it says."""

    def __init__(self, order: AnswerLine) -> None:
        self._parts = take_part(order, "127.0.0.1", HERE)
        self.said: list[ToldOfLine] = [next(self._parts)]
        self._thread = threading.Thread(target=lambda: self.said.extend(self._parts))
        self._thread.start()

    @property
    def address(self) -> str:
        (opened, *_) = self.said
        assert isinstance(opened, LineOpen)
        assert opened.interface == HERE
        return opened.address

    def end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def measured(order: MeasureLine) -> ToldOfLine:
    (told,) = take_part(order, "127.0.0.1", HERE)
    return told


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that do not wait long for what does not come."""
    monkeypatch.setattr(line, "CONNECT_S", 0.5)
    monkeypatch.setattr(line, "MEASURE_S", 0.5)


@pytest.mark.parametrize("encrypted", [True, False])
def test_two_hosts_measure_the_line_between_them(encrypted: bool) -> None:
    answering = Answering(AnswerLine("0 to 1", SECRET, encrypted))
    told = measured(MeasureLine("0 to 1", SECRET, encrypted, answering.address))
    answering.end()
    assert isinstance(told, LineMeasured)
    assert told.figures.latency_s > 0
    assert told.figures.bytes_per_s > 0
    assert len(answering.said) == 1


@pytest.mark.parametrize(
    "wrong", [("0 to 1", OTHER, True), ("1 to 0", SECRET, True), ("0 to 1", SECRET, False)]
)
@pytest.mark.usefixtures("hasty")
def test_who_has_another_key_measures_nothing(wrong: tuple[str, bytes, bool]) -> None:
    answering = Answering(AnswerLine("0 to 1", SECRET, True))
    told = measured(MeasureLine(*wrong, answering.address))
    answering.end()
    assert told == LineFailed(f"could not connect to {answering.address} from {HERE} within 0.5 s")


@pytest.mark.usefixtures("hasty")
def test_a_line_on_which_nothing_comes_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(line, "_answer_all", lambda *_: over.wait(30))
    answering = Answering(AnswerLine("0 to 1", SECRET, True))
    told = measured(MeasureLine("0 to 1", SECRET, True, answering.address))
    over.set()
    answering.end()
    assert told == LineFailed(
        f"connected to {answering.address} from {HERE}, but had no answer within 0.5 s"
    )


@pytest.mark.usefixtures("hasty")
def test_an_address_that_the_host_has_not_is_told() -> None:
    (told,) = take_part(AnswerLine("0 to 1", SECRET, True), "192.0.2.1", HERE)
    assert isinstance(told, LineFailed)
    assert told.reason.startswith("cannot listen on 192.0.2.1:0 for a line from another host")
