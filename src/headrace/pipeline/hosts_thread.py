"""The thread of the engine's process that has the socket of the other hosts (pipeline/hosts.py).

It passes on what comes, whole, between the hosts' agents and, for each rank elsewhere, a pair of
sockets in the engine's folder, which look to the engine like the rank's own. What others want of it
they order.
"""

import contextlib
import io
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from headrace.errors import HeadraceError
from headrace.host.cluster_key import Secret
from headrace.host.cpus import StageCpus
from headrace.pipeline.admission import why_not, why_not_again
from headrace.pipeline.curve import FRAME_BYTES, Door, Gate, Socket
from headrace.pipeline.remote_process import RemoteProcess
from headrace.pipeline.weights_sender import WeightsSender
from headrace.protocol import cluster
from headrace.protocol.cluster import (
    AgentFailed,
    EndRank,
    Facts,
    FreeMemory,
    Goodbye,
    Join,
    Kind,
    Layout,
    LineFailed,
    LineMeasured,
    LineOpen,
    PromiseMemory,
    RankEnded,
    Refused,
    StartRank,
    ToAgent,
    ToldOfLine,
    Welcome,
)

_log = logging.getLogger(__name__)

# The control socket's name, for its key.
CONTROL = "control"
# Seconds between two looks whether hosts are there.
LOOK_S = 0.2
# Seconds for the hosts to leave, once they were told that the engine has ended.
_LEAVE_S = 2.0


@dataclass
class Relay:
    """A rank elsewhere. started: whether its host was told to start it."""

    process: RemoteProcess
    cpus: StageCpus
    control: Socket
    watch: Socket
    started: bool = False


@dataclass
class Node:
    """A host that takes part. identity: of its agent's connection, None while it is away. lost_at:
    since when it is, on time.monotonic. facts: None until they came, once. known: whether they came
    over this connection, too."""

    number: int
    name: str = ""
    identity: bytes | None = None
    lost_at: float = 0.0
    joined: bool = False
    facts: Facts | None = None
    known: bool = False
    answers: "queue.SimpleQueue[FreeMemory]" = field(default_factory=queue.SimpleQueue)
    of_lines: "queue.SimpleQueue[ToldOfLine]" = field(default_factory=queue.SimpleQueue)
    relays: dict[int, Relay] = field(default_factory=dict)

    def leave(self) -> None:
        """It takes no part from now on, until it joins again."""
        # One that was not let in again has been away all the while.
        if self.known:
            self.lost_at = time.monotonic()
        self.identity, self.known = None, False


