"""Sends hosts that lack a model's files what their ranks need of them.

By a socket and a thread of its own: however much is sent, nothing else that hosts say to each other
waits behind it. A host asks for few pieces ahead, so hosts that receive at once take turns, and
what is on its way to each is bounded. Nothing is remembered of who asks: a host whose connection
was cut asks again for what did not come.
"""

import logging
import threading
from collections.abc import Iterator

import msgspec
import zmq

from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.stage_files import (
    PIECE_BYTES,
    files_identity,
    piece_digest,
    read_piece,
    stage_files,
)
from headrace.errors import HeadraceError, ModelError
from headrace.host.cluster_key import Secret
from headrace.pipeline.curve import FRAME_BYTES, Context, Door, Gate, Socket, open_door
from headrace.protocol import send_weights
from headrace.protocol.send_weights import Answer, AskFiles, AskPiece, Offer
from headrace.protocol.stage_files import Piece

_log = logging.getLogger(__name__)

# The socket's name, for its key.
WEIGHTS = "weights"
# No file is longer; beyond, the system could not be asked.
_MOST_OFFSET = 1 << 62


class WeightsSender:
    """Sends of one model to whoever has the cluster's key. Listens from the moment on that somebody
    wants to know where. Always close() it."""

    def __init__(self, files: ModelFiles, weights: str, secret: Secret, host: str) -> None:
        """weights: the total of their digest. host: this one's address, as others reach it."""
        self._files, self._weights, self._secret, self._host = files, weights, secret, host
        self._context: Context | None = None
        self._door: Door | None = None

    def address(self) -> str:
        """Where it listens. Raises StartError if that cannot be, ModelError for damaged files."""
        if self._door is None:
            # Of the files that may be read.
            self._names = {file.name for file in stage_files(self._files).files}
            self._identity = files_identity(self._files, self._weights)
            self._door = open_door(self._host, 0, "to send weights to other hosts")
            self._context = zmq.Context()
            gate = Gate(self._context)
            router = self._context.socket(zmq.ROUTER)
            gate.guard(router, WEIGHTS, self._secret)
            self._door.hand_to(router)
            serve = threading.Thread(
                target=self._serve, args=(router,), name="weights for other hosts", daemon=True
            )
            serve.start()
        return self._door.address

    def close(self) -> None:
        """Send no more; may be called again."""
        if self._context is not None:
            self._context.term()
        if self._door is not None:
            self._door.shut()

    def _serve(self, router: Socket) -> None:
        try:
            while True:
                peer, *frames = router.recv_multipart()
                # To one who is gone meanwhile it goes nowhere.
                for frame in self._answer(b"".join(frames)):
                    router.send_multipart([peer, frame])
        except zmq.ContextTerminated:
            pass
        finally:
            router.close(0)

    def _answer(self, asked: bytes) -> Iterator[bytes]:
        """The messages that answer it."""
        try:
            data = self._bytes_for(asked)
        except (HeadraceError, msgspec.DecodeError) as error:
            _log.warning("weights that another host asked for are not sent: %s", error)
            yield send_weights.encode(Answer(0, "", str(error)))
            return
        yield send_weights.encode(Answer(len(data), piece_digest(data), ""))
        for begin in range(0, len(data), FRAME_BYTES):
            yield data[begin : begin + FRAME_BYTES]

    def _bytes_for(self, asked: bytes) -> bytes:
        match send_weights.decode_ask(asked):
            case AskFiles(program):
                offer = Offer(self._identity, stage_files(self._files, program))
                return send_weights.encode(offer)
            case AskPiece(piece):
                self._check(piece)
                return read_piece(self._files, piece)

    def _check(self, piece: Piece) -> None:
        if (
            piece.file not in self._names
            or not 0 < piece.nbytes <= PIECE_BYTES
            or not 0 <= piece.offset < _MOST_OFFSET
        ):
            raise ModelError(
                f"{piece.nbytes} bytes at {piece.offset} of {piece.file[:200]!r} are no piece of "
                f"model {self._files.path}"
            )
