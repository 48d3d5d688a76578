"""What made a rank unfit to go on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankFault:
    """A rank died, raised or stood still, and has to be started anew.

    step: that which it was computing, if it said so. outside: somebody else ended or stopped its
    process, so that what it computed is hardly to blame.
    """

    rank: int
    step: int | None
    outside: bool
