"""Who is to blame when the pipeline broke, of all ranks that failed or died because of it."""

import time
from collections.abc import Callable, Iterable, Sequence

from headrace import errors
from headrace.errors import HeadraceError, PipelineError
from headrace.pipeline.rank_process import RankProcess
from headrace.protocol.fault import RankFault
from headrace.protocol.messages import Failure, FromRank
from headrace.protocol.ranks import Ranks

# Seconds for the other ranks' messages once one has failed, and between two looks at them.
_LAST_WORDS_S = 1.0
_LOOK_S = 0.01


def failures_of(messages: Iterable[FromRank], epoch: int) -> list[Failure]:
    """Those that count in an epoch. Of the one before, lost links are over; a rank that has a fault
    of its own ends, whenever it was."""
    return [
        message
        for message in messages
        if isinstance(message, Failure) and (message.epoch == epoch or message.lost_peer is None)
    ]


def find_fault(
    processes: Sequence[RankProcess],
    failures: list[Failure],
    more: Callable[[], list[Failure]],
    ranks: Ranks,
) -> tuple[HeadraceError, list[RankFault]]:
    """The error to raise, once there was time for everybody's last word, and whose faults it tells.

    failures: that came already; more: gives those that came since. A dead or stuck rank makes its
    neighbours fail too, so blame goes in this order: a rank that reports a fault of its own; one
    that died without a word; the rank whose links were lost and that itself still lives; a rank
    that lost a link.
    """
    deadline = time.monotonic() + _LAST_WORDS_S
    while True:
        failures += more()
        own = [failure for failure in failures if failure.lost_peer is None]
        speakers = {failure.rank for failure in failures}
        mute = [rank for rank in processes if rank.dead and rank.number not in speakers]
        # One that ends by itself may have said why.
        killed = [rank for rank in mute if (rank.process.returncode or 0) < 0]
        if own or killed or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    faults = [RankFault(failure.rank, failure.step, outside=False) for failure in own]
    faults += [RankFault(rank.number, None, outside=rank.ended_from_outside) for rank in mute]
    if own:
        return _error_of(own[0], ranks), faults
    if mute:
        return PipelineError(mute[0].how_it_ended()), faults
    silent = [failure for failure in failures if failure.lost_peer not in speakers]
    return _error_of((silent or failures)[0], ranks), faults


def _error_of(failure: Failure, ranks: Ranks) -> HeadraceError:
    kind = getattr(errors, failure.kind, PipelineError)
    error: HeadraceError = kind(f"{ranks.name(failure.rank)}: {failure.message}")
    error.add_note(failure.details)
    return error
