"""What is shown while stages load, where there is no terminal."""

from types import SimpleNamespace

import pytest

from headrace.progress import loading_display
from headrace.protocol.messages import Loading
from headrace.protocol.ranks import Ranks


def test_a_phase_has_a_line_when_it_is_over_and_others_only_if_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [
        (100.0, Loading(1, "weights received", 0.0)),
        (109.0, Loading(1, "weights received", 0.2)),
        (111.0, Loading(1, "weights received", 0.25)),
        (112.0, Loading(0, "weights loaded", 0.5)),
        (120.0, Loading(1, "weights received", 0.4)),
        (121.0, Loading(0, "weights loaded", 1.0)),
        (122.0, Loading(1, "weights received", 1.0)),
    ]
    moments = iter(at for at, _ in told)
    clock = SimpleNamespace(monotonic=lambda: next(moments))
    # Its own alone: other threads look at the clock, too.
    monkeypatch.setattr("headrace.progress.time", clock)
    with loading_display(Ranks(2)) as show:
        for _, message in told:
            show(message)
    assert capsys.readouterr().err.splitlines() == [
        "stage 1: 25% of weights received",
        "stage 0: weights loaded",
        "stage 1: weights received",
    ]
