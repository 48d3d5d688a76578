"""What stages may rely on from any link, each promise written once as what a rank does.

A scenario is a generator: it starts transfers itself, since that never blocks, and yields whatever
takes time. link_worker.py runs one in each of several processes, on real links and the real clock;
virtual_ranks.py runs all ranks in one process, on virtual links and a virtual clock.
"""

import itertools
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace.pipeline.ledger import Channel, Handle, Tensors
from headrace.pipeline.links import Link, LinkError
from headrace.protocol.messages import LinkEmulation

# Elements of int64: 32 bytes, 1 MB.
SMALL, LARGE = 4, 1 << 17
STEPS = 8
# Seconds. Ample: only a hang takes so long.
LONG = 30.0
# The deadline of waits that are to end by it.
SHORT = 1.0


@dataclass(frozen=True)
class Wait:
    """Value: what the handle's wait(timeout_s) returns; its LinkError is raised here."""

    handle: Handle
    timeout_s: float = LONG


@dataclass(frozen=True)
class Pause:
    """Let so many seconds pass."""

    seconds: float


@dataclass(frozen=True)
class Meet:
    """Go on once every rank is here. Needs no link."""


@dataclass(frozen=True)
class Die:
    """The rank ends at once, without a word to anybody."""


Scenario = Generator[Wait | Pause | Meet | Die, Any, None]


@dataclass(frozen=True)
class Rank:
    """Where a scenario runs. now: the clock that handles' moments are of, the same for all ranks.

    buffers_sends: a send may be complete although nobody received it.
    """

    number: int
    links: Mapping[Channel, Link]
    device: torch.device
    now: Callable[[], float]
    emulation: LinkEmulation
    buffers_sends: bool

    def incoming(self) -> Iterator[tuple[Channel, Link]]:
        return ((c, link) for c, link in self.links.items() if c.target == self.number)

    def outgoing(self) -> Iterator[tuple[Channel, Link]]:
        return ((c, link) for c, link in self.links.items() if c.source == self.number)

    def filled(self, value: int, size: int) -> torch.Tensor:
        return torch.full((size,), value).to(self.device)


def message(channel: Channel, step: int, size: int) -> torch.Tensor:
    """int64 [size] that tells edge, step and place, on the CPU."""
    return torch.arange(size) + (100 * channel.source + 10 * channel.target + step) * LARGE


def size_of(step: int) -> int:
    return LARGE if step % 3 == 0 else SMALL


@dataclass(frozen=True)
class _Started:
    handle: Handle
    tensor: torch.Tensor
    expected: torch.Tensor

    def finish(self) -> Scenario:
        yield Wait(self.handle)
        assert torch.equal(self.tensor.cpu(), self.expected)


def _receive(rank: Rank, channel: Channel, link: Link, step: int) -> _Started:
    buffer = rank.filled(-1, size_of(step))
    # As a stage does, which has only some of its receives watched.
    receive = link.receive(buffer, watched=step % 2 == 0)
    return _Started(receive, buffer, message(channel, step, size_of(step)))


def _send(rank: Rank, channel: Channel, link: Link, step: int) -> _Started:
    expected = message(channel, step, size_of(step))
    tensor = expected.to(rank.device, copy=True)
    return _Started(link.send(tensor), tensor, expected)


# Promises that leave the links as they were


def all_edges_at_once(rank: Rank, order: str) -> Scenario:
    """Small and large, both directions, ranks out of step; waited for in any order."""
    started = []
    for step in range(STEPS):
        for channel, link in rank.links.items():
            start = _receive if channel.target == rank.number else _send
            started.append(start(rank, channel, link, step))
    if order == "backwards":
        started.reverse()
    if order == "shuffled":
        random.Random(rank.number).shuffle(started)
    for transfer in started:
        yield from transfer.finish()


def posting_all_receives_first_does_not_block(rank: Rank) -> Scenario:
    receives = [_receive(rank, *edge, step) for step in range(STEPS) for edge in rank.incoming()]
    yield Meet()
    sends = [_send(rank, *edge, step) for step in range(STEPS) for edge in rank.outgoing()]
    for transfer in [*sends, *receives]:
        yield from transfer.finish()


def posting_all_sends_first_does_not_block(rank: Rank) -> Scenario:
    sends = [_send(rank, *edge, step) for step in range(STEPS) for edge in rank.outgoing()]
    yield Meet()
    receives = [_receive(rank, *edge, step) for step in range(STEPS) for edge in rank.incoming()]
    # Each send completes now that its receive is posted, whether or not anybody waits for that.
    for transfer in [*sends, *receives]:
        yield from transfer.finish()


