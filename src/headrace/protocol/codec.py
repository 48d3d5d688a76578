"""Bytes on the control sockets: MessagePack of the typed messages, checked when decoded."""

import msgspec

from headrace.protocol.messages import FromStage, ToStage
from headrace.protocol.plan import Plan, without_choice

_encoder = msgspec.msgpack.Encoder()
_to_stage: msgspec.msgpack.Decoder[ToStage] = msgspec.msgpack.Decoder(ToStage)
_from_stage: msgspec.msgpack.Decoder[FromStage] = msgspec.msgpack.Decoder(FromStage)


def encode(message: ToStage | FromStage) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def encode_plan(plan: Plan, num_stages: int) -> list[bytes]:
    """What each stage is sent of a plan, by stage: the last alone how tokens are chosen."""
    whole = encode(plan)
    others = plan if num_stages == 1 else without_choice(plan)
    return [whole if others is plan else encode(others)] * (num_stages - 1) + [whole]


def decode_to_stage(data: bytes) -> ToStage:
    """A message from the engine; raises msgspec.ValidationError for anything else."""
    return _to_stage.decode(data)


def decode_from_stage(data: bytes) -> FromStage:
    """A message from a stage; raises msgspec.ValidationError for anything else."""
    return _from_stage.decode(data)
