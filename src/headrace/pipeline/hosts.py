"""The other hosts, as the engine's host has them: who has joined, and the ranks that run there.

A thread (pipeline/hosts_thread.py) has the one socket that they all connect to, the only one that
the engine's process opens to the network, beside its HTTP server.

A host that is gone may come again. Ranks that were to be started on it meanwhile are started then;
those that ran there have ended.
"""

import queue
import time
from collections.abc import Callable
from pathlib import Path

from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.host.cpus import StageCpus
from headrace.pipeline.curve import Door
from headrace.pipeline.forks import leave_in_forks
from headrace.pipeline.hosts_thread import LOOK_S, HostsThread, Node
from headrace.pipeline.remote_process import RemoteProcess
from headrace.pipeline.weights_sender import WeightsSender
from headrace.protocol.cluster import (
    AnswerLine,
    AskMemory,
    Facts,
    FreeMemory,
    Layout,
    MeasureLine,
    Refused,
    ToldOfLine,
)
from headrace.signals import put_off

# Seconds until a host answers a simple question.
_ANSWER_S = 20.0


class Hosts:
    """The hosts beside this one, by their node ranks, from 1. Always close() it."""

    def __init__(
        self,
        door: Door,
        secret: Secret,
        layout: Layout,
        model: str,
        *,
        how_to_join: str,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """door: where they connect. model: as they find it, unless they are told otherwise.
        how_to_join: what to do about one that is missing. on_closed: called once they were told
        that the engine has ended."""
        self._door, self._layout = door, layout
        self._how_to_join, self._on_closed = how_to_join, on_closed
        self._lives = 0
        self._thread = HostsThread(door, secret, layout, model)
        leave_in_forks(self)

    def wait_joined(self, timeout_s: float, check: Callable[[], None]) -> list[Facts]:
        """What every host is, by node rank from 1. check: called once a second or more often, may
        raise. Raises StartError naming who is missing, and what a host reports."""
        waited_s = 0.0
        while True:
            check()
            # The condition would stay locked, for the thread too, if its own code were interrupted.
            with put_off(), self._thread.changed:
                began = time.monotonic()
                if missing := [node for node in self._thread.nodes.values() if node.facts is None]:
                    self._thread.changed.wait(LOOK_S)
            waited_s += min(LOOK_S, time.monotonic() - began)
            if self._thread.failure is not None:
                raise StartError(self._thread.failure)
            if not missing:
                facts = (node.facts for node in self._thread.nodes.values())
                return [each for each in facts if each is not None]
            if waited_s > timeout_s:
                raise StartError(self._who_is_missing(missing, timeout_s))

    def agree(self, weights: str, sender: WeightsSender | None) -> None:
        """What all hosts have, or lack, now and when they come again. weights: the total of their
        digest. sender: sends them to those that lack them, None if nobody does; closed with this.
        To be called before a rank is started."""
        self._thread.weights, self._thread.sender = weights, sender

    def refuse(self, reason: str) -> None:
        """Tell all hosts that they cannot take part."""
        self._thread.order(lambda: self._thread.tell_all(Refused(reason)))

    def facts(self, node: int) -> Facts:
        """What a host that has joined was when it last did."""
        facts = self._thread.nodes[node].facts
        assert facts is not None
        return facts

    def start_rank(self, node: int, rank: int, cpus: StageCpus, folder: Path) -> RemoteProcess:
        """Have it started there, at once or when the host is there again.

        The engine finds its sockets in the folder, as if it ran here.
        """
        self._lives += 1
        life = self._lives

        def kill() -> None:
            self._thread.order(lambda: self._thread.kill(node, process))

        process = RemoteProcess(rank, life, folder, kill)
        relay = self._thread.relay(process, cpus)
        self._thread.order(lambda: self._thread.add(node, relay))
        return process

    def free_memory(self, node: int) -> FreeMemory:
        """Of a host, now. Raises StartError if it does not say."""
        asked = self._thread.nodes[node]
        answers = asked.answers
        while not answers.empty():
            # It came too late for whoever asked before.
            answers.get()
        self._thread.order(lambda: self._thread.tell(asked, AskMemory()))
        try:
            return answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise StartError(
                f"host {asked.name} did not say within {_ANSWER_S:g} s how much memory is free "
                "there"
            ) from None

    def order_line(
        self, node: int, order: AnswerLine | MeasureLine
    ) -> "queue.SimpleQueue[ToldOfLine]":
        """Have a host do its part in measuring a line, one at a time; what it says comes there."""
        self._thread.order(lambda: self._thread.tell(self._thread.nodes[node], order))
        return self._thread.nodes[node].of_lines

    def is_there(self, node: int) -> bool:
        """Whether a host takes part now."""
        return self._thread.nodes[node].identity is not None

    def away(self) -> dict[int, float]:
        """The hosts that have taken part and do not now, by their node ranks: for how many
        seconds."""
        now = time.monotonic()
        lost = [node for node in self._thread.nodes.values() if node.facts and not node.identity]
        return {node.number: now - node.lost_at for node in lost}

    def promise_memory(self, cache_bytes: dict[int, int]) -> None:
        """Let other engines on the hosts know of their ranks' caches. cache_bytes: by rank."""
        self._thread.order(lambda: self._thread.promise_memory(cache_bytes))

    def leave(self) -> None:
        """In a fork of the process that has them: hold nothing by which they tell that it lives."""
        self._door.leave()
        self._thread.leave()

    def close(self) -> None:
        """Tell the agents that the engine has ended; may be called again."""
        if not self._thread.end():
            return
        self._door.shut()
        if self._thread.sender is not None:
            self._thread.sender.close()
        self._thread.release()
        self._on_closed()

    def _who_is_missing(self, missing: list[Node], timeout_s: float) -> str:
        connected = [node for node in missing if node.joined]
        if connected:
            names = " and ".join(node.name for node in connected)
            return f"{names} joined, but did not say what it has within {timeout_s:g} s"
        numbers = " and ".join(str(node.number) for node in missing)
        address = self._door.address.removeprefix("tcp://")
        return (
            f"no host with --node-rank {numbers} of {self._layout.nnodes} hosts (--nnodes) joined "
            f"at {address} within {timeout_s:g} s: {self._how_to_join}"
        )
