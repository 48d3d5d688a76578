"""Virtual links: when a transfer is complete, and what is an error. Times are in seconds."""

import random

import pytest
import torch

from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import LinkError
from headrace.protocol.ranks import Ranks
from headrace.simulation.virtual_links import (
    LinkMisuseError,
    VirtualClock,
    VirtualLink,
    VirtualNetwork,
)

FORWARD = Channel(Tensors.ACTIVATIONS, 0, 1)
BACK = Channel(Tensors.FEEDBACK, 1, 0)


def ends(
    latency: float = 0.0, bytes_per_s: float | None = None, channel: Channel = FORWARD
) -> tuple[VirtualClock, VirtualNetwork, VirtualLink, VirtualLink]:
    """A clock, a network of two stages, and the sending and the receiving end of an edge."""
    clock = VirtualClock()
    network = VirtualNetwork(clock, Ranks(2), lambda _: latency, bytes_per_s)
    source, target = network.links(channel.source), network.links(channel.target)
    return clock, network, source[channel], target[channel]


def message(value: int = 7, size: int = 100) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_message_takes_the_ready_notice_then_its_time_on_the_line_then_the_latency() -> None:
    clock, _, sender, receiver = ends(latency=1.0, bytes_per_s=50)
    buffer = torch.zeros(100, dtype=torch.uint8)
    sent, received = sender.send(message()), receiver.receive(buffer)
    assert sent.wait(10) == 1 + 2
    assert buffer[0] == 0, "it has left and is not there"
    assert received.wait(10) == 1 + 2 + 1
    assert clock.now == 4
    assert buffer[0] == 7


def test_a_receive_posted_early_saves_the_notices_way() -> None:
    clock, _, sender, receiver = ends(latency=1.0)
    received = receiver.receive(torch.zeros(100, dtype=torch.uint8))
    clock.run_next(until=5.0)
    sender.send(message())
    assert received.wait(10) == 6


def test_messages_of_an_edge_arrive_in_order_one_after_another_on_the_line() -> None:
    _, _, sender, receiver = ends(latency=1.0, bytes_per_s=100)
    buffers = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
    received = [receiver.receive(buffer) for buffer in buffers]
    sent = [sender.send(message(value)) for value in range(1, 4)]
    # Waiting in another order than starting is possible.
    assert [handle.wait(10) for handle in reversed(received)] == [5, 4, 3]
    assert [handle.wait(10) for handle in sent] == [2, 3, 4]
    assert [int(buffer[0]) for buffer in buffers] == [1, 2, 3]


def test_no_message_overtakes_another_however_the_delays_come() -> None:
    clock = VirtualClock(random.Random(1))
    delays = random.Random(2)
    network = VirtualNetwork(clock, Ranks(2), lambda _: delays.choice([0.0, 0.0, delays.random()]))
    buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(50)]
    received = [network.links(1)[FORWARD].receive(buffer) for buffer in buffers]
    for value in range(50):
        network.links(0)[FORWARD].send(torch.tensor([value]))
    moments = [handle.wait(100) for handle in received]
    assert moments == sorted(moments)
    assert torch.cat(buffers).tolist() == list(range(50))


def test_edges_are_independent_of_each_other() -> None:
    clock, network, sender, receiver = ends(latency=1.0, bytes_per_s=1)
    slow = receiver.receive(torch.zeros(100, dtype=torch.uint8))
    sender.send(message())
    answer = network.links(0)[BACK].receive(torch.zeros(1, dtype=torch.uint8))
    network.links(1)[BACK].send(message(size=1))
    assert answer.wait(10) == 3
    assert slow.wait(1000) == 102
    assert clock.now == 102


def test_a_sender_may_use_its_buffer_again_once_its_wait_has_returned() -> None:
    _, _, sender, receiver = ends(latency=1.0)
    buffer, data = torch.zeros(100, dtype=torch.uint8), message(7)
    received, sent = receiver.receive(buffer), sender.send(data)
    sent.wait(10)
    data.fill_(9)
    received.wait(10)
    assert buffer[0] == 7


