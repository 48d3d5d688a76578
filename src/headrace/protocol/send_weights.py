"""What a host that lacks a model's files asks one that has them, and the answers.

Each is answered in the order asked, by an Answer and then its bytes, cut in messages of a frame
each: so whoever receives them need not hold more than fits a piece.
"""

import msgspec

from headrace.protocol.program import Program
from headrace.protocol.stage_files import Piece, StageFiles


class AskFiles(msgspec.Struct, tag="files", frozen=True, array_like=True):
    """What does a rank with this program need? The answer's bytes are an Offer."""

    program: Program


class AskPiece(msgspec.Struct, tag="piece", frozen=True, array_like=True):
    """The answer's bytes are the piece's."""

    piece: Piece


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """nbytes: how many follow. digest: theirs (checkpoint/stage_files.py). refusal: why there are
    none, or empty."""

    nbytes: int
    digest: str
    refusal: str


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """identity: a hash, in hexadecimal, that no other files have. files: what the rank needs."""

    identity: str
    files: StageFiles


Ask = AskFiles | AskPiece

_encoder = msgspec.msgpack.Encoder()
_ask: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_offer: msgspec.msgpack.Decoder[Offer] = msgspec.msgpack.Decoder(Offer)


def encode(message: Ask | Answer | Offer) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_ask(data: bytes) -> Ask:
    """Raises msgspec.DecodeError for anything else."""
    return _ask.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError for anything else."""
    return _answer.decode(data)


def decode_offer(data: bytes) -> Offer:
    """Raises msgspec.DecodeError for anything else."""
    return _offer.decode(data)
