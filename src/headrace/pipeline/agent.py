"""A host that takes part without an engine: it joins the engine's host and runs ranks for it.

The agent is one thread that passes on what engine and ranks say to each other, starts and ends the
ranks' processes, and tells of their deaths. The ranks end with it. When it loses the engine's host
it ends them, and joins again, until it has waited too long for that.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import zmq

import headrace
from headrace.errors import HeadraceError, StartError
from headrace.host.cluster_key import Secret
from headrace.host.cpus import StageCpus
from headrace.host.engine_folder import EngineFolder
from headrace.host.memory import free_memory, memory_of
from headrace.pipeline.awaited_rank import AwaitedRank
from headrace.pipeline.curve import FRAME_BYTES, Context, Socket, show_key
from headrace.pipeline.hosts_thread import CONTROL
from headrace.pipeline.line import take_part
from headrace.pipeline.process import LocalProcess, start_rank_process
from headrace.pipeline.rank_weights import Coming, Found, Missing, RankWeights
from headrace.protocol import cluster, codec
from headrace.protocol.cluster import (
    AgentFailed,
    AnswerLine,
    AskMemory,
    EndRank,
    Facts,
    FreeMemory,
    FromAgent,
    Goodbye,
    Join,
    Kind,
    Layout,
    MeasureLine,
    PromiseMemory,
    RankEnded,
    Refused,
    StartRank,
    Welcome,
)
from headrace.protocol.messages import Loading
from headrace.signals import put_off

_log = logging.getLogger(__name__)

# Seconds between two looks at whether the engine's host is there, for it to let this one in, and
# between two tries of that.
_LOOK_S = 0.2
_CONNECT_S = 3.0
_AGAIN_S = 1.0
# Seconds between two lines on weights that come.
_TELL_S = 10.0


class _MasterLostError(Exception):
    """The connection to the engine's host broke."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """What a host needs to take part.

    master: address and port of the engine's host. address: this host's, as others reach it.
    interface: in words, that which has it. name: this host's. node_rank, layout: None if it was not
    told. join_timeout_s: for the engine's host to be there, at the start and whenever it was lost.
    facts: what this host has, and where the model lies that is served by this name, None if it does
    not lie here; raises HeadraceError. say: told what happens, a line.
    """

    master: tuple[str, int]
    address: str
    interface: str
    secret: Secret
    name: str
    node_rank: int | None
    layout: Layout | None
    join_timeout_s: float
    facts: Callable[[str], tuple[Facts, str | None]]
    say: Callable[[str], None]

    def run(self) -> None:
        """Take part until the engine ends in order. Raises StartError if the engine's host does not
        come, or refuses this one, and HeadraceError for what is wrong here."""
        lost_at: float | None = time.monotonic()
        tries = 0
        while True:
            context = zmq.Context()
            try:
                with _Session(self, context) as session:
                    if session.connect(min(_CONNECT_S, self.join_timeout_s)):
                        lost_at = None
                        session.serve()
                        return
            except _MasterLostError:
                self.say("the engine's host is gone: its stages here were ended")
            finally:
                context.term()
            lost_at = lost_at or time.monotonic()
            waited_s = time.monotonic() - lost_at
            if waited_s > self.join_timeout_s:
                raise StartError(self._nobody_there())
            if tries == 0:
                self.say(
                    f"waits for the engine's host at {self.there} (from {self.interface}, for "
                    f"{self.join_timeout_s:g} s)"
                )
            tries += 1
            time.sleep(_AGAIN_S)

    @property
    def there(self) -> str:
        """The engine's host, as people write it."""
        return f"{self.master[0]}:{self.master[1]}"

    def _nobody_there(self) -> str:
        return (
            f"no engine's host let this one in at {self.there}, from {self.interface}, within "
            f"{self.join_timeout_s:g} s: is `headrace serve --nnodes ...` running there, with the "
            "same --cluster-key-file, and is the port open in its firewall?"
        )


@dataclass
class _Rank:
    life: int
    process: LocalProcess
    control: Socket
    watch: Socket


