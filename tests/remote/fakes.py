"""Fakes: remotes in memory, and a daemon in this process, which a test can inspect and break."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kcache.daemons.daemon_server import Server
from kcache.daemons.sockets import bound
from kcache.entry import Entry, encode
from kcache.remote.address import Address, parse_addresses
from kcache.remote.daemon import RemoteDaemon
from kcache.remote.daemon_client import DaemonClient
from kcache.remote.daemon_protocol import Setup
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.signing import make_sealer
from kcache.remote.storage import RemoteTooLong, Storage, Stored, open_storage
from kcache.util import log

#: Addresses whose limits are so high that no answer is too slow on a busy machine.
PATIENT = "http://memory?slow=60&connect_timeout=60&timeout=60"
LEASES = "redis://memory?leases=1&slow=60&connect_timeout=60&timeout=60"


#: The limit for the values that a client reads in a test, and a value to store.
MOST = 1 << 20
VALUE = os.urandom(100 << 10)
#: Timeouts that are long enough for a busy machine, for tests that are not about time.
NO_HURRY = "connect_timeout=60&timeout=60"
Open = Callable[..., Storage]
#: The value of the fixture `server`: a server's port, the answers that it sends, and the requests
#: that it has received.
RawServer = tuple[int, list[bytes], list[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\n"
SOUND = HEAD + b"Content-Length: 3\r\n\r\nabc"


class MemoryClient:
    """A remote in memory. `trouble` is called before each operation, and may raise or wait.

    `answer` is called with each value that is read, and returns the value that the client gets.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.leases: dict[str, bytes] = {}
        self.operations: list[str] = []
        self.trouble: Callable[[str], object] = lambda _: None
        self.answer: Callable[[bytes | None], bytes | None] = lambda value: value
        self._lock = threading.Lock()

    def _begin(self, operation: str) -> None:
        self.operations.append(operation)
        self.trouble(operation)

    def get(self, key: str, limit: int) -> Stored | None:
        self._begin("get")
        value = self.answer(self.values.get(key))
        if value is not None and len(value) > limit:
            raise RemoteTooLong("too large")
        return None if value is None else Stored(value, value)

    def put(self, key: str, value: bytes) -> None:
        self._begin("put")
        self.values[key] = value

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        self._begin("replace")
        with self._lock:
            if self.values.get(key) != (None if old is None else old.value):
                return False
            self.values[key] = value
            return True

    def lease(self, key: str, token: bytes, seconds: float) -> bool:
        self._begin("lease")
        with self._lock:
            return self.leases.setdefault(key, token) == token

    def renew(self, key: str, token: bytes, seconds: float) -> bool:
        self._begin("renew")
        return self.leases.get(key) == token

    def release(self, key: str, token: bytes) -> bool:
        self._begin("release")
        with self._lock:
            return self.leases.get(key) == token and self.leases.pop(key) == token

    def close(self) -> None:
        pass


def manifest(key: str, *sets: bytes) -> bytes:
    """Return the envelope of a manifest with these dependency sets."""
    payload = {f"set{number}": raw for number, raw in enumerate(sets)}
    return encode(key, Entry(payload, {"kind": "manifest"}))


@contextmanager
def opened(text: str) -> Iterator[Storage]:
    """Yield the client of an address, which is closed after the block."""
    client = open_storage(*addresses(text))
    try:
        yield client
    finally:
        client.close()


def value_in(client: Storage, name: str, most: int = MOST) -> bytes | None:
    found = client.get(name, most)
    return None if found is None else found.value


def addresses(*texts: str) -> tuple[Address, ...]:
    return parse_addresses(texts or (PATIENT,), name="remote")


def remote(client: MemoryClient, address: str = PATIENT) -> GuardedStorage:
    (parsed,) = addresses(address)
    return GuardedStorage(parsed, make_sealer, make=lambda _: client)


def client_at(
    path: str, *remotes: Address, warn: Callable[[str], object] = log.warning_once
) -> DaemonClient:
    """Return a client of the daemon at a path. The client never starts a daemon."""

    def found() -> str:
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        return path

    return DaemonClient(Setup(remotes or addresses(), {}, {}), found, {}, warn=warn)


@contextmanager
def service(folder: Path, *remotes: GuardedStorage) -> Iterator[DaemonClient]:
    """Run a daemon in a thread, and yield a client of it."""
    path = str(folder / "socket")
    served = Server(socket.socket(fileno=bound(path)), path, RemoteDaemon(remotes))
    thread = threading.Thread(target=served.serve, kwargs={"persistent": True})
    thread.start()
    client = client_at(path, *(each.address for each in remotes))
    try:
        yield client
    finally:
        client.close()
        served.wake()
        thread.join()


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Run a server that calls `answer` with each connection in a thread; yield its port."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=attend, args=(connection,), daemon=True).start()

    def attend(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition is true, and assert that it becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)
