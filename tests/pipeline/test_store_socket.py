"""The socket at which stages meet."""

import pytest

from headrace.errors import StartError
from headrace.pipeline.store_socket import bind_master


def test_a_port_in_use_is_named() -> None:
    with bind_master("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port} .*--master-port"):
            bind_master("127.0.0.1", port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1:0"):
        bind_master("192.0.2.1", 0)