def buffers_are_the_stages_own_before_and_after(rank: Rank) -> Scenario:
    """Nothing writes into a buffer before its receive, nothing reads one after its send's wait."""
    marks = {channel: rank.filled(-7, LARGE) for channel, _ in rank.incoming()}
    for step in range(4):
        size = size_of(step)
        sends = [_send(rank, *edge, step) for edge in rank.outgoing()]
        yield Meet()
        yield Pause(0.02)
        # The message is under way, its receive is not posted.
        assert all((buffer == -7).all() for buffer in marks.values())
        receives = [(c, link.receive(marks[c][:size])) for c, link in rank.incoming()]
        for send in sends:
            yield from send.finish()
            send.tensor.fill_(-9)
        # Now every send was waited for and its buffer overwritten.
        yield Meet()
        for channel, handle in receives:
            yield Wait(handle)
            buffer = marks[channel]
            assert torch.equal(buffer[:size].cpu(), message(channel, step, size))
            assert (buffer[size:] == -7).all()
            buffer.fill_(-7)
    yield Pause(0.02)
    assert all((buffer == -7).all() for buffer in marks.values())


def messages_of_any_size_arrive_whole(rank: Rank) -> Scenario:
    """From 4 bytes to 64 MiB, of another order than the sizes of what came before."""
    sizes = [1, 1 << 24, 3, 1 << 18, 1 << 24, 1000]
    for size in sizes:
        expected = torch.arange(size, dtype=torch.int32)
        buffers = [torch.zeros(size, dtype=torch.int32, device=rank.device) for _ in rank.links]
        receives = [
            (link.receive(buffer), buffer)
            for buffer, (_, link) in zip(buffers, rank.incoming(), strict=False)
        ]
        sends = [link.send(expected.to(rank.device)) for _, link in rank.outgoing()]
        for receive, buffer in receives:
            yield Wait(receive)
            assert torch.equal(buffer.cpu(), expected)
        for send in sends:
            yield Wait(send)


def a_thousand_messages_wait_for_their_receives(rank: Rank) -> Scenario:
    """More than any socket takes: no send blocks all the same, and order is kept."""
    count = 1000
    numbers = [rank.filled(number, SMALL) for number in range(count)]
    sends = [link.send(tensor) for _, link in rank.outgoing() for tensor in numbers]
    yield Meet()
    received = [
        [(link.receive(buffer), buffer) for buffer in (rank.filled(-1, SMALL) for _ in numbers)]
        for _, link in rank.incoming()
    ]
    for send in sends:
        yield Wait(send)
    for of_edge in received:
        for (receive, buffer), expected in zip(of_edge, numbers, strict=True):
            yield Wait(receive)
            assert torch.equal(buffer, expected)


def a_moment_is_the_transfers_own_however_late_it_is_looked_at(rank: Rank) -> Scenario:
    receives = []
    for _, link in rank.incoming():
        buffers = [torch.zeros(1, dtype=torch.float64, device=rank.device) for _ in range(2)]
        receives.append((buffers[0], [link.receive(buffer) for buffer in buffers]))
    yield Meet()
    sends = []
    for _, link in rank.outgoing():
        for _ in range(2):
            tensor = torch.tensor([rank.now()], dtype=torch.float64, device=rank.device)
            sends.append((link.send(tensor), tensor))
    for sent_at, (first, second) in receives:
        second_at = yield Wait(second)
        yield Pause(0.05)
        looked_at = rank.now()
        first_at = yield Wait(first)
        # An edge is in order, so the first was complete when the second was.
        assert sent_at.item() <= first_at <= second_at <= looked_at - 0.05
    for send, _ in sends:
        yield Wait(send)


def a_message_takes_the_latency_once_if_its_receive_was_posted_ahead(rank: Rank) -> Scenario:
    latency = rank.emulation.latency_s
    receives = [_timed_receive(rank, link) for _, link in rank.incoming()]
    yield Meet()
    # Every notice has come.
    yield Pause(latency)
    sends = [_timed_send(rank, link) for _, link in rank.outgoing()]
    for buffer, handle in receives:
        at = yield Wait(handle)
        assert at >= _sent_at(buffer) + latency
        # The wait does not end before the moment that it names.
        assert rank.now() >= at
    for _, handle in sends:
        yield Wait(handle)


def a_message_takes_it_twice_if_its_receive_was_posted_at_the_moment(rank: Rank) -> Scenario:
    sends = [_timed_send(rank, link) for _, link in rank.outgoing()]
    yield Meet()
    posted_at = rank.now()
    receives = [_timed_receive(rank, link) for _, link in rank.incoming()]
    for _, handle in receives:
        at = yield Wait(handle)
        assert at >= posted_at + 2 * rank.emulation.latency_s
    for _, handle in sends:
        yield Wait(handle)