@dataclass
class _Session:
    """One connection to the engine's host, with the ranks that run for it."""

    agent: Agent
    context: Context
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _awaited: dict[int, AwaitedRank] = field(default_factory=dict)

    def __enter__(self) -> "_Session":
        # Whatever interrupts, nothing stays open: the context waits for its sockets.
        with ExitStack() as undo:
            with put_off():
                self._folder = EngineFolder()
                undo.callback(self._folder.remove)
                self._master = self.context.socket(zmq.DEALER)
                undo.callback(self._master.close)
                self._master.linger = 1000
                self._weights = RankWeights(self.agent.secret)
                undo.callback(self._weights.close)
                self._poller = zmq.Poller()
                self._poller.register(self._master, zmq.POLLIN)
                self._poller.register(self._weights.fileno(), zmq.POLLIN)
            self._closing = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*self._ranks, *self._awaited]:
            self._forget(number)
        self._closing.close()

    def connect(self, timeout_s: float) -> bool:
        """Whether the engine's host is there and has let this one in."""
        show_key(self._master, CONTROL, self.agent.secret)
        # To the engine's host another connection is another host: it has to join.
        self._master.setsockopt(zmq.RECONNECT_IVL, -1)
        self._master.connect("tcp://{}:{}".format(*self.agent.master))
        return bool(self._master.poll(int(timeout_s * 1000), zmq.POLLOUT))

    def serve(self) -> None:
        """Until the engine ends in order."""
        agent = self.agent
        self._say(Join(headrace.__version__, agent.name, agent.node_rank, agent.layout))
        while True:
            ready = dict(self._poller.poll(int(_LOOK_S * 1000)))
            if self._master in ready:
                while self._master.poll(0):
                    if not self._take(self._master.recv_multipart()):
                        return
            elif not self._master.poll(0, zmq.POLLIN | zmq.POLLOUT):
                raise _MasterLostError
            if self._weights.fileno() in ready:
                for news in self._weights.news():
                    self._take_news(news)
            for number, rank in list(self._ranks.items()):
                self._pass_on(number, rank, ready)
                if rank.process.poll() is not None:
                    self._end(number, rank)

    def _take(self, frames: list[bytes]) -> bool:
        """Whether there is more to come."""
        kind, number, life, body = cluster.put_together(frames)
        if kind == b"agent":
            return self._obey(body)
        rank, awaited = self._ranks.get(number), self._awaited.get(number)
        if awaited is not None and awaited.order.life == life and kind == b"control":
            awaited.bodies.append(body)
            if len(awaited.bodies) == 1:
                sender = awaited.order.weights_from
                self._weights.find(awaited.whose, awaited.config.program, sender)
        elif rank is not None and rank.life == life:
            if kind == b"control":
                rank.control.send(body)
            elif kind == b"watch":
                rank.watch.send_multipart(cluster.unpack_frames(body))
        return True

    def _obey(self, body: bytes) -> bool:
        try:
            message = cluster.decode_to_agent(body)
        except msgspec.DecodeError as error:
            raise StartError(
                f"the engine's host at {self.agent.there} speaks another version of Headrace "
                f"than this one, {headrace.__version__} ({error})"
            ) from error
        match message:
            case Welcome(node_rank, model):
                self.agent.say(
                    f"joined {self.agent.there} as host {node_rank}, from {self.agent.interface}"
                )
                self._tell_facts(model)
            case Refused(reason):
                raise StartError(f"{self.agent.there} refused this host: {reason}")
            case StartRank():
                self._forget(message.rank)
                self._awaited[message.rank] = AwaitedRank(message)
            case EndRank(rank, life):
                if self._life_of(rank) == life:
                    self._forget(rank)
            case AskMemory():
                with self._folder.promising() as promised:
                    ranks = [memory_of(rank.process.pid) or 0 for rank in self._ranks.values()]
                    self._say(FreeMemory(free_memory(), promised, sum(ranks)))
            case PromiseMemory(cache_bytes):
                self._folder.promise(
                    {
                        self._ranks[rank].process.pid: size
                        for rank, size in cache_bytes.items()
                        if rank in self._ranks
                    }
                )
            case AnswerLine() | MeasureLine():
                # Nothing else is asked of this host meanwhile.
                for told in take_part(message, self.agent.address, self.agent.interface):
                    self._say(told)
            case Goodbye():
                self.agent.say("the engine has ended")
                return False
        return True

    def _tell_facts(self, model: str) -> None:
        try:
            facts, self._weights.model_path = self.agent.facts(model)
            self._say(facts)
        except HeadraceError as error:
            self._say(AgentFailed(str(error)))
            raise

    def _take_news(self, news: Found | Coming | Missing) -> None:
        """Of a rank's weights."""
        awaited = self._awaited.get(news.of.rank)
        if awaited is None or awaited.whose != news.of:
            return
        number, life = news.of.rank, news.of.life
        match news:
            case Coming(fraction=fraction):
                if time.monotonic() - awaited.told_at > _TELL_S:
                    awaited.told_at = time.monotonic()
                    self.agent.say(f"rank {number}: {fraction:.0%} of its weights are here")
                loading = Loading(number, "weights received", fraction)
                self._send(b"control", number, life, codec.encode(loading))
            case Missing(error=error):
                self.agent.say(f"rank {number} has no weights: {error}")
                failure = awaited.failure(error)
                self._send(b"control", number, life, codec.encode(failure))
            case Found(path=path, received=received):
                if received is not None:
                    self.agent.say(
                        f"rank {number}: {received.came / 2**30:.3g} GiB of weights came, "
                        f"{received.there / 2**30:.3g} GiB were in {path} before"
                    )
                self._start(self._awaited.pop(number), path)

    def _start(self, awaited: AwaitedRank, model_path: str) -> None:
        order = awaited.order
        # None, if this host came in the place of another that had other cores.
        here = set(order.cpus) <= os.sched_getaffinity(0)
        cpus = StageCpus(order.cpus if here else [], order.threads)
        with put_off():
            process = start_rank_process(order.rank, cpus, self._folder.path, os.environ)
            rank = _Rank(
                order.life,
                process,
                self._connect(process.address),
                self._connect(process.watch_address),
            )
            self._ranks[order.rank] = rank
            self._poller.register(rank.control, zmq.POLLIN)
            self._poller.register(rank.watch, zmq.POLLIN)
            if process.death is not None:
                self._poller.register(process.death.fileno(), zmq.POLLIN)
        for body in awaited.bodies_with(model_path):
            rank.control.send(body)
        self.agent.say(f"runs rank {order.rank}")

    def _connect(self, address: str) -> Socket:
        connecting = self.context.socket(zmq.DEALER)
        connecting.set_hwm(0)
        connecting.linger = 0
        connecting.setsockopt(zmq.RECONNECT_IVL, 10)
        connecting.connect(address)
        return connecting

    def _pass_on(self, number: int, rank: _Rank, ready: dict[object, int]) -> None:
        """What the rank sent to the engine."""
        if rank.control in ready:
            while rank.control.poll(0):
                self._send(b"control", number, rank.life, rank.control.recv())
        if rank.watch in ready:
            while rank.watch.poll(0):
                body = cluster.pack_frames(rank.watch.recv_multipart())
                self._send(b"watch", number, rank.life, body)

    def _end(self, number: int, rank: _Rank) -> None:
        """It has ended by itself, or somebody ended it."""
        # What it said last comes first.
        self._pass_on(number, rank, {rank.control: 1})
        code, last_line = rank.process.poll(), rank.process.last_line
        assert code is not None
        self.agent.say(f"rank {number} ended with {code}{f': {last_line}' if last_line else ''}")
        self._say(RankEnded(number, rank.life, code, last_line))
        self._forget(number)

    def _life_of(self, number: int) -> int | None:
        """Of the rank's process that there is or will be."""
        if (awaited := self._awaited.get(number)) is not None:
            return awaited.order.life
        rank = self._ranks.get(number)
        return None if rank is None else rank.life

    def _forget(self, number: int) -> None:
        """End the rank's process, if there is one, or do not start it."""
        if (awaited := self._awaited.pop(number, None)) is not None:
            self._weights.cancel(awaited.whose)
        with put_off():
            if (rank := self._ranks.pop(number, None)) is None:
                return
            for socket in (rank.control, rank.watch):
                self._poller.unregister(socket)
                socket.close()
            if rank.process.death is not None:
                self._poller.unregister(rank.process.death.fileno())
            rank.process.kill()
            rank.process.wait()
            rank.process.leave()

    def _say(self, message: FromAgent) -> None:
        self._send(b"agent", 0, 0, cluster.encode(message))

    def _send(self, kind: Kind, rank: int, life: int, body: bytes) -> None:
        try:
            self._master.send_multipart(
                cluster.cut(kind, rank, life, body, FRAME_BYTES), zmq.NOBLOCK
            )
        except zmq.Again:
            raise _MasterLostError from None
