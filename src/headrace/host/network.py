"""Which address, and which interface, this host has towards another."""

import fcntl
import socket
import struct
from dataclasses import dataclass

from headrace.errors import StartError, UsageError

# linux/sockios.h
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Interface:
    """One of this host's, with its IPv4 address."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"interface {self.name}, {self.address}"


def interfaces() -> list[Interface]:
    """Those of this host that have an IPv4 address."""
    found = []
    for _, name in socket.if_nameindex():
        address = _address_of(name)
        if address is not None:
            found.append(Interface(name, address))
    return found


def interface_named(name_or_address: str) -> Interface:
    """The one of this name or address. Raises UsageError naming those there are."""
    for interface in interfaces():
        if name_or_address in (interface.name, interface.address):
            return interface
    # An interface may have further addresses.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((name_or_address, 0))
            return Interface("of that address", probe.getsockname()[0])
    except OSError:
        known = "; ".join(f"{each.name} ({each.address})" for each in interfaces())
        raise UsageError(
            f"--interface {name_or_address}: this host has none of that name or address: {known}"
        ) from None


def interface_towards(host: str, port: int) -> Interface:
    """The one through which the system sends to this host. Raises StartError if there is no way.

    Nothing is sent: a UDP socket that connects only looks up its route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = probe.getsockname()[0]
    except OSError as error:
        raise StartError(
            f"no way from here to --master-addr {host} ({error.strerror or error})"
        ) from error
    for interface in interfaces():
        if interface.address == address:
            return interface
    return Interface("of that address", address)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
