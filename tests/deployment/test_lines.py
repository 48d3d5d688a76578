"""The lines of several hosts, one after another; here all hosts are this one."""

import queue
import threading
from itertools import permutations

import pytest
from msgspec.structs import replace

from headrace.deployment.lines import measure_lines
from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.host.network import Interface
from headrace.pipeline import line
from headrace.pipeline.line import take_part
from headrace.protocol.cluster import AnswerLine, LineOpen, MeasureLine, ToldOfLine
from machines import FOUR_CORES, speed

EVERYBODY = [
    replace(FOUR_CORES, name=name, address="127.0.0.1", speed=speed(1))
    for name in ("ada", "bob", "eve")
]
HERE = Interface("lo", "127.0.0.1")
SECRET = Secret(b"\3" * 32)


class OtherHosts:
    """Those beside this one, each a thread for each order. behind: the host whose ports a firewall
    keeps shut. gone: one that says nothing and is not there."""

    def __init__(self, behind: int | None = None, gone: int | None = None) -> None:
        self._behind, self._gone = behind, gone
        self._told: dict[int, queue.SimpleQueue[ToldOfLine]] = {
            node: queue.SimpleQueue() for node in (1, 2)
        }

    def order_line(
        self, node: int, order: AnswerLine | MeasureLine
    ) -> "queue.SimpleQueue[ToldOfLine]":
        if node != self._gone:
            threading.Thread(target=self._obey, args=(node, order), daemon=True).start()
        return self._told[node]

    def is_there(self, node: int) -> bool:
        return node != self._gone

    def _obey(self, node: int, order: AnswerLine | MeasureLine) -> None:
        for told in take_part(order, "127.0.0.1", f"interface eth{node}, 10.0.0.{node}"):
            if node == self._behind and isinstance(told, LineOpen):
                # Nobody listens there.
                told = LineOpen("tcp://127.0.0.1:9", told.interface)
            self._told[node].put(told)


def measure(hosts: OtherHosts, checks: list[None] | None = None) -> object:
    checks = [] if checks is None else checks
    return measure_lines(
        hosts,
        EVERYBODY,
        HERE,
        SECRET,
        True,
        lambda: checks.append(None),
    )


def test_every_line_is_measured_both_ways_and_the_start_can_be_ended_meanwhile() -> None:
    checks: list[None] = []
    found = measure(OtherHosts(), checks)
    assert isinstance(found, dict)
    assert list(found) == list(permutations(range(3), 2))
    assert all(figures.bytes_per_s > 0 for figures in found.values())
    assert len(checks) >= len(found)


def test_a_line_that_cannot_be_opened_names_both_hosts_and_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "CONNECT_S", 0.3)
    with pytest.raises(StartError) as told:
        measure(OtherHosts(behind=2))
    assert str(told.value) == (
        "host ada (127.0.0.1) could not connect to tcp://127.0.0.1:9 from interface lo, 127.0.0.1 "
        "within 0.3 s; there, host eve (127.0.0.1) listens on interface eth2, 10.0.0.2: let these "
        "two reach each other on all TCP ports above 1023 in their firewalls, or choose other "
        "interfaces (--interface)"
    )


def test_a_host_that_goes_away_meanwhile_is_named() -> None:
    with pytest.raises(StartError, match=r"host bob .* was gone when its lines"):
        measure(OtherHosts(gone=1))


def test_what_is_asked_meanwhile_may_end_it() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_lines(OtherHosts(), EVERYBODY, HERE, SECRET, True, check)
