"""Which interface leads to another host."""

import pytest

from headrace.errors import StartError, UsageError
from headrace.host.network import interface_named, interface_towards, interfaces


def test_the_interface_follows_from_the_route() -> None:
    assert interface_towards("127.0.0.1", 1).address == "127.0.0.1"
    assert interface_towards("127.0.0.1", 1).name == "lo"


def test_an_interface_is_known_by_its_name_and_by_its_address() -> None:
    for interface in interfaces():
        assert interface_named(interface.name) == interface
        assert interface_named(interface.address).address == interface.address


def test_one_that_there_is_not_is_refused_naming_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"--interface nosuch0.*lo \(127\.0\.0\.1\)"):
        interface_named("nosuch0")
    # An address of somebody else (RFC 5737).
    with pytest.raises(UsageError, match="this host has none"):
        interface_named("203.0.113.9")


def test_a_host_that_nobody_knows_is_an_error_naming_it() -> None:
    with pytest.raises(StartError, match=r"no-such-host\.invalid"):
        interface_towards("no-such-host.invalid", 1)
