"""Two hosts on one machine, for stages on real sockets with a slow line between them (as root).

`python tests/two_hosts.py DELAY_MS -- bench overlap --model smollm2 -pp 2` runs a headrace command,
any that starts an engine: the engine and the even stages on one host, the odd stages on the other,
so that every message between neighbours crosses the line, which keeps each packet for DELAY_MS.
These stages meet by gloo. What hosts that join each other do: tests/two_hosts_figures.py.
"""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import relay
from relay import Line

MASTER_ADDRESS = relay.ADDRESSES[0]

# Stages are started with sys.executable, which is why they can be put elsewhere without the engine
# knowing. Their control sockets are files, which both hosts have in common.
_STAGE_STARTER = """#!/bin/sh
for argument in "$@"; do
    case $argument in
        */rank-*[13579]) exec ip netns exec {other} {python} "$@" ;;
    esac
done
exec {python} "$@"
"""
_HEADRACE = "import headrace.__main__ as headrace; sys.exit(headrace.main())"


class UnavailableError(Exception):
    """This machine, or this user, has no network namespaces or TUN devices."""


class TwoHosts:
    """The hosts, from entering the context to leaving it. UnavailableError if they cannot be."""

    def __init__(self, line: Line) -> None:
        mark = uuid.uuid4().hex[:8]
        self.namespaces = [f"headrace-{mark}-{host}" for host in "ab"]
        self._line = line
        # What carries packets from one to the other.
        self.relay: subprocess.Popen[str]

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="hr-hosts-")
        self._starter = Path(self._folder.name) / "python"
        self._starter.write_text(
            _STAGE_STARTER.format(other=self.namespaces[1], python=sys.executable)
        )
        self._starter.chmod(0o700)
        line = self._line
        how = (line.delay_ms, line.rate_mbit, line.loss_percent, line.mtu)
        self.relay = subprocess.Popen(
            [sys.executable, relay.__file__, *self.namespaces, *map(str, how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A Ctrl-C is for the command; the relay ends after it.
            start_new_session=True,
        )
        assert self.relay.stdout is not None
        answer = self.relay.stdout.readline().strip()
        if answer != "ready":
            self.__exit__(None, None, None)
            raise UnavailableError(answer or "the relay did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.relay.stdin is not None
        assert self.relay.stdout is not None
        self.relay.stdin.close()
        try:
            self.relay.wait(10)
        finally:
            self.relay.kill()
            self.relay.wait()
            self.relay.stdout.close()
            relay.remove(self.namespaces)
            self._folder.cleanup()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing gets through."""
        self._order("cut")
        try:
            yield
        finally:
            self._order("mend")

    def _order(self, order: str) -> None:
        assert self.relay.stdin is not None
        print(order, file=self.relay.stdin, flush=True)

    def command(self, program: str, *arguments: str) -> list[str]:
        """What runs Python code on the first host, and the stages that it starts on both."""
        code = f"import sys; sys.executable = {str(self._starter)!r}; {program}"
        return [*self.on(0), sys.executable, "-c", code, *arguments]

    def on(self, host: int) -> list[str]:
        """What runs a command on a host, when put before it."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    @property
    def environment(self) -> dict[str, str]:
        """For commands run on the hosts."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": relay.DEVICE}


def main() -> int:
    separator = sys.argv.index("--") if "--" in sys.argv else 0
    if separator != 2:
        print("usage: two_hosts.py DELAY_MS -- HEADRACE_ARGUMENTS...", file=sys.stderr)
        return 2
    arguments = [*sys.argv[3:], "--link-backend", "gloo", "--master-addr", MASTER_ADDRESS]
    try:
        with TwoHosts(Line(float(sys.argv[1]))) as hosts:
            process = subprocess.Popen(hosts.command(_HEADRACE, *arguments), env=hosts.environment)
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:
                    # The command has had it too, and ends by itself.
                    continue
    except UnavailableError as error:
        print(f"two_hosts.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
