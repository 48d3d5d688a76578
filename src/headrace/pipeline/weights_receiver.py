"""Receives what a rank needs of a model's files, from a host that has them.

Nothing that comes is believed: names and sizes are looked at before anything is made of them, no
more is taken in than was asked for, and each piece has to have its hash. What came stays when the
connection is cut, or this process ends.
"""

import fcntl
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.received_files import ReceivedFiles
from headrace.checkpoint.stage_files import PIECE_BYTES
from headrace.errors import ModelError, StartError
from headrace.host.cluster_key import Secret
from headrace.pipeline.curve import FRAME_BYTES, Context, Socket, show_key
from headrace.pipeline.weights_sender import WEIGHTS
from headrace.protocol import send_weights
from headrace.protocol.program import Program
from headrace.protocol.send_weights import Ask, AskFiles, AskPiece, Offer

# Pieces that are asked for before the first of them is here, so that the line is never idle; and
# messages that have come and wait to be taken, a quarter of that.
_AHEAD = 4
_HELD = _AHEAD * PIECE_BYTES // FRAME_BYTES // 4
# Of an offer at most: some millions of pieces.
_MOST_OFFER_BYTES = 1 << 26
_IDENTITY = re.compile(r"[0-9a-f]{32}")
# Seconds between two looks whether it is still wanted, for a connection to be let in, between two
# tries of that, and without anything after which it is given up.
_LOOK_S = 0.2
_CONNECT_S = 3.0
_AGAIN_S = 0.5
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Received:
    """files: from which the rank loads. came, there: bytes that came now, and that had before."""

    files: ModelFiles
    came: int
    there: int


@dataclass(frozen=True)
class Source:
    """A host that has the model's files. address: of its WeightsSender. secret: the cluster's."""

    address: str
    secret: Secret


def receive_weights(
    source: Source,
    program: Program,
    folder: Path,
    on_progress: Callable[[float], None],
    check: Callable[[], None],
) -> Received:
    """What the program needs, in a folder of the model's own within this one.

    on_progress: told the part that is there, from 0 to 1, and called now and then while others
    receive into the same folder. check: called once a second or more often, may raise. Raises
    StartError if nothing comes, ModelError for what cannot be sent, received or kept.
    """
    context = zmq.Context()
    connection = _Connection(context, source, check)
    try:
        ((data, _),) = connection.answers([(AskFiles(program), _MOST_OFFER_BYTES)])
        offer = _checked_offer(source, data)
        with _alone_in(folder / offer.identity, on_progress, check):
            return _receive(connection, offer, folder / offer.identity, on_progress, check)
    finally:
        connection.close()
        context.term()


def _receive(
    connection: "_Connection",
    offer: Offer,
    folder: Path,
    on_progress: Callable[[float], None],
    check: Callable[[], None],
) -> Received:
    pieces = offer.files.pieces
    total, done = sum(piece.nbytes for piece in pieces), 0

    def count(nbytes: int) -> None:
        nonlocal done
        check()
        done += nbytes
        on_progress(done / total)

    received = ReceivedFiles(folder, offer.files, count)
    coming = received.missing_bytes
    numbers = list(received.missing)
    asks = [(AskPiece(pieces[number]), pieces[number].nbytes) for number in numbers]
    for number, (data, digest) in zip(numbers, connection.answers(asks), strict=True):
        received.put(number, data, digest)
        count(len(data))
    return Received(received.files, coming, total - coming)


def _checked_offer(source: Source, data: bytes) -> Offer:
    try:
        offer = send_weights.decode_offer(data)
    except msgspec.DecodeError as error:
        raise ModelError(f"{source.address} offers what is no model: {error}") from error
    if not _IDENTITY.fullmatch(offer.identity):
        raise ModelError(f"{source.address} offers a model {offer.identity[:100]!r}, which is none")
    if any(not 0 < piece.nbytes <= PIECE_BYTES for piece in offer.files.pieces):
        raise ModelError(f"{source.address} offers a piece of more than {PIECE_BYTES} bytes")
    return offer


