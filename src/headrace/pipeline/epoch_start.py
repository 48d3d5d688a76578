"""An epoch that begins: what its ranks have said of it, and who of them does not get on.

Ranks that live answer when they are asked, also while they load (watch.py): a process that was
stopped does not, while one that waits for a slow disk does. What counts is the time for which this
process has waited in vain. So nobody is blamed for a time in which all were frozen together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.errors import HeadraceError, StallError, StartError
from headrace.pipeline.rank_process import RankProcess
from headrace.protocol.messages import FromRank, Loaded, Loading, RankConfig, Ready

# Seconds for a rank to show any progress, and for one that lives to take note of a new epoch.
_PROGRESS_DEADLINE = 120.0
_NOTICE_DEADLINE = 5.0
# Seconds for a process that was stopped to go on; and for one that has answered to answer again,
# longer than a line between hosts may be cut.
_STOPPED_DEADLINE = 5.0
_SILENT_DEADLINE = 20.0
# Seconds between two questions, and until one counts as lost.
_ASK_EACH = 1.0
_ASK_AGAIN = 5.0


@dataclass
class _Pulse:
    """Of one rank. seen_at: its last sign of life that was noted.

    In seconds of waiting: since then, for how long its process has been stopped, and since it was
    asked.
    """

    seen_at: float
    silent_s: float = 0.0
    stopped_s: float = 0.0
    asked_s: float = _ASK_AGAIN

    def look(self, rank: RankProcess, waited_s: float) -> None:
        """Take note of what the rank gave in this time, and ask it for more."""
        if rank.take_answers():
            self.asked_s = max(self.asked_s, _ASK_AGAIN - _ASK_EACH)
        self.asked_s += waited_s
        self.silent_s += waited_s
        if rank.heard_at != self.seen_at:
            self.seen_at, self.silent_s = rank.heard_at, 0.0
        stopped = self.silent_s > _ASK_EACH and rank.stopped
        self.stopped_s = self.stopped_s + waited_s if stopped else 0.0
        if self.asked_s >= _ASK_AGAIN:
            self.asked_s = 0.0
            rank.ask_for_answer()

    def lost(self, rank: RankProcess) -> str | None:
        """In words, that the rank gives no sign of life, once that is sure."""
        if self.stopped_s > _STOPPED_DEADLINE:
            return f"{rank.name} has been stopped by a signal for {self.stopped_s:.0f} s"
        if rank.has_answered and self.silent_s > _SILENT_DEADLINE:
            return f"{rank.name} has given no sign of life for {self.silent_s:.0f} s"
        return None


@dataclass
class EpochStart:
    """What was said of one.

    num_blocks: of the cache, None until it is decided. kept: ranks of the epoch before that live
    on. quiet_s: seconds waited for nothing; waited_s: in all. What a wait took longer than meant,
    nobody ran.
    """

    configs: list[RankConfig]
    num_blocks: int | None
    kept: set[int]
    loaded: dict[int, Loaded] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    cache_told: bool = False
    quiet_s: float = 0.0
    waited_s: float = 0.0
    _pulses: dict[RankProcess, _Pulse] = field(default_factory=dict)

    @property
    def all_loaded(self) -> list[Loaded] | None:
        """What the ranks said of their weights, in their order; None until all have."""
        said = [loaded for _, loaded in sorted(self.loaded.items())]
        return said if len(said) == len(self.configs) else None

    def take(self, messages: Iterable[FromRank], on_progress: Callable[[Loading], None]) -> None:
        """What ranks said. What they said before they noted this epoch is void."""
        epoch = self.configs[0].epoch
        for message in messages:
            match message:
                case Loading():
                    on_progress(message)
                case Loaded() if message.epoch == epoch:
                    self.loaded[message.rank] = message
                case Ready() if message.epoch == epoch:
                    self.ready.add(message.rank)

    def waited(self, ranks: Sequence[RankProcess], waited_s: float, in_vain: bool) -> None:
        """For these, for so long."""
        self.waited_s += waited_s
        self.quiet_s = self.quiet_s + waited_s if in_vain else 0.0
        for rank in ranks:
            self._pulses.setdefault(rank, _Pulse(rank.heard_at)).look(rank, waited_s)

    def deaf(self, ranks: Sequence[RankProcess]) -> set[int]:
        """Those that live on and do not take note of the epoch; each is told once. One that still
        loads is none: it hears of the epoch when it has."""
        if self.waited_s <= _NOTICE_DEADLINE:
            return set()
        deaf = {number for number in self.kept - self.loaded.keys() if ranks[number].was_ready}
        self.kept -= deaf
        return deaf

    def stuck(self, ranks: Sequence[RankProcess]) -> tuple[HeadraceError, list[RankProcess]] | None:
        """The error to raise, and whose fault it is, if somebody does not get on: a StallError for
        who gives no sign of life, a StartError for who lives and shows no progress."""
        lost = {
            rank: words
            for rank in ranks
            if rank in self._pulses and (words := self._pulses[rank].lost(rank))
        }
        if lost:
            return StallError(f"{' and '.join(lost.values())} while starting"), list(lost)
        if self.quiet_s > _PROGRESS_DEADLINE:
            said = self.ready if self.cache_told else self.loaded.keys()
            missing = [rank for rank in ranks if rank.number not in said]
            names = " and ".join(rank.name for rank in missing)
            error = StartError(
                f"{names} showed no progress for {_PROGRESS_DEADLINE:g} s while starting"
            )
            return error, missing
        return None