class HostsThread:
    """Runs from the start on. Always end() it.

    nodes: by node rank, from 1. changed: notified when a host was heard of, or failure, which says
    why one cannot take part. weights: the total of all hosts' digest, None before they agreed.
    sender: sends them to those that lack them, None if nobody does.
    """

    def __init__(self, door: Door, secret: Secret, layout: Layout, model: str) -> None:
        self._door, self._secret, self._layout, self._model = door, secret, layout, model
        self._context = zmq.Context()
        self._gate = Gate(self._context)
        self._router = self._open()
        self.nodes = {number: Node(number) for number in range(1, layout.nnodes)}
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.weights: str | None = None
        self.sender: WeightsSender | None = None
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="headrace-hosts", daemon=True)
        self._thread.start()

    def order(self, order: Callable[[], None]) -> None:
        """Have the thread do it."""
        self._orders.put(order)
        with contextlib.suppress(ValueError):
            self._wake.write((1).to_bytes(8, sys.byteorder))

    def end(self) -> bool:
        """Tell the agents that the engine has ended; whether that was still to be done."""
        if not self._thread.is_alive():
            return False
        self.order(self._begin_closing)
        self._thread.join()
        return True

    def release(self) -> None:
        """Once it has ended: hold nothing any more."""
        self._context.term()
        self._wake.close()

    def leave(self) -> None:
        """In a fork of the process that has it: hold nothing by which that process wakes it."""
        self._wake.close()

    def relay(self, process: RemoteProcess, cpus: StageCpus) -> Relay:
        """What stands in for a rank elsewhere, from which the engine finds its sockets."""
        control = self._bind(zmq.DEALER, process.address)
        return Relay(process, cpus, control, self._bind(zmq.ROUTER, process.watch_address))

    def _bind(self, kind: int, address: str) -> Socket:
        bound = self._context.socket(kind)
        bound.set_hwm(0)
        bound.linger = 0
        bound.bind(address)
        return bound

    def _open(self) -> Socket:
        """The socket that agents connect to."""
        router = self._context.socket(zmq.ROUTER)
        router.linger = 1000
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate.guard(router, CONTROL, self._secret)
        self._door.hand_to(router)
        return router

    # In the thread.

    def _run(self) -> None:
        while not self._closing:
            try:
                self._serve()
            except Exception as error:
                self._begin_anew(error)
        try:
            self._wait_until_all_left()
        finally:
            self._router.close()

    def _begin_anew(self, error: Exception) -> None:
        """After an error of this thread's own: have all hosts join again, as if the lines to them
        had been cut. That ends their ranks, and so the engine learns of it."""
        reason = f"internal error in the connection to other hosts: {type(error).__name__}: {error}"
        _log.warning(reason, exc_info=error)
        with self.changed:
            self.failure = reason
            self.changed.notify_all()
        for node in self.nodes.values():
            self._lose(node, reason)
        self._router.close(0)
        self._router = self._open()

    def _serve(self) -> None:
        """Until it is to end."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        self._poller = poller
        looked_at = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(int(LOOK_S * 1000)))
            if self._wake.fileno() in ready:
                self._wake.read(8)
            # Woken or not: an error may have come in between.
            while not self._orders.empty():
                self._orders.get()()
            if self._router in ready:
                self._take_from_agents()
            for node in self.nodes.values():
                for relay in list(node.relays.values()):
                    self._pass_on(node, relay, ready)
            if time.monotonic() - looked_at > LOOK_S:
                looked_at = time.monotonic()
                self._look_for_all()

    def _look_for_all(self) -> None:
        for node in self.nodes.values():
            self._send(node, b"there", 0, 0, b"")

    def _wait_until_all_left(self) -> None:
        """What was said last is lost to those who did not read it when this side leaves."""
        deadline = time.monotonic() + _LEAVE_S
        while any(node.identity for node in self.nodes.values()) and time.monotonic() < deadline:
            time.sleep(_LEAVE_S / 100)
            self._look_for_all()

    def _pass_on(self, node: Node, relay: Relay, ready: dict[object, int]) -> None:
        """What the engine sent to a rank."""
        rank, life = relay.process.rank, relay.process.life
        if relay.control in ready:
            # The host may be found gone in the middle of it, and its relays be removed.
            while not relay.control.closed and relay.control.poll(0):
                self._send(node, b"control", rank, life, relay.control.recv())
        if relay.watch in ready:
            while not relay.watch.closed and relay.watch.poll(0):
                frames = relay.watch.recv_multipart()
                self._send(node, b"watch", rank, life, cluster.pack_frames(frames))

    def _take_from_agents(self) -> None:
        while self._router.poll(0):
            identity, *frames = self._router.recv_multipart()
            try:
                kind, rank, life, body = cluster.put_together(frames)
                message = cluster.decode_from_agent(body) if kind == b"agent" else None
            except (msgspec.DecodeError, ValueError):
                # It has the key, but another idea of what is said.
                self._answer(identity, Refused("it speaks another version of Headrace"))
                continue
            if isinstance(message, Join):
                self._welcome(identity, message)
                continue
            node = next((n for n in self.nodes.values() if n.identity == identity), None)
            if node is None:
                continue
            if message is not None:
                self._take(node, message)
            elif (relay := node.relays.get(rank)) is not None and relay.process.life == life:
                if kind == b"control":
                    relay.control.send(body)
                elif kind == b"watch":
                    relay.watch.send_multipart(cluster.unpack_frames(body))

    def _welcome(self, identity: bytes, join: Join) -> None:
        reason = why_not(join, self._layout)
        free = [n for n in self.nodes.values() if n.identity is None]
        if join.node_rank is not None:
            free = [node for node in free if node.number == join.node_rank]
        if reason is None and not free:
            whose = "all hosts are" if join.node_rank is None else f"host {join.node_rank} is"
            reason = f"{whose} there already (--nnodes {self._layout.nnodes})"
        if reason is not None:
            _log.warning("host %s was refused: %s", join.name, reason)
            self._answer(identity, Refused(reason))
            return
        # A host that comes again is the one it was.
        node = next((node for node in free if node.name == join.name), free[0])
        node.identity, node.name, node.joined = identity, join.name, True
        node.known = False
        self.tell(node, Welcome(node.number, self._model))

    def _take(self, node: Node, message: cluster.FromAgent) -> None:
        match message:
            case Facts():
                self._take_facts(node, message)
            case FreeMemory():
                node.answers.put(message)
            case LineOpen() | LineMeasured() | LineFailed():
                node.of_lines.put(message)
            case RankEnded(rank, life, code, last_line):
                relay = node.relays.get(rank)
                if relay is not None and relay.process.life == life:
                    self._remove(node, relay, code, last_line)
            case AgentFailed(reason):
                node.leave()
                with self.changed:
                    self.failure = f"host {node.name}: {reason}"
                    self.changed.notify_all()

    def _take_facts(self, node: Node, facts: Facts) -> None:
        before = node.facts
        # Before all have agreed, whether they fit is looked at when all are there.
        reason = None
        if before is not None and self.weights is not None:
            sends = self.sender is not None
            reason = why_not_again(facts.host, self.weights, sends=sends)
        if reason is not None:
            _log.warning(reason)
            self.tell(node, Refused(reason))
            node.leave()
            return
        with self.changed:
            node.facts, node.known = facts, True
            self.changed.notify_all()
        again = "" if before is None else " again"
        # Before all have agreed, nobody runs stages.
        spare = self.weights is not None and not node.relays
        _log.info(
            "host %d joined%s: %s%s",
            *(node.number, again, facts.host.label),
            "; it runs stages from the next restart on" if spare else "",
        )
        elsewhere = before is not None and before.host.address != facts.host.address
        for relay in list(node.relays.values()):
            if elsewhere:
                # What waits to be sent to the rank is of where the host was before.
                self._remove(node, relay, -signal.SIGKILL, f"the host is {facts.host.label} now")
            else:
                self._start(node, relay)

    def add(self, node_number: int, relay: Relay) -> None:
        node = self.nodes[node_number]
        if (old := node.relays.get(relay.process.rank)) is not None:
            self._remove(node, old, -signal.SIGKILL, "")
        node.relays[relay.process.rank] = relay
        if node.identity is None:
            _log.warning(
                "host %d (%s) is not there: rank %d starts when it is",
                node.number,
                node.name,
                relay.process.rank,
            )
        self._start(node, relay)

    def _start(self, node: Node, relay: Relay) -> None:
        if node.identity is None or not node.known or relay.started:
            return
        try:
            weights_from = self._weights_for(node)
        except HeadraceError as error:
            self._remove(node, relay, 1, str(error))
            return
        relay.started = True
        process, cpus = relay.process, relay.cpus
        self.tell(
            node,
            StartRank(process.rank, process.life, list(cpus.cpus), cpus.threads, weights_from),
        )
        # Only from now on is there anybody for what the engine has sent already.
        self._poller.register(relay.control, zmq.POLLIN)
        self._poller.register(relay.watch, zmq.POLLIN)

    def _weights_for(self, node: Node) -> str:
        """The address of one who sends them, empty if they are there. Raises StartError."""
        lacking = node.facts is not None and node.facts.host.weights is None
        return self.sender.address() if lacking and self.sender is not None else ""

    def kill(self, node_number: int, process: RemoteProcess) -> None:
        node = self.nodes[node_number]
        relay = node.relays.get(process.rank)
        if relay is None or relay.process is not process:
            return
        self.tell(node, EndRank(process.rank, process.life))
        # Whatever the host does: the engine has given it up.
        self._remove(node, relay, -signal.SIGKILL, "")

    def _remove(self, node: Node, relay: Relay, code: int, last_line: str) -> None:
        # First: the engine must know, whatever goes wrong with the rest.
        relay.process.end(code, last_line)
        del node.relays[relay.process.rank]
        for socket in (relay.control, relay.watch):
            if socket in self._poller:
                self._poller.unregister(socket)
            socket.close()

    def _lose(self, node: Node, reason: str | None = None) -> None:
        """The host is gone, and its ranks with it. reason: if not that it went."""
        node.leave()
        if node.facts is None:
            node.joined = False
        if not self._closing:
            _log.warning("host %d (%s) is gone", node.number, node.name)
        for relay in list(node.relays.values()):
            if relay.started:
                last = reason or f"host {node.name} is gone"
                self._remove(node, relay, -signal.SIGKILL, last)

    def promise_memory(self, cache_bytes: dict[int, int]) -> None:
        for node in self.nodes.values():
            own = {rank: size for rank, size in cache_bytes.items() if rank in node.relays}
            self.tell(node, PromiseMemory(own))

    def tell_all(self, message: ToAgent) -> None:
        for node in self.nodes.values():
            self.tell(node, message)

    def tell(self, node: Node, message: ToAgent) -> None:
        self._send(node, b"agent", 0, 0, cluster.encode(message))

    def _send(self, node: Node, kind: Kind, rank: int, life: int, body: bytes) -> None:
        if node.identity is None:
            return
        frames = cluster.cut(kind, rank, life, body, FRAME_BYTES)
        try:
            self._router.send_multipart([node.identity, *frames])
        except zmq.ZMQError:
            # The socket knows no such peer any more.
            self._lose(node)

    def _answer(self, identity: bytes, message: ToAgent) -> None:
        frames = cluster.cut(b"agent", 0, 0, cluster.encode(message), FRAME_BYTES)
        try:
            self._router.send_multipart([identity, *frames])
        except zmq.ZMQError:
            _log.debug("a host that was to be refused is gone")

    def _begin_closing(self) -> None:
        # First: whatever goes wrong with the others, somebody waits for the thread to end.
        self._closing = True
        self.tell_all(Goodbye())
        for node in self.nodes.values():
            for relay in list(node.relays.values()):
                self._remove(node, relay, -signal.SIGKILL, "")
