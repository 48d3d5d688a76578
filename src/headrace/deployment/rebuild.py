"""Starts a pipeline's ranks anew, epoch by epoch, on the hosts that are there.

A host that is away is waited for as long as --join-timeout says. Then the others take its layers,
if they have the memory; else it is waited for on. Once it is back it runs stages again when the
next epoch begins.
"""

import logging
import sys
import time
from collections.abc import Set
from dataclasses import dataclass, field

from headrace.deployment.around import plan_around
from headrace.deployment.hosts import HostMeeting
from headrace.deployment.plan_table import print_plan
from headrace.deployment.rank_setup import rank_configs, reserve_cache, step_priors
from headrace.deployment.resolve import Deployment
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, StartError
from headrace.pipeline.launch import RankProcesses
from headrace.protocol.messages import Loaded

_log = logging.getLogger(__name__)


@dataclass
class Rebuild:
    """Starts the ranks of one engine anew.

    deployment: the newest. meeting: of the hosts, None where there is one. num_blocks: of the
    cache; None while ranks load that were placed anew. patience_s: for which a host is waited for,
    and then between two tries to do without it.
    """

    engine: Engine
    processes: RankProcesses
    deployment: Deployment
    meeting: HostMeeting | None
    num_blocks: int | None
    patience_s: float = field(init=False)
    _epoch: int = field(default=0, init=False)
    # The placement to go back to if the caches do not fit the new one.
    _before: Deployment | None = field(default=None, init=False)
    _told_of: set[int] = field(default_factory=set, init=False)
    # With which hosts, and when, it was last tried to do without the others.
    _tried: tuple[Set[int], float] = field(default=(frozenset(), 0.0), init=False)

    def __post_init__(self) -> None:
        self.patience_s = self.deployment.config.join_timeout

    def begin(self, epoch: int) -> None:
        """Begin the epoch of this number; look() furthers it."""
        self._epoch = epoch
        self._told_of.clear()
        if self.meeting is not None:
            back = self._there - self._used
            if back and self._used <= self._there:
                self._take_back(back)
        self._restart()

    def look(self, timeout_s: float) -> bool:
        """Further it, for timeout_s at most; whether every rank is ready. Raises StartError if
        nobody gets on though all hosts are there, and what a rank reports."""
        if self.meeting is not None:
            self._look_for_hosts(self.meeting)
        if self.num_blocks is None and (loaded := self.processes.loaded) is not None:
            self._decide_cache(loaded)
        return self.processes.look(timeout_s)

    @property
    def _used(self) -> Set[int]:
        """Hosts that run stages, or are to."""
        return set(self.deployment.hosts)

    @property
    def _there(self) -> Set[int]:
        """Hosts that could run stages now."""
        assert self.meeting is not None
        return set(self.deployment.cluster.computing) - self.meeting.hosts.away().keys()

    def _names(self, nodes: Set[int]) -> str:
        hosts = self.deployment.cluster.hosts
        return " and ".join(f"host {node} ({hosts[node].name})" for node in sorted(nodes))

    def _restart(self) -> None:
        with rank_configs(self.deployment, self._epoch, self.meeting) as configs:
            self.processes.restart(configs, self.num_blocks)

    def _look_for_hosts(self, meeting: HostMeeting) -> None:
        """Wait for hosts that are away, or begin the epoch without them."""
        away = meeting.hosts.away()
        missing = self._used & away.keys()
        if new := missing - self._told_of:
            self._told_of |= new
            _log.warning(
                "away: %s; if not back within %g s (--join-timeout), the other hosts take over "
                "the layers, if they have the memory",
                self._names(new),
                self.patience_s,
            )
        # Each has its time: the one before does not shorten it.
        if not missing or min(away[node] for node in missing) <= self.patience_s:
            return
        left, (tried, tried_at) = self._there, self._tried
        if left == tried and time.monotonic() - tried_at < self.patience_s:
            return
        self._tried = left, time.monotonic()
        try:
            planned = self._planned(left)
        except HeadraceError as error:
            _log.warning("%s; waiting for %s", error, self._names(missing))
            return
        _log.warning(
            "%s did not come back within %g s: the other hosts take over the layers, and all "
            "stages start anew",
            self._names(missing),
            self.patience_s,
        )
        self._move(planned)
        self._restart()

    def _take_back(self, back: Set[int]) -> None:
        """Place the stages on hosts that are back, too, if that can be."""
        try:
            planned = self._planned(self._there)
        except HeadraceError as error:
            _log.warning("%s; doing without %s", error, self._names(back))
            return
        _log.warning("back: %s; all stages start anew", self._names(back))
        self._move(planned)

    def _planned(self, nodes: Set[int]) -> Deployment:
        return plan_around(self.deployment, {node: self.processes.room(node) for node in nodes})

    def _move(self, planned: Deployment) -> None:
        """Have the ranks of the next restart run as planned."""
        print_plan(planned, sys.stderr)
        self._before, self.deployment, self.num_blocks = self.deployment, planned, None
        self.processes.move(list(planned.cpus), planned.hosts)

    def _decide_cache(self, loaded: list[Loaded]) -> None:
        """Of ranks that were placed anew, all of which have loaded."""
        try:
            num_blocks = reserve_cache(self.deployment, self.processes, loaded, self.meeting)
        except StartError as error:
            if self._before is None:
                raise
            _log.warning("%s; the stages go back to where they were", error)
            self._move(self._before)
            self._before = None
            self._restart()
            return
        self.num_blocks, self._before = num_blocks, None
        self.processes.decide_cache(num_blocks)
        self.engine.new_stages(num_blocks, step_priors(self.deployment, loaded))
