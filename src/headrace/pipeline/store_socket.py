"""Where ranks meet that torch.distributed links: the socket of its store."""

import errno
import socket

from headrace.errors import StartError


def bind_master(address: str, port: int) -> socket.socket:
    """The rendezvous store's listening socket; port 0 picks a free one.

    Raises StartError naming address and port if it cannot be had.
    """
    master = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Connections of an earlier run that are still winding down do not count as a port in use.
    master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        master.bind((address, port))
        master.listen()
    except OSError as error:
        master.close()
        advice = (
            "choose another --master-port or 0 for a free one"
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "--master-addr must be an IPv4 address of this machine"
        )
        raise StartError(
            f"cannot listen on {address}:{port} for the stages to meet "
            f"({error.strerror or error}): {advice}"
        ) from error
    return master
