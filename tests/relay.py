"""Two network namespaces joined by a line that delays: `relay.py NAME_A NAME_B DELAY_MS`, as root.

Each namespace has one TUN device; a packet that leaves one comes in at the other DELAY_MS later.
Prints "ready", or one line saying why it cannot be, and lasts until its standard input is closed,
however that comes about. Then nothing is left: the devices end with this process, and it removes
the namespaces.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

DEVICE = "headrace0"
ADDRESSES = ("10.99.77.1", "10.99.77.2")

# linux/if_tun.h, linux/sched.h
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
# As large as a packet may be nearly, so that a message is few packets.
_MTU = 65000


@dataclass
class _Direction:
    """Packets on their way from one device to the other, with the moments they are due at."""

    source: int
    target: int
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, delay_s: float) -> None:
        """Take what has left the source."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, _MTU + 100)
                self.under_way.append((time.monotonic() + delay_s, packet))

    def deliver(self) -> None:
        """Hand over what is due."""
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            os.write(self.target, self.under_way.popleft()[1])


def relay(devices: tuple[int, int], delay_s: float) -> None:
    """Carry packets between two TUN devices until standard input ends."""
    a, b = devices
    ways = [_Direction(a, b), _Direction(b, a)]
    while True:
        due = [way.under_way[0][0] for way in ways if way.under_way]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *devices], [], [], wait_s)
        if 0 in ready and not os.read(0, 1):
            return
        for way in ways:
            if way.source in ready:
                way.take(delay_s)
            way.deliver()


def open_device(namespace: str) -> int:
    """A new TUN device in the namespace; its file works from any."""
    _enter(f"/var/run/netns/{namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def _enter(namespace_file: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace_file, "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")


def ip(*arguments: str) -> None:
    """Run the command of that name; CalledProcessError with its words if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def set_up(namespaces: list[str]) -> tuple[int, int]:
    """Create both namespaces with their devices and addresses; the devices' files."""
    devices = []
    for namespace, own, other in zip(namespaces, ADDRESSES, reversed(ADDRESSES), strict=True):
        ip("netns", "add", namespace)
        devices.append(open_device(namespace))
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "address", "add", own, "peer", other, "dev", DEVICE)
        ip("-n", namespace, "link", "set", DEVICE, "up", "mtu", str(_MTU))
    a, b = devices
    return a, b


def remove(namespaces: list[str]) -> None:
    """Remove those that there are."""
    for namespace in namespaces:
        with contextlib.suppress(subprocess.CalledProcessError, OSError):
            ip("netns", "delete", namespace)


def main() -> None:
    *namespaces, delay_ms = sys.argv[1:]
    try:
        try:
            devices = set_up(namespaces)
        except subprocess.CalledProcessError as error:
            print(f"{' '.join(error.cmd)}: {error.stderr.strip()}", flush=True)
            return
        except OSError as error:
            print(f"no network namespaces or TUN devices here: {error}", flush=True)
            return
        print("ready", flush=True)
        relay(devices, float(delay_ms) / 1e3)
    finally:
        remove(namespaces)


if __name__ == "__main__":
    main()
