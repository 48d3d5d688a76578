"""Asking stages what they do, at any moment: also while they compute or wait.

Each stage has a second socket for it, with a thread of its own, since its control socket is read
between steps only. A stage that does not answer is stopped, dead, or in a call that never lets the
interpreter run.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from headrace.pipeline.timeline import RankTimeline
from headrace.protocol import codec
from headrace.protocol.messages import Activity, ShowTimeline, Timeline


@dataclass
class Watch:
    """What a rank shows: the time line of the epoch that it is in."""

    timeline: RankTimeline


def answer_when_asked(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, watch: Watch
) -> None:
    """In a rank: show its time line to whoever asks at the address, until the context ends."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    threading.Thread(target=_answer, args=(socket, watch), name="watch", daemon=True).start()


def _answer(socket: "zmq.Socket[bytes]", watch: Watch) -> None:
    try:
        while True:
            message = codec.decode_to_rank(socket.recv())
            assert isinstance(message, ShowTimeline)
            socket.send(codec.encode(watch.timeline.show(message.last, time.monotonic())))
    except zmq.ContextTerminated:
        pass
    finally:
        socket.close()


def connect_watch(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    """In the engine's process: the socket to ask() one stage with."""
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    # One that was not answered may be asked again, and its late answer is then dropped.
    socket.setsockopt(zmq.REQ_RELAXED, 1)
    socket.setsockopt(zmq.REQ_CORRELATE, 1)
    socket.connect(address)
    return socket


def ask(stages: "Sequence[zmq.Socket[bytes]]", last: int, timeout_s: float) -> list[Timeline]:
    """The time lines of the stages that answer in time, in rank order, on this process's clock.

    last: how many activities of each, at most.
    """
    asked_at = time.monotonic()
    poller = zmq.Poller()
    for socket in stages:
        socket.send(codec.encode(ShowTimeline(last)))
        poller.register(socket, zmq.POLLIN)
    answers: list[Timeline] = []
    while len(answers) < len(stages) and (left_s := asked_at + timeout_s - time.monotonic()) > 0:
        for socket, _ in poller.poll(max(1, int(left_s * 1000))):
            assert isinstance(socket, zmq.Socket)
            try:
                answer = codec.decode_from_rank(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                # A late answer to what was asked before, which zmq has dropped.
                continue
            assert isinstance(answer, Timeline)
            answers.append(on_clock_of_asker(answer, asked_at, time.monotonic()))
            poller.unregister(socket)
    return sorted(answers, key=lambda answer: answer.rank)


def on_clock_of_asker(timeline: Timeline, asked_at: float, answered_at: float) -> Timeline:
    """The time line with its moments on the clock on which it was asked for and answered.

    The stage looked at its own clock somewhere in between; half-way is the best guess. Where both
    clocks may be the same, as on one host they are, they are taken to be.
    """
    if asked_at <= timeline.now <= answered_at:
        return timeline
    offset = (asked_at + answered_at) / 2 - timeline.now
    moved = [
        Activity(
            kind=activity.kind,
            step=activity.step,
            microbatch=activity.microbatch,
            of=activity.of,
            began=activity.began + offset,
            ended=None if activity.ended is None else activity.ended + offset,
        )
        for activity in timeline.activities
    ]
    return Timeline(timeline.rank, timeline.now + offset, moved)
