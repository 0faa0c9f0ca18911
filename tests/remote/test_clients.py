"""Clients of every protocol: what they have in common, also if the server or the network fails."""

import base64
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import ClassVar, NamedTuple

import pytest
from core.helpers import EMULATED, key, run_all
from remote.fakes import MOST, NO_HURRY, VALUE, MemoryClient, answering, manifest, opened, value_in
from remote.fakes import remote as in_memory
from remote.proxy import Faults, Proxy

from kcache.entry import Entry, decode, encode
from kcache.remote.address import parse_addresses
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.signing import make_sealer
from kcache.remote.storage import RemoteError, RemoteTooLong, Storage

PACKAGES = {"http": "urllib3", "redis": "redis", "objects": "obstore"}
PATIENT = f"{NO_HURRY}&slow=60"


class Kind(NamedTuple):
    """A protocol, the port of its server, and a function that returns the address for a port."""

    name: str
    port: int
    at: Callable[[int], str]


@pytest.fixture(params=PACKAGES)
def kind(request: pytest.FixtureRequest) -> Kind:
    pytest.importorskip(PACKAGES[request.param])
    name, fixture = request.param, {"http": "nginx", "redis": "redis_server", "objects": "s3"}
    return Kind(name, request.getfixturevalue(fixture[name]).port, ADDRESSES[name])


ADDRESSES: dict[str, Callable[[int], str]] = {
    "http": lambda port: f"http://127.0.0.1:{port}/cache/clients?",
    "redis": lambda port: f"redis://127.0.0.1:{port}/1?",
    "objects": lambda port: f"s3://kernels/x%20y?region=x&endpoint=http://127.0.0.1:{port}&",
}


@pytest.fixture
def client(kind: Kind) -> Iterator[Storage]:
    with opened(kind.at(kind.port) + PATIENT) as made:
        yield made


def remote_at(address: str, more: str = PATIENT) -> GuardedStorage:
    (parsed,) = parse_addresses(address + more, name="remote")
    return GuardedStorage(parsed, make_sealer)


def envelope(key: str) -> bytes:
    return encode(key, Entry({"cubin": VALUE}))


# -- without faults --------------------------------------------------------------------------------


def test_what_is_put_is_there(client: Storage) -> None:
    assert client.get(key("absent"), MOST) is None
    for value in (VALUE, b"x", b"other"):
        client.put(key("put"), value)
        found = client.get(key("put"), MOST)
        assert found.value == value
    assert client.replace(key("put"), b"replaced", found)
    assert value_in(client, key("put")) == b"replaced"
    client.close()
    client.close()


def test_a_value_beyond_the_limit_is_not_read(client: Storage) -> None:
    client.put(key("long"), VALUE)
    with pytest.raises(RemoteTooLong, match="expected at most 100 bytes|100 bytes"):
        client.get(key("long"), 100)
    assert value_in(client, key("long"), len(VALUE)) == VALUE


def test_connections_are_used_again(kind: Kind) -> None:
    with Proxy(("127.0.0.1", kind.port)) as proxy, opened(kind.at(proxy.port) + PATIENT) as client:
        for _ in range(5):
            client.put(key("again"), VALUE)
            assert client.get(key("again"), MOST) is not None
        if kind.name != "objects":  # Moto closes each connection
            assert proxy.connections == 1
        # As if the server closed idle connections: the client opens a new one, without an error.
        proxy.drop()
        assert client.get(key("again"), MOST) is not None