def messages_follow_one_another_on_the_line(rank: Rank) -> Scenario:
    latency, per_s = rank.emulation.latency_s, rank.emulation.bytes_per_s
    on_line = 8 * LARGE / per_s if per_s else 0.0
    count = 6
    receives = [
        [link.receive(rank.filled(-1, LARGE)) for _ in range(count)] for _, link in rank.incoming()
    ]
    yield Meet()
    sent_at = rank.now()
    sends = [link.send(rank.filled(3, LARGE)) for _, link in rank.outgoing() for _ in range(count)]
    for handles in receives:
        moments = []
        for handle in handles:
            moments.append((yield Wait(handle)))
        assert moments[0] >= sent_at + on_line + latency
        for before, after in itertools.pairwise(moments):
            assert after - before >= on_line - 1e-9
    for send in sends:
        yield Wait(send)


def a_burst_takes_the_latency_once_and_not_each(rank: Rank) -> Scenario:
    count = 32
    receives = [
        [link.receive(rank.filled(-1, SMALL)) for _ in range(count)] for _, link in rank.incoming()
    ]
    yield Meet()
    sent_at = rank.now()
    sends = [link.send(rank.filled(3, SMALL)) for _, link in rank.outgoing() for _ in range(count)]
    for handles in receives:
        for handle in handles:
            at = yield Wait(handle)
        # Two are due. The rest of the room is for a machine that stands still for seconds.
        assert at < sent_at + count * rank.emulation.latency_s
    for send in sends:
        yield Wait(send)


def waiting_costs_no_cpu(rank: Rank) -> Scenario:
    """Real processes only. Every other rank sends late; its neighbour waits meanwhile."""
    late, pause_s = rank.number % 2 == 1, 0.3
    receives = [link.receive(rank.filled(-1, SMALL)) for _, link in rank.incoming()]
    yield Meet()
    sends = []
    if late:
        yield Pause(pause_s)
        sends = [link.send(rank.filled(3, SMALL)) for _, link in rank.outgoing()]
    began, cpu_s = rank.now(), time.process_time()
    for receive in receives:
        yield Wait(receive)
    waited_s, cpu_s = rank.now() - began, time.process_time() - cpu_s
    if not late:
        # On a busy machine the pause may be over before the wait begins.
        assert cpu_s < max(waited_s, pause_s) / 4
        sends = [link.send(rank.filled(3, SMALL)) for _, link in rank.outgoing()]
    for send in sends:
        yield Wait(send)


PROMISES: dict[str, Callable[[Rank], Scenario]] = {
    "all_edges_at_once": partial(all_edges_at_once, order="as_started"),
    "waiting_backwards": partial(all_edges_at_once, order="backwards"),
    "waiting_in_any_order": partial(all_edges_at_once, order="shuffled"),
    **{
        scenario.__name__: scenario
        for scenario in (
            posting_all_receives_first_does_not_block,
            posting_all_sends_first_does_not_block,
            buffers_are_the_stages_own_before_and_after,
            messages_of_any_size_arrive_whole,
            a_thousand_messages_wait_for_their_receives,
            a_moment_is_the_transfers_own_however_late_it_is_looked_at,
        )
    },
}
SLOW_LINE: dict[str, Callable[[Rank], Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        a_message_takes_the_latency_once_if_its_receive_was_posted_ahead,
        a_message_takes_it_twice_if_its_receive_was_posted_at_the_moment,
        messages_follow_one_another_on_the_line,
        a_burst_takes_the_latency_once_and_not_each,
    )
}


# The deadly ones, each alone on a world of two


def a_silent_peer_is_an_error_by_the_deadline(rank: Rank) -> Scenario:
    """Rank 0 does nothing, and then finds that its neighbour gave up."""
    there, back = _both_ways(rank)
    if rank.number == 0:
        yield Meet()
        yield from _fails(lambda: there.send(rank.filled(0, SMALL)), rank.buffers_sends)
        if not rank.buffers_sends:
            yield from _fails(lambda: back.receive(rank.filled(0, SMALL)))
        return
    receives = [there.receive(rank.filled(0, size)) for size in (SMALL, LARGE)]
    began = rank.now()
    assert (yield from _error_of(receives[0], SHORT)) == (
        "waiting for activations from stage 0: nothing came within 1 s (if a step may take that "
        "long, raise --stall-timeout)"
    )
    assert SHORT <= rank.now() - began < SHORT + 5
    # No link survives it: the rest fails at once, whether started before or after.
    assert (yield from _error_of(receives[1])) == (
        "waiting for activations from stage 0: the link is gone"
    )
    yield from _fails(lambda: there.receive(rank.filled(0, SMALL)))
    if not rank.buffers_sends:
        sends = [back.send(rank.filled(0, size)) for size in (LARGE, SMALL)]
        late = yield from _error_of(sends[0], SHORT)
        assert late is not None
        assert late.startswith("sending feedback to stage 0: it was not taken within 1 s")
        assert (yield from _error_of(sends[1])) == "sending feedback to stage 0: the link is gone"
        yield from _fails(lambda: back.send(rank.filled(0, SMALL)))
    yield Meet()


