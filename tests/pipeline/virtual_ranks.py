"""Runs link scenarios on virtual links: all ranks in one process, in virtual time."""

from functools import partial
from typing import Any

import torch

from headrace.pipeline.links import LinkError
from headrace.protocol.messages import LinkEmulation
from headrace.protocol.ranks import Ranks
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork, VirtualTransfer
from pipeline.link_scenarios import ALL, Die, Meet, Pause, Rank, Scenario, Wait


def run_virtual_world(name: str, world: int, emulation: LinkEmulation) -> None:
    """Raises what a rank's scenario raises; AssertionError if one never ends."""
    clock = VirtualClock()
    network = VirtualNetwork(
        clock, Ranks(world), lambda channel: emulation.latency_s, emulation.bytes_per_s
    )
    meeting: list[_Player] = []
    players = []
    for number in range(world):
        links = network.links(number)
        rank = Rank(number, links, torch.device("cpu"), lambda: clock.now, emulation, False)
        players.append(_Player(ALL[name](rank), number, clock, network, meeting, world))
    for player in players:
        clock.schedule(0.0, player.go_on)
    while clock.run_next():
        pass
    stuck = [player.number for player in players if not player.ended]
    assert not stuck, f"ranks {stuck} wait for ever"


class _Player:
    def __init__(
        self,
        scenario: Scenario,
        number: int,
        clock: VirtualClock,
        network: VirtualNetwork,
        meeting: "list[_Player]",
        world: int,
    ) -> None:
        self.number, self.ended = number, False
        self._scenario, self._clock, self._network = scenario, clock, network
        self._meeting, self._world = meeting, world

    def go_on(self, value: Any = None, error: LinkError | None = None) -> None:
        """Resume the scenario; it is called again when what it yields has happened."""
        try:
            step = self._scenario.send(value) if error is None else self._scenario.throw(error)
        except StopIteration:
            self.ended = True
            return
        match step:
            case Wait(handle, timeout_s):
                assert isinstance(handle, VirtualTransfer)
                if handle.over:
                    self._clock.schedule(0.0, partial(self._waited, handle))
                else:
                    handle.watch(timeout_s, partial(self._waited, handle))
            case Pause(seconds):
                self._clock.schedule(seconds, self.go_on)
            case Meet():
                self._meeting.append(self)
                if len(self._meeting) == self._world:
                    for player in self._meeting:
                        self._clock.schedule(0.0, player.go_on)
                    self._meeting.clear()
            case Die():
                self._network.kill(self.number)
                self.ended = True

    def _waited(self, handle: VirtualTransfer) -> None:
        try:
            at = handle.wait(0.0)
        except LinkError as error:
            self.go_on(error=error)
        else:
            self.go_on(at)
