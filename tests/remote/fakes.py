"""Remotes in memory, and an agent in this process, so that a test can see and break everything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kcache.remote.address import Address, parse_addresses
from kcache.remote.agent import Agent
from kcache.remote.agent_setup import Setup
from kcache.remote.client import Client
from kcache.remote.counts import Counts
from kcache.remote.seal import make_sealer
from kcache.remote.store import Change, RemoteTooLong
from kcache.remote.tier import Tier
from kcache.util.private_socket import bound


class MemoryStore:
    """A remote in memory. `trouble` is called before each operation, and may raise or wait."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.leases: dict[str, str] = {}
        self.operations: list[str] = []
        self.trouble: Callable[[str], object] = lambda _: None
        self.answer: Callable[[bytes | None], bytes | None] = lambda value: value
        self._lock = threading.Lock()

    def _begin(self, operation: str) -> None:
        self.operations.append(operation)
        self.trouble(operation)

    def get(self, key: str, limit: int) -> bytes | None:
        self._begin("get")
        value = self.answer(self.values.get(key))
        if value is not None and len(value) > limit:
            raise RemoteTooLong("too large")
        return value

    def put(self, key: str, value: bytes) -> None:
        self._begin("put")
        self.values[key] = value

    def merge(self, key: str, change: Change, limit: int) -> None:
        self._begin("merge")
        with self._lock:
            old = self.values.get(key)
            if old is not None and len(old) > limit:
                raise RemoteTooLong("too large")
            new = change(old)
            if new is not None:
                self.values[key] = new

    def lease(self, key: str, token: str, seconds: float) -> bool:
        self._begin("lease")
        with self._lock:
            return self.leases.setdefault(key, token) == token

    def renew(self, key: str, token: str, seconds: float) -> bool:
        self._begin("renew")
        return self.leases.get(key) == token

    def release(self, key: str, token: str) -> None:
        self._begin("release")
        with self._lock:
            if self.leases.get(key) == token:
                del self.leases[key]

    def close(self) -> None:
        pass


def addresses(*texts: str) -> tuple[Address, ...]:
    return parse_addresses(texts or ("http://memory?slow=60",), name="remote")


def tier(store: MemoryStore, address: str = "http://memory?slow=60") -> Tier:
    (parsed,) = addresses(address)
    return Tier(parsed, make_sealer, Counts(), make=lambda _: store)


def client_at(path: str, *remotes: Address) -> Client:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    return Client(Setup(remotes or addresses(), {}, {}), connect)


@contextmanager
def agent(folder: Path, *tiers: Tier) -> Iterator[Client]:
    """An agent in a thread, and a client of it."""
    path = str(folder / "agent.socket")
    served = Agent(socket.socket(fileno=bound(path)), path, tiers)
    thread = threading.Thread(target=served.serve)
    thread.start()
    client = client_at(path, *(t.address for t in tiers))
    try:
        yield client
    finally:
        client.close()
        served.wake()
        thread.join()


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition that has to come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)
