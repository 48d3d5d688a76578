"""Who may connect to a socket that a network can reach: whoever has the right key.

Each listening socket has a name, its ZAP domain, and a key of its own. A stranger who does not know
the server's public key, which is never sent, cannot finish the handshake; who knows it and has not
the client's key is refused by the gate (ZeroMQ RFC 27). Before that, a connection is given a few
seconds and a frame's memory, and nobody else waits for it.

Sockets that are not encrypted take a password instead. It travels in the clear, and is good for one
connection: the socket listens no more once its peer is there. So nobody gets in who does not read
what the hosts send; who reads it, or changes it, is not kept from that.
"""

import ctypes
import hmac
import os
import socket
import struct
import threading
from contextlib import suppress

import zmq
from zmq.utils import z85

from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.signals import put_off

# Bytes of a frame: what goes over these sockets is cut in pieces, so that a stranger's connection
# takes no more either. Larger pieces are hardly faster: encrypting and decrypting them takes most
# of the time, and overlaps better the smaller they are.
FRAME_BYTES = 1 << 17
# Beside a frame's content: what encryption adds.
_FRAME_ROOM = 256
# Milliseconds in which a connection must have shown its key.
_HANDSHAKE_MS = 5000
_BACKLOG = 64
# Seconds for which a connection lives on while nothing gets through: a short cut of the line is no
# reason to lose what the stages hold. The kernels see to it, so that a process that is stopped does
# not look as if its host were gone.
CUT_S = 10
# linux/filter.h: return 0, which drops every packet.
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
_SO_ATTACH_FILTER = 26

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class Gate:
    """Lets peers in to the sockets of a context: one for each context, before any of them listens.

    It ends with its context.
    """

    def __init__(self, context: Context) -> None:
        # By the socket's name: what its peer must show.
        self._keys: dict[bytes, bytes] = {}
        # The context waits for the socket, which the thread closes.
        with put_off():
            self._requests = context.socket(zmq.REP)
            self._requests.linger = 0
            self._requests.bind("inproc://zeromq.zap.01")
            threading.Thread(target=self._answer, name="gate", daemon=True).start()

    def guard(self, listening: Socket, name: str, secret: Secret, encrypted: bool = True) -> None:
        """To be called before the socket binds. Its peers need the same name and secret."""
        listening.zap_domain = name.encode()
        if encrypted:
            listening.curve_server = True
            listening.curve_secretkey = secret.key_pair(f"{name} server").secret
            self._keys[name.encode()] = z85.decode(secret.key_pair(f"{name} client").public)
        else:
            listening.plain_server = True
            self._keys[name.encode()] = _password(secret, name)
        listening.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        _ride_out_cuts(listening)

    def _answer(self) -> None:
        try:
            while True:
                version, request, domain, _, _, _, *shown = self._requests.recv_multipart()
                key = self._keys.get(domain)
                right = key is not None and bool(shown) and hmac.compare_digest(shown[-1], key)
                status = [b"200", b"OK"] if right else [b"400", b"wrong key"]
                self._requests.send_multipart([version, request, *status, b"", b""])
        except zmq.ContextTerminated:
            pass
        finally:
            self._requests.close()


def show_key(connecting: Socket, name: str, secret: Secret, encrypted: bool = True) -> None:
    """To be called before the socket connects to the one that is guarded with the same."""
    if encrypted:
        connecting.curve_serverkey = secret.key_pair(f"{name} server").public
        own = secret.key_pair(f"{name} client")
        connecting.curve_publickey, connecting.curve_secretkey = own.public, own.secret
    else:
        connecting.plain_username = b"headrace"
        connecting.plain_password = _password(secret, name)
    # It has a peer once the peer has let it in, and loses it with the connection.
    connecting.setsockopt(zmq.IMMEDIATE, 1)
    connecting.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    _ride_out_cuts(connecting)


class Door:
    """A listening TCP socket that can be shut while its connections live on."""

    def __init__(self, address: str, port: int) -> None:
        """Port 0 picks a free one. Raises OSError if the address cannot be had."""
        self._listener = socket.create_server((address, port), backlog=_BACKLOG)
        self.address = f"tcp://{address}:{self._listener.getsockname()[1]}"

    def hand_to(self, listening: Socket) -> None:
        """Have the socket accept what comes."""
        # zmq closes what it is given.
        listening.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        listening.bind(self.address)

    def leave(self) -> None:
        """In a fork of the process that opened it: let go of it and of its connections, by which
        peers tell that this process lives. That is all that zmq's sockets hold of it."""
        if self._listener.fileno() < 0:
            return
        port = self._listener.getsockname()[1]
        self._listener.close()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if _port_of(int(name)) == port:
                    os.close(int(name))

    def shut(self) -> None:
        """Let nobody in any more. zmq itself would end the socket's connections with it."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        with suppress(OSError):
            self._listener.setsockopt(
                socket.SOL_SOCKET,
                _SO_ATTACH_FILTER,
                struct.pack("HL", 1, ctypes.addressof(program)),
            )
        self._listener.close()


def open_door(address: str, port: int, purpose: str) -> Door:
    """Raises StartError, naming address, port and purpose, if it cannot be had."""
    try:
        return Door(address, port)
    except OSError as error:
        raise StartError(
            f"cannot listen on {address}:{port} {purpose} ({error.strerror or error})"
        ) from error


def _port_of(descriptor: int) -> int | None:
    """Of the socket with this number, if it is one of TCP; OSError if it is no socket."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        return same.getsockname()[1] if same.family == socket.AF_INET else None


def _password(secret: Secret, name: str) -> bytes:
    return secret.derive(f"{name} password").value.hex().encode()


def _ride_out_cuts(of: Socket) -> None:
    of.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _FRAME_ROOM)
    # Seldom enough for a loaded network, often enough to keep a firewall's table.
    of.setsockopt(zmq.TCP_KEEPALIVE, 1)
    of.setsockopt(zmq.TCP_KEEPALIVE_IDLE, CUT_S // 2)
    of.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    of.setsockopt(zmq.TCP_KEEPALIVE_CNT, CUT_S // 2)
    of.setsockopt(zmq.TCP_MAXRT, CUT_S * 1000)
    of.set_hwm(0)
    of.setsockopt(zmq.RECONNECT_IVL, 50)
