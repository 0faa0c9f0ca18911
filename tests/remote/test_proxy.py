"""The proxy that the other tests put before a server does what they ask of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from remote.proxy import Faults, Proxy

A, B = "a" * 64, "b" * 64


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client:
            while piece := client.recv(1 << 16):
                client.sendall(piece)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(timeout=30)


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", echo)) as made:
        yield made


def asked(proxy: Proxy, text: str, *, timeout: float = 30) -> bytes:
    """Send a text over a new connection, and return what comes back until there is as much of it."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout) as client:
        client.sendall(text.encode())
        found = b""
        while len(found) < len(text) and (piece := client.recv(1 << 16)):
            found += piece
        return found


def test_it_hands_on(proxy: Proxy) -> None:
    assert asked(proxy, "hello") == b"hello"
    assert proxy.done == {"connections": 1, "bytes": 5}


def test_it_damages_one_bit_behind_what_is_kept(proxy: Proxy) -> None:
    proxy.faults = Faults(damage=1.0, keep=4)
    found = asked(proxy, "keep----")
    assert found[:4] == b"keep"
    turned = [a ^ b for a, b in zip(found, b"keep----", strict=True) if a != b]
    assert len(turned) == 1
    assert turned[0].bit_count() == 1


def test_it_truncates(proxy: Proxy) -> None:
    proxy.faults = Faults(truncate=3)
    assert asked(proxy, "hello") == b"hel"


def test_it_swaps_keys(proxy: Proxy) -> None:
    proxy.faults = Faults(swap=True)
    assert asked(proxy, f"GET {A}.") == f"GET {A}.".encode()
    assert asked(proxy, f"GET {B}.") == f"GET {A}.".encode()
    assert asked(proxy, f"GET {'c' * 63}.") == f"GET {'c' * 63}.".encode()
    assert proxy.done["swapped"] == 1


def test_it_is_a_hole(proxy: Proxy) -> None:
    proxy.faults = Faults(hole=True)
    with pytest.raises(TimeoutError):
        asked(proxy, "hello", timeout=0.2)


def test_it_refuses(proxy: Proxy) -> None:
    proxy.faults = Faults(refuse=True)
    with pytest.raises(OSError):  # noqa: PT011  reset, or a broken pipe
        assert asked(proxy, "hello") == b"hello"


def test_it_delays_and_drips(proxy: Proxy) -> None:
    proxy.faults = Faults(delay=0.01, drip=0.001)
    assert asked(proxy, "hello") == b"hello"


def test_it_drops_connections(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        proxy.drop()
        assert client.recv(1) == b""


def test_without_a_server_behind_it(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with (
        Proxy(("127.0.0.1", free)) as lonely,
        socket.create_connection(("127.0.0.1", lonely.port), timeout=30) as client,
    ):
        assert client.recv(1) == b""