@pytest.mark.parametrize("receiving", [True, False])
def test_a_wait_nobody_answers_is_an_error_at_its_deadline_and_the_end_of_the_link(
    receiving: bool,
) -> None:
    clock, _, sender, receiver = ends(latency=1.0)
    handle = receiver.receive(message()) if receiving else sender.send(message())
    with pytest.raises(LinkError, match=r"activations .* within 3 s .*stall-timeout"):
        handle.wait(3)
    assert clock.now == 3
    with pytest.raises(LinkError, match="the link is gone"):
        sender.send(message())


def test_what_arrives_at_the_very_deadline_is_in_time() -> None:
    _, _, sender, receiver = ends(latency=1.0)
    received = receiver.receive(torch.zeros(100, dtype=torch.uint8))
    sender.send(message())
    assert received.wait(2.0) == 2


def test_open_and_later_transfers_of_a_dead_peer_are_errors_that_name_it() -> None:
    clock, network, sender, receiver = ends(latency=1.0)
    on_its_way = receiver.receive(torch.zeros(100, dtype=torch.uint8))
    sender.send(message())
    unmatched = receiver.receive(torch.zeros(100, dtype=torch.uint8))
    clock.run_next(until=1.5)
    network.kill(0)
    for handle in (on_its_way, unmatched):
        with pytest.raises(LinkError, match="from stage 0: the link is gone") as caught:
            handle.wait(10)
        assert caught.value.peer == 0
    with pytest.raises(LinkError, match="to stage 0: the link is gone"):
        network.links(1)[BACK].send(message())
    assert clock.now == 1.5, "nobody waited for the deadline"


def test_what_was_complete_when_the_peer_died_stays_complete() -> None:
    clock, network, sender, receiver = ends()
    received = receiver.receive(torch.zeros(100, dtype=torch.uint8))
    sender.send(message())
    while clock.run_next():
        pass
    network.kill(0)
    assert received.wait(1) == 0


def test_breaking_the_rules_of_links_is_an_error_at_once() -> None:
    _, _, sender, receiver = ends()
    buffer = torch.zeros(4)
    receiver.receive(buffer)
    with pytest.raises(LinkMisuseError, match="used again before"):
        receiver.receive(buffer)
    with pytest.raises(LinkMisuseError, match=r"float32 \[5\] was sent where .*float32 \[4\]"):
        sender.send(torch.zeros(5))
    with pytest.raises(LinkMisuseError, match="not contiguous"):
        sender.send(torch.zeros(4, 4)[:, 0])
    with pytest.raises(LinkMisuseError, match="goes out"):
        sender.receive(torch.zeros(4))
    with pytest.raises(LinkMisuseError, match="comes in"):
        receiver.send(torch.zeros(4))


def orders_of_three_events(ties: random.Random | None) -> list[int]:
    clock, seen = VirtualClock(ties), list[int]()
    for number in range(3):
        clock.schedule(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]
    while clock.run_next():
        pass
    return seen


def test_events_of_one_moment_come_as_scheduled_or_in_a_seeds_order() -> None:
    assert orders_of_three_events(None) == [0, 1, 2]
    seen = [tuple(orders_of_three_events(random.Random(seed))) for seed in range(60)]
    assert len(set(seen)) == 6
    assert seen == [tuple(orders_of_three_events(random.Random(seed))) for seed in range(60)]


def test_the_clock_stops_at_the_moment_it_is_told_and_alarms_can_be_called_off() -> None:
    clock, seen = VirtualClock(), list[str]()
    clock.schedule(2.0, lambda: seen.append("event"))
    clock.cancel(clock.set_alarm(1.0, lambda: seen.append("cancelled")))
    clock.set_alarm(2.0, lambda: seen.append("alarm"))
    assert not clock.run_next(until=1.5)
    assert clock.now == 1.5
    assert clock.run_next(until=2.0)
    assert clock.idle, "an alarm is no event"
    assert clock.run_next(until=2.0)
    assert seen == ["event", "alarm"]
    assert not clock.run_next()
    assert clock.now == 2.0
