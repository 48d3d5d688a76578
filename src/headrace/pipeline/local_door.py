"""How the two ends of an edge on one host find each other, and keep everybody else out.

The receiving rank listens on a Unix socket in the engine's folder, which only its user may enter.
Whoever connects must be of this user, and show the token that the engine passed on. A thread asks
them, from the moment the rank listens: so the peer is let in whatever strangers do meanwhile, as
junk, silence, or hundreds of connections. Then nobody can connect any more.
"""

import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from headrace.errors import StartError
from headrace.pipeline.ledger import Channel
from headrace.pipeline.links import LOOK_S, Check, End, LinkError

_TOKEN_BYTES = 16
_WELCOME = b"welcome"
# Connections that were not taken yet, and those that have shown no token: the oldest gives way.
_BACKLOG = 16
_MOST_SILENT = 16
# Seconds between two tries of a peer that was turned away in a crowd.
_AGAIN_S = 0.01
# pid, uid, gid (man 7 unix, SO_PEERCRED).
_CREDENTIALS = struct.Struct("=iII")


class LocalDoor:
    """Where the receiving end of an edge waits for the other. address, token: what lets it in."""

    def __init__(self, end: End, folder: Path) -> None:
        """folder: the engine's. Raises StartError if there can be no socket in it."""
        self._end = end
        self._path = folder / name_of(end.channel)
        self.address = str(self._path)
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Of a rank that this one takes the place of.
            self._path.unlink(missing_ok=True)
            self._socket.bind(self.address)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise StartError(
                f"cannot create the socket {self.address} ({error}): set TMPDIR to a short path on "
                "a local disk"
            ) from error
        self._peer: socket.socket | None = None
        self._asking = threading.Thread(target=self._ask_all, daemon=True)
        self._asking.start()

    def wait_for_peer(self, timeout_s: float, check: Check = lambda: None) -> socket.socket:
        """The peer's connection. Raises StartError naming both sides if it does not come, and what
        check raises."""
        deadline = time.monotonic() + timeout_s
        while self._asking.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            self._asking.join(min(left_s, LOOK_S))
            check()
        self.close()
        if self._peer is None:
            end = self._end
            raise StartError(
                f"{end.ranks.name(end.peer)} did not connect to {self.address} within "
                f"{timeout_s:g} s, to send {end.channel.tensors} to "
                f"{end.ranks.name(end.channel.target)}"
            )
        return self._peer

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            # Ends the thread.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._asking.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _ask_all(self) -> None:
        """Until the peer has come, or the door is closed."""
        silent: dict[int, socket.socket] = {}
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while self._peer is None:
            for descriptor, _ in poll.poll():
                if descriptor == self._socket.fileno():
                    try:
                        stranger, _ = self._socket.accept()
                    except OSError:
                        # It was closed, or the process has no descriptor left: then those give way.
                        if not silent:
                            return
                        poll.unregister(oldest := next(iter(silent)))
                        silent.pop(oldest).close()
                        continue
                    stranger.setblocking(False)
                    silent[stranger.fileno()] = stranger
                    poll.register(stranger, select.POLLIN)
                    if len(silent) > _MOST_SILENT:
                        poll.unregister(oldest := next(iter(silent)))
                        silent.pop(oldest).close()
                elif descriptor in silent:
                    poll.unregister(descriptor)
                    speaker = silent.pop(descriptor)
                    if self._peer is None and self._is_peer(speaker):
                        self._peer = speaker
                    else:
                        speaker.close()
        for stranger in silent.values():
            stranger.close()

    def _is_peer(self, speaker: socket.socket) -> bool:
        try:
            token = speaker.recv(4 * _TOKEN_BYTES)
            if not (_same_user(speaker) and secrets.compare_digest(token, self.token.encode())):
                return False
            speaker.send(_WELCOME)
        except OSError:
            return False
        return True


def knock(
    end: End, address: str, token: str, timeout_s: float, check: Check = lambda: None
) -> socket.socket:
    """The connection to where the receiving end of an edge listens.

    Raises LinkError if that rank is gone, StartError naming both sides if it does not let this one
    in, and what check raises.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
            try:
                return _knock_once(address, token, deadline, check)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise LinkError(
                    f"{end}: it does not listen at {address} ({error.strerror})", end.peer
                ) from error
            except PermissionError as error:
                raise StartError(f"{end}: {address} cannot be used ({error.strerror})") from error
        check()
        time.sleep(_AGAIN_S)
    raise StartError(f"{end}: it did not let this rank in at {address} within {timeout_s:g} s")


def _knock_once(address: str, token: str, deadline: float, check: Check) -> socket.socket:
    knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A blocking connect, since others do not wait for room in a crowd.
        limit = struct.pack("@ll", 0, int(LOOK_S * 1e6))
        knocking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        knocking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            knocking.connect(address)
            knocking.send(token.encode())
        except BlockingIOError as error:
            raise TimeoutError from error
        # On the same connection: the peer may let it in at any moment, and then no other.
        if _answer_of(knocking, deadline, check) != _WELCOME or not _same_user(knocking):
            raise ConnectionResetError
    except BaseException:
        knocking.close()
        raise
    return knocking


def _answer_of(knocking: socket.socket, deadline: float, check: Check) -> bytes:
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            return knocking.recv(len(_WELCOME))
        check()
    raise TimeoutError


def name_of(channel: Channel) -> str:
    """The name of an edge's socket in the engine's folder."""
    return f"{channel.tensors}-{channel.source}-{channel.target}"


def _same_user(connected: socket.socket) -> bool:
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())
