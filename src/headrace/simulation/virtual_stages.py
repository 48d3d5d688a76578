"""All stages of a pipeline in one process and in virtual time: real stage loops, no waiting.

To the engine it is a pipeline like any other, on a clock that only moves when it is asked for
messages. Simulations of the whole engine run on it, and searches that would take hours in earnest.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.errors import PipelineError
from headrace.execution.executor import Executor
from headrace.pipeline.carry_out import carry_out
from headrace.pipeline.effects import Compute, Effect, Start, TakePlans, Wait, WorkKind
from headrace.pipeline.ledger import Channel, Ledger
from headrace.pipeline.links import LinkError
from headrace.pipeline.stage_loop import StageRole, stage_loop
from headrace.pipeline.timeline import RankTimeline
from headrace.protocol import codec
from headrace.protocol.messages import FromRank, Report, Result, Stop, Timeline
from headrace.protocol.plan import Plan
from headrace.protocol.ranks import Ranks
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork, VirtualTransfer
from headrace.simulation.virtual_shards import VirtualShards

# Seconds that a stage takes for all of a step's work of one kind.
ComputeTime = Callable[[int, Plan, WorkKind], float]

# Events remembered, for the account of a failure.
_EVENTS = 40


def no_time(*_: object) -> float:
    """Whatever it is for takes no time."""
    return 0.0


class VirtualStages:
    """The engine's Pipeline, in virtual time.

    executors: by rank; num_shards: how many of them are a stage. window: the most steps that are
    planned beyond the newest result. compute_s(rank, plan, kind): what work takes.
    socket_delay(rank): what a message between the engine and the rank takes on its way, asked for
    each; none overtakes another of the same socket and direction. hold_up(rank): how long a rank's
    process is kept from going on, asked before everything that it does. link_timeout: seconds
    after which a wait for a transfer fails.

    killed: whether a rank is gone. cut_off: whether an edge is. events: what happened last,
    (moment, who, what), the newest last.
    """

    def __init__(
        self,
        clock: VirtualClock,
        network: VirtualNetwork,
        executors: list[Executor],
        window: int,
        max_rows: int,
        *,
        num_shards: int = 1,
        epoch: int = 0,
        blocking_feedback: bool = False,
        compute_s: ComputeTime = no_time,
        socket_delay: Callable[[int], float] = no_time,
        hold_up: Callable[[int], float] = no_time,
        link_timeout: float = 60.0,
    ) -> None:
        self.events: deque[tuple[float, str, object]] = deque(maxlen=_EVENTS)
        self._clock = clock
        self._epoch = epoch
        self._inbox: list[bytes] = []
        self.killed = self.cut_off = False
        self._network = network
        # Why a rank that lives has given up.
        self._failure: PipelineError | None = None
        self._heard_at = [0.0] * len(executors)
        self._ranks = ranks = Ranks(len(executors) // num_shards, num_shards)
        self._shards = [
            VirtualShards(clock, range(ranks.number(stage), ranks.number(stage + 1)))
            for stage in range(ranks.num_stages)
        ]
        self._by_rank = [
            _Rank(
                StageRole(n, ranks, epoch, window, max_rows, blocking_feedback),
                executor,
                clock,
                network,
                partial(compute_s, n),
                partial(hold_up, n),
                _Socket(clock, partial(socket_delay, n), partial(self._hear, n)),
                link_timeout,
                self.events,
                partial(self._lose_link, n),
                self._shards[ranks.stage_of(n)],
            )
            for n, executor in enumerate(executors)
        ]
        self._plans_to = [
            _Socket(clock, partial(socket_delay, n), rank.take)
            for n, rank in enumerate(self._by_rank)
        ]

    def send(self, plan: Plan) -> None:
        """Give the plan to every rank, in order."""
        self.events.append((self._clock.now, "engine", plan))
        for socket, data in zip(self._plans_to, codec.encode_plan(plan, self._ranks), strict=True):
            socket.send(data)

    def send_to(self, rank: int, message: Plan | Stop) -> None:
        """Give a message to one rank alone."""
        to = f"to {self._ranks.name(rank)} alone"
        self.events.append((self._clock.now, to, message))
        self._plans_to[rank].send(codec.encode(message))

    def receive(self, timeout_s: float) -> list[Result | Report]:
        """Messages of this epoch that arrived, after up to timeout_s of virtual time for the first.

        PipelineError if a transfer of a stage failed, or if a rank was killed and nothing is left
        of what was sent. A fault in a stage is raised as it is.
        """
        if self.killed and not self._inbox:
            raise PipelineError("stages were killed")
        until = self._clock.now + timeout_s
        while not self._inbox and self._failure is None and self._clock.run_next(until):
            pass
        if self._failure is not None:
            raise self._failure
        messages: list[Result | Report] = []
        for data in self._inbox:
            message = codec.decode_from_rank(data)
            assert isinstance(message, Result | Report)
            if message.epoch == self._epoch:
                messages.append(message)
        self._inbox.clear()
        return messages

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        """At most the last so many activities of each rank; nobody needs time to answer."""
        return [rank.timeline.show(last, self._clock.now) for rank in self._by_rank]

    def signs_of_life(self) -> list[float]:
        """When the last message of each rank came, by its number."""
        return list(self._heard_at)

    def stop(self) -> None:
        """Have the stages run the plans that they have, drain their links and end."""
        for rank in range(self._ranks.count):
            self.send_to(rank, Stop(self._epoch))
        while not all(rank.done for rank in self._by_rank):
            if self._failure is not None:
                raise self._failure
            if not self._clock.run_next():
                waiting = " and ".join(
                    self._ranks.name(n) for n, rank in enumerate(self._by_rank) if not rank.done
                )
                raise PipelineError(f"{waiting} was told to stop and does not")

    def kill(self, *ranks: int) -> None:
        """These ranks, or all, are gone at once; what they sent to the engine before still arrives.
        Others go on until they miss them."""
        self.killed = True
        for number in ranks or range(self._ranks.count):
            self._by_rank[number].killed = True
        for number in ranks:
            self._network.kill(number)
            self._shards[self._ranks.stage_of(number)].lose(number)

    def cut(self, channel: Channel) -> None:
        """An edge is gone at once. Both its ranks go on until they miss it; nobody else is told."""
        self.cut_off = True
        self.events.append((self._clock.now, "the line", channel))
        self._network.cut(channel)

    def _lose_link(self, rank: int, error: LinkError) -> None:
        """A rank gives up because a link of its is lost; so its neighbours lose theirs."""
        if self._failure is None:
            self._failure = PipelineError(f"{self._ranks.name(rank)}: {error}")
        self._network.kill(rank)
        self._shards[self._ranks.stage_of(rank)].lose(rank)

    def _hear(self, rank: int, data: bytes) -> None:
        self._heard_at[rank] = self._clock.now
        self._inbox.append(data)


class _Socket:
    """One direction of an ordered socket."""

    def __init__(
        self, clock: VirtualClock, delay: Callable[[], float], deliver: Callable[[bytes], None]
    ) -> None:
        self._clock, self._delay, self._deliver = clock, delay, deliver
        self._on_their_way: deque[bytes] = deque()
        self._newest_at = 0.0

    def send(self, data: bytes) -> None:
        self._newest_at = max(self._clock.now + self._delay(), self._newest_at)
        self._on_their_way.append(data)
        self._clock.schedule_at(self._newest_at, self._arrive)

    def _arrive(self) -> None:
        self._deliver(self._on_their_way.popleft())


class _Rank:
    """Carries a stage loop's effects out until one takes time, and goes on when it is over."""

    def __init__(
        self,
        role: StageRole,
        executor: Executor,
        clock: VirtualClock,
        network: VirtualNetwork,
        compute_s: Callable[[Plan, WorkKind], float],
        hold_up: Callable[[], float],
        to_engine: _Socket,
        link_timeout: float,
        events: deque[tuple[float, str, object]],
        lose_link: Callable[[LinkError], None],
        shards: VirtualShards,
    ) -> None:
        self.timeline = RankTimeline(role.epoch, role.rank, memory=lambda: 0)
        self.done = self.killed = False
        self._epoch = role.epoch
        self._clock = clock
        self._compute_s = compute_s
        self._hold_up = hold_up
        self._to_engine = to_engine
        self._link_timeout = link_timeout
        self._events = events
        self._lose_link = lose_link
        self._rank, self._shards = role.rank, shards
        self._name = role.ranks.name(role.rank)
        self._inbox: list[bytes] = []
        self._waits_for_plans = False
        self._ledger = Ledger()
        # Those that the stage has not reported on.
        self._plans: dict[int, Plan] = {}
        self._busy_until = 0.0
        # Work of a step that has been charged for.
        self._charged: tuple[int, set[WorkKind]] = (-1, set())
        self._effects = carry_out(
            stage_loop(role, executor),
            self,
            network.links(role.rank),
            self._ledger,
            self.timeline,
            link_timeout=link_timeout,
            clock=lambda: clock.now,
        )
        self._go_on()

    def take(self, data: bytes) -> None:
        """A message from the engine arrived."""
        if self.killed:
            return
        self._inbox.append(data)
        if self._waits_for_plans:
            self._waits_for_plans = False
            self._go_on()

    def send(self, message: FromRank) -> None:
        """Send a message to the engine."""
        if isinstance(message, Report):
            del self._plans[message.step]
        self._to_engine.send(codec.encode(message))

    def take_plans(self, wait: bool) -> list[Plan | Stop]:
        """All that have arrived. wait: there are some, or this would not be asked."""
        assert self._inbox or not wait
        messages: list[Plan | Stop] = []
        for data in self._inbox:
            message = codec.decode_to_rank(data)
            assert isinstance(message, Plan | Stop)
            messages.append(message)
            if isinstance(message, Plan) and message.epoch == self._epoch:
                self._plans[message.step] = message
        self._inbox.clear()
        return messages

    def _go_on(self) -> None:
        """Carry out what the loop wants until that takes time; then this is called again."""
        if self.killed:
            return
        try:
            for effect in self._effects:
                if effect is None:
                    if self._busy_until > self._clock.now:
                        self._clock.schedule_at(self._busy_until, self._go_on)
                        return
                    continue
                held_up_s = self._hold_up()
                if held_up_s > 0:
                    self._clock.schedule(held_up_s, partial(self._after_hold_up, effect))
                    return
                if not self._due(effect):
                    return
        except LinkError as error:
            self._lose_link(error)
            return
        self.done = True

    def _after_hold_up(self, effect: Effect) -> None:
        if self.killed:
            return
        try:
            due = self._due(effect)
        except LinkError as error:
            self._lose_link(error)
            return
        if due:
            self._go_on()

    def _begin(self, kind: WorkKind, step: int) -> None:
        """All shards are there."""
        if not self.killed:
            self._busy_until = self._clock.now + self._seconds(kind, step)
            self._go_on()

    def _fail(self, error: LinkError) -> None:
        if not self.killed:
            self._lose_link(error)

    def _due(self, effect: Effect) -> bool:
        """Whether the effect can be carried out now; if not, this goes on when it can."""
        now = self._clock.now
        self._events.append((now, self._name, effect))
        match effect:
            case TakePlans(wait=True):
                self._waits_for_plans = not self._inbox
                return bool(self._inbox)
            case Wait(channel, step):
                transfer = self._ledger.handle(channel, step)
                if isinstance(transfer, VirtualTransfer) and not transfer.over:
                    transfer.watch(self._link_timeout, self._go_on)
                    return False
            case Compute(kind, step) | Start(kind, step):
                if kind == "forward" and len(self._shards.ranks) > 1:
                    begin = partial(self._begin, kind, step)
                    if not self._shards.arrive(
                        self._rank, step, self._link_timeout, begin, self._fail
                    ):
                        return False
                self._busy_until = now + self._seconds(kind, step)
        return True

    def _seconds(self, kind: WorkKind, step: int) -> float:
        """What work takes: all of a step's work of one kind, with the first piece of it."""
        charged_step, kinds = self._charged
        if charged_step != step:
            kinds = set()
            self._charged = step, kinds
        if kind in kinds:
            return 0.0
        kinds.add(kind)
        return self._compute_s(self._plans[step], kind)
