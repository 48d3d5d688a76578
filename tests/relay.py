"""Two network namespaces joined by a slow, lossy line, as root:
`relay.py NAME_A NAME_B DELAY_MS RATE_MBIT LOSS_PERCENT MTU` (a rate of 0: as fast as it can).

A packet that leaves one comes in at the other after the delay, one packet after the other at the
rate, or is lost. Where the kernel can do that, by tc netem between a veth pair, it does; elsewhere
each namespace has a TUN device, and this process carries packets from one to the other.

Prints "ready", or one line saying why it cannot be. "cut" on standard input, a line, has all
packets be lost until "mend". The line lasts until standard input is closed, however that comes
about. Then nothing is left: this process removes the namespaces, and the devices go with them.
"""

import contextlib
import ctypes
import fcntl
import os
import random
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
# Packets that netem keeps: none is to be lost for want of room.
_NETEM_ROOM = 100_000


@dataclass(frozen=True)
class Line:
    """What happens to packets, each way. rate_mbit: 0 for as fast as it goes. mtu: bytes of the
    largest packet, large so that they are few and cost little processor time, as it is where a
    network card cuts them. What may be lost should not be larger than on other networks: 1500."""

    delay_ms: float
    rate_mbit: float = 0.0
    loss_percent: float = 0.0
    mtu: int = 65000

    @property
    def netem(self) -> list[str]:
        """As tc takes it."""
        rate = ["rate", f"{self.rate_mbit}mbit"] if self.rate_mbit else []
        return [
            *("netem", "limit", str(_NETEM_ROOM), "delay", f"{self.delay_ms}ms"),
            *("loss", f"{self.loss_percent}%", *rate),
        ]


@dataclass
class _Direction:
    """Packets on their way from one device to the other, with the moments they are due at."""

    source: int
    target: int
    line: Line
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def take(self, cut: bool) -> None:
        """Take what has left the source."""
        line = self.line
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, line.mtu + 100)
                if cut or self.chance.random() * 100 < line.loss_percent:
                    continue
                self.free_at = max(self.free_at, time.monotonic())
                if line.rate_mbit:
                    self.free_at += len(packet) * 8 / (line.rate_mbit * 1e6)
                self.under_way.append((self.free_at + line.delay_ms / 1e3, packet))

    def deliver(self) -> None:
        """Hand over what is due."""
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            packet = self.under_way.popleft()[1]
            # A device that is full loses what comes.
            with contextlib.suppress(BlockingIOError):
                os.write(self.target, packet)


def relay(devices: tuple[int, int], line: Line) -> None:
    """Carry packets between two TUN devices until standard input ends."""
    a, b = devices
    ways = [_Direction(a, b, line), _Direction(b, a, line)]
    cut = False
    while True:
        due = [way.under_way[0][0] for way in ways if way.under_way]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *devices], [], [], wait_s)
        if 0 in ready:
            order = os.read(0, 100)
            if not order:
                return
            cut = order.endswith(b"cut\n")
        if cut:
            for way in ways:
                way.under_way.clear()
        for way in ways:
            if way.source in ready:
                way.take(cut)
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


def run(*command: str) -> None:
    """Run it; CalledProcessError with its words if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def connect(namespaces: list[str], line: Line) -> tuple[int, int] | None:
    """Create both namespaces with their devices and addresses. The files of the TUN devices, None
    if the kernel carries the packets."""
    for namespace in namespaces:
        run("ip", "netns", "add", namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
    files = None
    if not _by_kernel(namespaces, line):
        a, b = map(open_device, namespaces)
        files = a, b
    for namespace, own, other in zip(namespaces, ADDRESSES, reversed(ADDRESSES), strict=True):
        run("ip", "-n", namespace, "address", "add", own, "peer", other, "dev", DEVICE)
        run("ip", "-n", namespace, "link", "set", DEVICE, "up", "mtu", str(line.mtu))
    return files


def _by_kernel(namespaces: list[str], line: Line) -> bool:
    """Whether it has a veth pair that does as the line; if not, there is none."""
    a, b = namespaces
    try:
        peer = ("peer", "name", DEVICE, "netns", b)
        run("ip", "link", "add", DEVICE, "netns", a, "type", "veth", *peer)
    except subprocess.CalledProcessError:
        return False
    try:
        set_netem(namespaces, line.netem)
    except (subprocess.CalledProcessError, OSError):
        run("ip", "-n", a, "link", "delete", DEVICE)
        return False
    return True


def set_netem(namespaces: list[str], netem: list[str]) -> None:
    """What happens to packets from now on, both ways."""
    for namespace in namespaces:
        run("tc", "-n", namespace, "qdisc", "replace", "dev", DEVICE, "root", *netem)


def keep(namespaces: list[str], line: Line) -> None:
    """Until standard input ends, where the kernel carries packets."""
    for order in sys.stdin:
        set_netem(namespaces, ["netem", "loss", "100%"] if order == "cut\n" else line.netem)


def remove(namespaces: list[str]) -> None:
    """Remove those that there are."""
    for namespace in namespaces:
        with contextlib.suppress(subprocess.CalledProcessError, OSError):
            run("ip", "netns", "delete", namespace)


def main() -> None:
    *namespaces, delay_ms, rate_mbit, loss_percent, mtu = sys.argv[1:]
    line = Line(float(delay_ms), float(rate_mbit), float(loss_percent), int(mtu))
    try:
        try:
            devices = connect(namespaces, line)
        except subprocess.CalledProcessError as error:
            print(f"{' '.join(error.cmd)}: {error.stderr.strip()}", flush=True)
            return
        except OSError as error:
            print(f"no network namespaces or TUN devices here: {error}", flush=True)
            return
        print("ready", flush=True)
        if devices is None:
            keep(namespaces, line)
        else:
            relay(devices, line)
    finally:
        remove(namespaces)


if __name__ == "__main__":
    main()
