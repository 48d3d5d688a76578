"""The first start goes on, too, when somebody else ends or stops a rank in the middle of it."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from headrace.deployment.resolve import Deployment
from headrace.deployment.restart_limit import RestartLimit
from headrace.errors import PipelineError, StallError, StartError
from headrace.host.memory import kills_for_memory
from headrace.protocol.fault import RankFault

_log = logging.getLogger(__name__)
_Ready = TypeVar("_Ready")


class StartingRanks(Protocol):
    """Ranks that start. faults: what the newest error was about."""

    faults: list[RankFault]


def bring_up(
    wait_ready: Callable[[], _Ready],
    restart: Callable[[int], None],
    ranks: StartingRanks,
    limit: RestartLimit,
    epoch: int,
) -> tuple[_Ready, int]:
    """What wait_ready gives, and the epoch in which it did; epoch: in which it is called first.

    restart: begin the epoch of this number with these ranks. Raises what wait_ready raises for a
    fault of a rank's own, which it would have again, and StartError for a rank that the system
    ended because there was no memory left.
    """
    killed = kills_for_memory()
    while True:
        try:
            return wait_ready(), epoch
        except PipelineError as error:
            # Whoever stands still has computed nothing yet that could be at fault.
            if not isinstance(error, StallError) and not all(f.outside for f in ranks.faults):
                raise
            if kills_for_memory() > killed:
                raise StartError(
                    f"{error}; the system had no memory left: use a smaller model, more hosts, or "
                    "a smaller --kv-cache-memory"
                ) from error
            _log.warning("%s; %s: the start goes on", error, limit.count(error))
            epoch += 1
            restart(epoch)


def check_hosts(away: Mapping[int, float], deployment: Deployment) -> None:
    """Raises StartError for a host with stages that has been away for longer than --join-timeout.
    away: by node rank, for how many seconds."""
    for node, away_s in away.items():
        if node in deployment.hosts and away_s > deployment.config.join_timeout:
            name = deployment.cluster.hosts[node].name
            raise StartError(
                f"host {node} ({name}) went away while starting, and did not come back within "
                f"{deployment.config.join_timeout:g} s (--join-timeout)"
            )
