"""Bytes on the control sockets: MessagePack of the typed messages, checked when decoded."""

import msgspec

from headrace.protocol.messages import FromRank, ToRank
from headrace.protocol.plan import Plan, without_choice
from headrace.protocol.ranks import Ranks

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def encode_plan(plan: Plan, ranks: Ranks) -> list[bytes]:
    """What each rank is sent of a plan, by rank: one alone how tokens are chosen."""
    whole = encode(plan)
    others = plan if ranks.count == 1 else without_choice(plan)
    part = whole if others is plan else encode(others)
    return [whole if rank == ranks.sampler else part for rank in range(ranks.count)]


def decode_to_rank(data: bytes) -> ToRank:
    """A message from the engine; raises msgspec.ValidationError for anything else."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """A message from a stage; raises msgspec.ValidationError for anything else."""
    return _from_rank.decode(data)
