"""What the engine's host and the agents of the other hosts say to each other.

Besides, messages between the engine and its ranks pass through an agent, which does not look into
them. What crosses the network is one body, cut in frames, behind two frames that say whose it is.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from headrace.protocol.hosts import HostFacts, LinkFigures


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """What a host was told of the whole, by flags that all hosts are given."""

    nnodes: int
    pipeline_parallel_size: int
    tensor_parallel_size: int
    layer_partition: str | None


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """An agent's first message. node_rank: None for whichever is free. layout: None if it was told
    nothing."""

    version: str
    name: str
    node_rank: int | None
    layout: Layout | None


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """The answer: the agent says what its host is. model: as the engine was given it."""

    node_rank: int
    model: str


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The other answer: this host cannot take part; there is no use in trying again."""

    reason: str


class Facts(msgspec.Struct, tag="facts", array_like=True, frozen=True):
    """What the host is."""

    host: HostFacts


class AgentFailed(msgspec.Struct, tag="agent_failed", array_like=True, frozen=True):
    """The agent cannot do what it was asked; it ends."""

    reason: str


class StartRank(msgspec.Struct, tag="start_rank", array_like=True, frozen=True):
    """Start a rank's process. life: how many there were of it before. cpus, threads: for it.
    weights_from: the address of a host that sends its weights, empty if the model lies there."""

    rank: int
    life: int
    cpus: list[int]
    threads: int
    weights_from: str


class EndRank(msgspec.Struct, tag="end_rank", array_like=True, frozen=True):
    """Kill this process, if it still is there."""

    rank: int
    life: int


class RankEnded(msgspec.Struct, tag="rank_ended", array_like=True, frozen=True):
    """A process has ended, with this code (a signal's number negated). last_line: that it wrote."""

    rank: int
    life: int
    code: int
    last_line: str


class AskMemory(msgspec.Struct, tag="ask_memory", array_like=True, frozen=True):
    """How much memory is free there now?"""


class FreeMemory(msgspec.Struct, tag="free_memory", array_like=True, frozen=True):
    """free: bytes, of which promised only look free: other engines there were promised them. held:
    what this engine's ranks there have besides."""

    free: int
    promised: int
    held: int


class PromiseMemory(msgspec.Struct, tag="promise_memory", array_like=True, frozen=True):
    """Let other engines there know of the caches. cache_bytes: by rank."""

    cache_bytes: dict[int, int]


class AnswerLine(msgspec.Struct, tag="answer_line", array_like=True, frozen=True):
    """Listen for another host that measures its line to this one, and answer it. name: the line's.
    secret: for it alone. encrypted: or only authenticated."""

    name: str
    secret: bytes
    encrypted: bool


class LineOpen(msgspec.Struct, tag="line_open", array_like=True, frozen=True):
    """Where the host listens. interface: that which has the address, in words."""

    address: str
    interface: str


class MeasureLine(msgspec.Struct, tag="measure_line", array_like=True, frozen=True):
    """Measure the line to the host that answers there; the rest as it was told."""

    name: str
    secret: bytes
    encrypted: bool
    address: str


class LineMeasured(msgspec.Struct, tag="line_measured", array_like=True, frozen=True):
    """From this host to the other."""

    figures: LinkFigures


class LineFailed(msgspec.Struct, tag="line_failed", array_like=True, frozen=True):
    """What the host could not do, to be read after its name."""

    reason: str


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, frozen=True):
    """The engine has ended in order; so does the agent."""


ToldOfLine = LineOpen | LineMeasured | LineFailed
ToAgent = (
    Welcome
    | Refused
    | StartRank
    | EndRank
    | AskMemory
    | PromiseMemory
    | AnswerLine
    | MeasureLine
    | Goodbye
)
FromAgent = Join | Facts | AgentFailed | RankEnded | FreeMemory | ToldOfLine

# Whose a body is: the agent's; a rank's control socket's; a rank's other socket's, all its frames;
# nobody's, to see whether the other side is there.
Kind = Literal[b"agent", b"control", b"watch", b"there"]

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_life: msgspec.msgpack.Decoder[tuple[int, int]] = msgspec.msgpack.Decoder(tuple[int, int])
_frames: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])


def encode(message: ToAgent | FromAgent) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_to_agent(data: bytes) -> ToAgent:
    """A message to an agent; raises msgspec.DecodeError for anything else."""
    return _to_agent.decode(data)


def decode_from_agent(data: bytes) -> FromAgent:
    """A message from an agent; raises msgspec.DecodeError for anything else."""
    return _from_agent.decode(data)


def pack_frames(frames: list[bytes]) -> bytes:
    """All frames of a message as one body."""
    return _encoder.encode(frames)


def unpack_frames(data: bytes) -> list[bytes]:
    """Raises msgspec.DecodeError if they are none."""
    return _frames.decode(data)


def cut(kind: Kind, rank: int, life: int, body: bytes, frame_bytes: int) -> list[bytes]:
    """The frames that cross the network. rank, life: whose process; 0, 0 for the agent."""
    return [kind, _encoder.encode((rank, life)), *_pieces(body, frame_bytes)]


def put_together(frames: list[bytes]) -> tuple[bytes, int, int, bytes]:
    """Kind, rank, life and body of what was cut. Raises msgspec.DecodeError, ValueError if it is
    nothing of the sort."""
    kind, whose, *pieces = frames
    rank, life = _life.decode(whose)
    return kind, rank, life, pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pieces(body: bytes, frame_bytes: int) -> Iterator[bytes]:
    for begin in range(0, max(1, len(body)), frame_bytes):
        yield body[begin : begin + frame_bytes]