def a_dying_peer_is_an_error_at_once(rank: Rank) -> Scenario:
    """Rank 0 vanishes while its neighbour waits for it."""
    there, back = _both_ways(rank)
    if rank.number == 0:
        yield Meet()
        yield Pause(0.2)
        yield Die()
    receives = [there.receive(rank.filled(0, size)) for size in (SMALL, LARGE)]
    send = back.send(rank.filled(0, LARGE))
    yield Meet()
    for receive in receives:
        assert (yield from _error_of(receive)) == (
            "waiting for activations from stage 0: the link is gone"
        )
    lost = yield from _error_of(send)
    assert lost == "sending feedback to stage 0: the link is gone" or (
        rank.buffers_sends and lost is None
    )
    yield from _fails(lambda: there.receive(rank.filled(0, SMALL)))
    yield from _fails(lambda: back.send(rank.filled(0, SMALL)), rank.buffers_sends)


def a_peer_that_dies_in_the_middle_leaves_whole_messages_or_an_error(rank: Rank) -> Scenario:
    """Rank 0 vanishes while large messages are under way."""
    there, _ = _both_ways(rank)
    count, size = 8, 8 * LARGE
    if rank.number == 0:
        yield Meet()
        for number in range(count):
            there.send(rank.filled(number, size))
        yield Die()
    buffers = [rank.filled(-1, size) for _ in range(count + 1)]
    receives = [(there.receive(buffer), buffer) for buffer in buffers]
    yield Meet()
    errors = []
    for number, (receive, buffer) in enumerate(receives):
        errors.append((yield from _error_of(receive)))
        if errors[-1] is None:
            assert errors == [None] * (number + 1), "a link came back"
            assert (buffer == number).all()
    # One more was received than was ever sent.
    assert errors[-1] == "waiting for activations from stage 0: the link is gone"
    yield from _fails(lambda: there.receive(rank.filled(0, SMALL)))


DEADLY: dict[str, Callable[[Rank], Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        a_silent_peer_is_an_error_by_the_deadline,
        a_dying_peer_is_an_error_at_once,
        a_peer_that_dies_in_the_middle_leaves_whole_messages_or_an_error,
    )
}
ALL = {**PROMISES, **SLOW_LINE, **DEADLY, "waiting_costs_no_cpu": waiting_costs_no_cpu}


def _both_ways(rank: Rank) -> tuple[Link, Link]:
    """The edges from rank 0 to rank 1 and back."""
    return (
        rank.links[Channel(Tensors.ACTIVATIONS, 0, 1)],
        rank.links[Channel(Tensors.FEEDBACK, 1, 0)],
    )


def _error_of(handle: Handle, timeout_s: float = LONG) -> Generator[Wait, Any, str | None]:
    """The text of the LinkError that waiting raises; None if there is none."""
    try:
        yield Wait(handle, timeout_s)
    except LinkError as error:
        return str(error)
    return None


def _fails(start: Callable[[], Handle], may_be_buffered: bool = False) -> Scenario:
    """Starting on a dead link fails, or waiting does, at once."""
    error: str | None
    try:
        handle = start()
    except LinkError as raised:
        error = str(raised)
    else:
        error = yield from _error_of(handle)
        if may_be_buffered and error is None:
            return
    assert error is not None
    assert error.endswith("the link is gone")


def _timed_send(rank: Rank, link: Link) -> tuple[torch.Tensor, Handle]:
    tensor = torch.tensor([rank.now()], dtype=torch.float64, device=rank.device)
    return tensor, link.send(tensor)


def _timed_receive(rank: Rank, link: Link) -> tuple[torch.Tensor, Handle]:
    buffer = torch.zeros(1, dtype=torch.float64, device=rank.device)
    return buffer, link.receive(buffer)


def _sent_at(buffer: torch.Tensor) -> float:
    return float(buffer.item())