# -- manifests that several machines write -----------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that supports conditional requests as HTTP, S3, GCS and Azure do."""

    protocol_version = "HTTP/1.1"
    values: ClassVar[dict[str, tuple[int, bytes]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = self.values.get(self.path.partition("?")[0])
        self.answer(404 if found is None else 200, *(found or (0, b"")))

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        place = self.path.partition("?")[0]
        with self.lock:
            version, _ = self.values.get(place, (0, b""))
            match, absent = self.headers["If-Match"], self.headers["If-None-Match"]
            generation = self.headers["x-goog-if-generation-match"]
            if (
                (match and match != f'"{version}"')
                or (absent and version)
                or (generation and int(generation) != version)
            ):
                self.answer(412, version, b"")
                return
            self.values[place] = version + 1, body
        self.answer(201, version + 1, b"")

    def answer(self, status: int, version: int, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "ETag": f'"{version}"',
            "x-goog-generation": str(version),
            "Last-Modified": "Sun, 22 Nov 2026 20:00:00 GMT",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server with `Handler`."""
    Handler.values.clear()
    fake = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(fake))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["http", "redis", "s3", "gs", "az", "az with a signature"])
def test_merges_lose_nothing(
    scheme: str, strict: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(PACKAGES.get(scheme, "obstore"))
    if scheme == "redis":
        address = ADDRESSES["redis"](request.getfixturevalue("redis_server").port)
    elif scheme == "http":
        address = ADDRESSES["http"](strict)
    else:
        if " " in scheme:
            monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=secret")
        address = f"{scheme[:2]}://kernels/x?region=x&endpoint=http://127.0.0.1:{strict}&"
    remote, place = remote_at(address), key(f"merged {scheme}")

    def add(number: int) -> None:
        for count in range(4):
            added = manifest(place, b"%d.%d" % (number, count))
            for _ in range(1000):
                if remote.merge(place, added):
                    break
                remote.writing.succeeded()  # ends the pause after the failure

    assert run_all(*(partial(add, number) for number in range(4))) == [None] * 4
    found = remote.get(place)
    sets = decode(found[1], place).payload.values()
    assert sorted(sets) == sorted(b"%d.%d" % (n, c) for n in range(4) for c in range(4))
    uploads = remote.counts.as_dict()["uploads"]
    assert remote.merge(place, manifest(place, b"0.0")), "the dependency set is already there"
    assert remote.counts.as_dict()["uploads"] == uploads + 1
    assert remote.get(place) == found
    remote.close()


# -- faults ------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(kind: Kind) -> Iterator[Proxy]:
    """A proxy in front of a server that has an entry under `key("fault")`."""
    with opened(kind.at(kind.port) + PATIENT) as client:
        client.put(key("fault"), envelope(key("fault")))
    with Proxy(("127.0.0.1", kind.port)) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("faults", "counted"),
    [
        *((Faults(truncate=length), "errors") for length in (0, 20, 102_000)),
        (Faults(refuse=True), "errors"),
        (Faults(hole=True), "timeouts"),
        (Faults(drip=0.1), "timeouts"),
    ],
    ids=repr,
)
def test_faults_are_counted(faults: Faults, counted: str, kind: Kind, faulty: Proxy) -> None:
    timeout = "connect_timeout=60&timeout=60" if counted == "errors" else "timeout=0.3"
    assert remote_at(kind.at(faulty.port)).get(key("fault")) == (0, envelope(key("fault")))
    faulty.drop()
    remote = remote_at(kind.at(faulty.port), f"slow=60&{timeout}")
    faulty.faults = faults
    with pytest.raises(RemoteError):
        remote.get(key("fault"))
    told = remote.counts.as_dict()
    assert told[counted] == 1, told
    faulty.faults = Faults(hole=True) if counted == "timeouts" else Faults(refuse=True)
    faulty.drop()
    assert not remote.put(key("other"), envelope(key("other")))
    assert remote.counts.as_dict()["dropped"] == 1
    assert "kcache works without it" in remote.trouble
    faulty.drop()


def test_damage_is_a_miss(kind: Kind, faulty: Proxy) -> None:
    remote = remote_at(kind.at(faulty.port))
    faulty.faults = Faults(damage=1.0, keep=700)  # more than the head of an answer
    assert remote.get(key("fault")) is None
    assert remote.counts.as_dict()["damaged"] == 1
    assert not remote.reading.reason


def test_a_panic_in_a_client_is_an_error() -> None:
    """A panic, such as obstore's, becomes a RemoteError, although it is not an Exception."""

    class Panic(BaseException):
        pass

    def panic(_: str) -> None:
        raise Panic

    client = MemoryClient()
    client.trouble = panic
    remote = in_memory(client)
    with pytest.raises(RemoteError, match="Panic"):
        remote.get(key("fault"))
    assert not remote.put(key("fault"), envelope(key("fault")))


# -- endless answers -------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Sun, 22 Nov 2026 20:00:00 GMT\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"100000\r\n%s\r\n" % bytes(1 << 20)
PIECE = bytes(1 << 20)
FLOODS = {
    "head": (OK + b"A: ", PIECE),
    "heads": (OK, b"A: b\r\n" * 100_000),
    "no length": (OK + b"\r\n", PIECE),
    "length": (OK + b"Content-Length: 99999999999\r\n\r\n", PIECE),
    "chunks": (OK + CHUNKED, CHUNK),
    "chunks, length": (OK + b"Content-Length: 100\r\n" + CHUNKED, CHUNK),
    "a chunk": (OK + CHUNKED + b"fffffffffff\r\n", PIECE),
    "less than a chunk": (OK + CHUNKED + b"-1\r\n", PIECE),
    "a chunk's head": (OK + CHUNKED, PIECE.replace(b"\0", b"1")),
    "error": (b"HTTP/1.1 403 No\r\nContent-Length: 99999999999\r\n\r\n", PIECE),
    "error in chunks": (b"HTTP/1.1 500 No\r\n" + CHUNKED, CHUNK),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000),
    "value": (b"$99999999999\r\n", PIECE),
    "line": (b"+", PIECE.replace(b"\0", b"1")),
    "list": (b"*99999999999\r\n", b":1\r\n" * 100_000),
    "lists": (b"", b"*1\r\n" * 100_000),
    "number": (b":", PIECE.replace(b"\0", b"1")),
}
OF_HTTP = [name for name in FLOODS if FLOODS[name][0][:1] not in (b"$", b"+", b"*", b":")]
OF_HTTP.remove("lists")

ASK = """
import sys
from kcache.remote.address import parse_addresses
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.storage import RemoteError
from kcache.remote.daemon import limit_memory
from kcache.remote.signing import make_sealer
more = "timeout=0.2"
addresses = parse_addresses([address + more for address in sys.argv[1:]], name="remote")
remotes = [GuardedStorage(address, make_sealer) for address in addresses]
for remote in remotes:
    remote._open()
limit_memory(300 << 20)
for remote in remotes:
    try:
        print(remote.get("ab" * 32), flush=True)
    except RemoteError as error:
        print("RemoteError", remote.trouble[:200], flush=True)
"""
#: Runs a command; prints its exit status and its peak memory. The system's figure includes the
#: memory of the process that starts the command, so this small program starts it, not the tests.
MEASURE = """
import os, sys
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
print(f"\\n{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss}")
"""


def pouring(begin: bytes, more: bytes) -> AbstractContextManager[int]:
    """Run a server that answers with `begin`, and then repeats `more` forever; yield its port."""

    def pour(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(begin)
        while True:
            connection.sendall(more)

    return answering(pour)


@pytest.mark.parametrize(
    ("name", "floods"),
    [
        ("http", OF_HTTP),
        ("objects", [name for name in OF_HTTP if name != "continue" and "error" not in name]),
        ("objects", ["error"]),
        ("redis", [name for name in FLOODS if name not in OF_HTTP]),
    ],
)
def test_answers_without_an_end_take_neither_time_nor_memory(name: str, floods: list[str]) -> None:
    """Endless answers take neither time nor memory. obstore may abort the process at its limit."""
    pytest.importorskip(PACKAGES[name])
    python = (sys.executable, "-c")
    with ExitStack() as stack:
        ports = [stack.enter_context(pouring(*FLOODS[flood])) for flood in floods]
        asked = subprocess.run(
            [*python, MEASURE, *python, ASK, *map(ADDRESSES[name], ports)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    *said, measured = asked.stdout.split("\n")[:-1]
    returncode, memory = map(int, measured.split())
    assert EMULATED or memory < 500 << 10  # QEMU keeps the code that it has translated
    if floods == ["error"]:
        assert returncode in (0, -6)
    else:
        assert returncode == 0
        answers = [line for line in said if line]
        assert len(answers) == len(floods)
        assert all(line.startswith(("RemoteError", "None")) for line in answers), answers