class _Connection:
    """To a host that sends; made again when it is cut."""

    def __init__(self, context: Context, source: Source, check: Callable[[], None]) -> None:
        self._context, self._source, self._check = context, source, check
        self._socket: Socket | None = None
        # Seconds spent waiting since something came.
        self._quiet_s = 0.0

    def answers(self, asks: Sequence[tuple[Ask, int]]) -> Iterator[tuple[bytes, str]]:
        """The bytes and hash of each answer, in order. asks: each with the most bytes that the
        answer may have."""
        # asked: so many of the first were asked for over this connection.
        waiting, asked = deque(asks), 0
        while waiting:
            try:
                while asked < min(_AHEAD, len(waiting)):
                    self._ask(waiting[asked][0])
                    asked += 1
                answer = self._answer(waiting[0][1])
            except ConnectionError:
                self.close()
                asked = 0
                self._wait(_AGAIN_S)
                continue
            waiting.popleft()
            asked -= 1
            yield answer

    def close(self) -> None:
        """Receive no more, unless there is more to ask for."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _ask(self, ask: Ask) -> None:
        data = send_weights.encode(ask)
        frames = [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
        try:
            self._connected().send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ConnectionError from error

    def _answer(self, most: int) -> tuple[bytes, str]:
        """The next; ConnectionError if the connection is cut before all of it is here."""
        try:
            head = send_weights.decode_answer(self._message())
        except msgspec.DecodeError as error:
            raise ModelError(f"{self._source.address} sent what is no answer: {error}") from error
        if head.refusal:
            why = " ".join(head.refusal[:1000].split())
            raise ModelError(f"{self._source.address} does not send it: {why}")
        data = bytearray()
        # As far as it says, but no further than was asked for.
        while len(data) < head.nbytes <= most:
            data += self._message()
        if not 0 <= head.nbytes == len(data) <= most:
            raise ModelError(
                f"{self._source.address} sent {max(head.nbytes, len(data))} bytes, where there are "
                f"{most} at most"
            )
        return bytes(data), head.digest

    def _message(self) -> bytes:
        receiving = self._connected()
        while not receiving.poll(int(_LOOK_S * 1000)):
            if not receiving.poll(0, zmq.POLLOUT):
                raise ConnectionError
            self._wait(0)
        self._quiet_s = 0.0
        return receiving.recv()

    def _connected(self) -> Socket:
        while self._socket is None:
            connecting = self._context.socket(zmq.DEALER)
            show_key(connecting, WEIGHTS, self._source.secret)
            # What was asked over another connection has to be asked again.
            connecting.setsockopt(zmq.RECONNECT_IVL, -1)
            # Beyond, the sender waits.
            connecting.set_hwm(_HELD)
            connecting.connect(self._source.address)
            if self._let_in(connecting):
                self._socket = connecting
                break
            connecting.close(0)
        return self._socket

    def _let_in(self, connecting: Socket) -> bool:
        """Whether the sender does, soon."""
        try:
            for _ in range(round(_CONNECT_S / _LOOK_S)):
                if connecting.poll(int(_LOOK_S * 1000), zmq.POLLOUT):
                    return True
                self._wait(0)
        except BaseException:
            connecting.close(0)
            raise
        return False

    def _wait(self, seconds: float) -> None:
        """After a look at which nothing was there. Raises StartError if there were too many."""
        self._check()
        time.sleep(seconds)
        # Not by the clock: while this process is stopped it does not look.
        self._quiet_s += _LOOK_S + seconds
        if self._quiet_s > _PATIENCE_S:
            raise StartError(
                f"no weights came from {self._source.address} for {_PATIENCE_S:g} s: is a firewall "
                "between the hosts?"
            )


@contextmanager
def _alone_in(
    folder: Path, on_progress: Callable[[float], None], check: Callable[[], None]
) -> Iterator[None]:
    """One at a time receives into a folder (Linux: flock(2)), which no other user may enter."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ModelError(
                f"{folder}: others may enter it, so they may have changed what is in it: remove it"
            )
        while not _lock(descriptor):
            check()
            on_progress(0.0)
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether it is locked now. A file system that knows no locks lets everybody in."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
