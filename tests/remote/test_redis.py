"""Redis: against a real server, alone, with TLS, as a cluster, and behind what damages its answers."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote import servers
from remote.proxy import Faults, Proxy
from remote.servers import Redis

from kcache.errors import ConfigError
from kcache.remote.address import parse_addresses
from kcache.remote.store import (
    Leases,
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteStore,
    RemoteTimeout,
    Several,
    open_store,
)

pytest.importorskip("redis", reason="the package redis is missing")

MOST = 1 << 20
VALUE = os.urandom(100 << 10)
PATIENT = "connect_timeout=60&timeout=60"
Open = Callable[..., RemoteStore]


def key(number: object) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture
def store() -> Iterator[Open]:
    """Opens stores, and closes them after the test."""
    made: list[RemoteStore] = []

    def opened(url: str, more: str = PATIENT) -> RemoteStore:
        separator = "&" if "?" in url else "?"
        (address,) = parse_addresses(f"{url}{separator}{more}", name="remote")
        made.append(open_store(address))
        return made[-1]

    yield opened
    for each in made:
        each.close()
        each.close()


@pytest.fixture
def cache(store: Open, redis_server: Redis) -> RemoteStore:
    return store(f"redis://127.0.0.1:{redis_server.port}")


def command(server: Redis, *words: str) -> str:
    """What redis-cli answers."""
    done = subprocess.run(
        [servers.program("redis-cli", "redis-tools"), "-p", str(server.port), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def test_what_is_put_is_there(cache: RemoteStore, redis_server: Redis) -> None:
    assert cache.get(key(1), MOST) is None
    for value in (VALUE, b"x", b"other"):
        cache.put(key(1), value)
        assert cache.get(key(1), MOST) == value
    assert command(redis_server, "GET", f"kcache:{key(1)}") == "other"
    assert command(redis_server, "TTL", f"kcache:{key(1)}") == "-1"


def test_databases_prefixes_and_expiry(store: Open, redis_server: Redis) -> None:
    url = f"valkey://127.0.0.1:{redis_server.port}"
    mine = store(f"{url}/3/team/x?expire=30d")
    mine.put(key(2), VALUE)
    mine.merge(key(3), lambda old: b"merged", MOST)
    assert store(url).get(key(2), MOST) is None
    for each in (key(2), key(3)):
        assert 0 < int(command(redis_server, "-n", "3", "TTL", f"kcache:team:x:{each}")) <= 2592000
    with pytest.raises(ConfigError, match="expire='soon' is not allowed"):
        store(f"{url}?expire=soon")


def test_a_value_beyond_the_limit_is_not_read(cache: RemoteStore) -> None:
    cache.put(key(4), VALUE)
    with pytest.raises(RemoteError, match="more than 100 bytes"):
        cache.get(key(4), 100)
    with pytest.raises(RemoteError, match="more than 100 bytes"):
        cache.merge(key(4), lambda old: b"", 100)
    assert cache.get(key(4), len(VALUE)) == VALUE


def test_an_empty_value_is_replaced(cache: RemoteStore, redis_server: Redis) -> None:
    """Nothing that kcache stores is empty: somebody else's mistake must not last."""
    command(redis_server, "SET", f"kcache:{key(14)}", "")
    assert cache.get(key(14), MOST) is None
    cache.merge(key(14), lambda old: VALUE if old is None else None, MOST)
    assert cache.get(key(14), MOST) == VALUE


def test_another_type_of_value(cache: RemoteStore, redis_server: Redis) -> None:
    command(redis_server, "LPUSH", f"kcache:{key(5)}", "x")
    with pytest.raises(RemoteError, match="WRONGTYPE"):
        cache.get(key(5), MOST)


# -- merges and leases ---------------------------------------------------------------------------


def merge_from_threads(store: RemoteStore, place: str, *, writers: int, each: int) -> None:
    """Add `writers` times `each` different lines to one value."""

    def add(number: int) -> None:
        for count in range(each):
            line = b"%d.%d\n" % (number, count)
            for _ in range(1000):
                try:
                    store.merge(place, lambda old, line=line: (old or b"") + line, MOST)  # type: ignore[misc]
                except RemoteError as error:
                    assert "all the time" in str(error)  # noqa: PT017
                    continue
                break

    threads = [threading.Thread(target=add, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)
    lines = (store.get(place, MOST) or b"").split()
    assert sorted(lines) == sorted(b"%d.%d" % (n, c) for n in range(writers) for c in range(each))


def test_merges_lose_nothing(cache: RemoteStore) -> None:
    merge_from_threads(cache, key("merged"), writers=8, each=10)


def test_a_merge_that_changes_nothing_writes_nothing(cache: RemoteStore) -> None:
    cache.merge(key(6), lambda old: None, MOST)
    assert cache.get(key(6), MOST) is None


def test_leases(store: Open, redis_server: Redis) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}"
    here, there = store(url), store(url)
    assert isinstance(here, Leases)
    assert isinstance(there, Leases)
    assert here.lease(key(7), "here", 60)
    assert not there.lease(key(7), "there", 60)
    assert here.renew(key(7), "here", 120)
    assert 60_000 < int(command(redis_server, "PTTL", f"kcache:lease:{key(7)}")) <= 120_000
    assert not there.renew(key(7), "there", 120)
    there.release(key(7), "there")  # not its own
    assert not there.lease(key(7), "there", 60)
    here.release(key(7), "here")
    assert there.lease(key(7), "there", 60)
    assert not here.renew(key(7), "here", 60)


def test_one_of_many_gets_the_lease(cache: RemoteStore) -> None:
    assert isinstance(cache, Leases)
    leases, got = cache, []

    def take(number: int) -> None:
        if leases.lease(key(8), str(number), 60):
            got.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(got) == 1


def test_a_lease_ends_by_itself(cache: RemoteStore) -> None:
    assert isinstance(cache, Leases)
    assert cache.lease(key(9), "dead", 0.05)
    for _ in range(10_000):
        if cache.lease(key(9), "next", 60):
            return
    pytest.fail("it never ended")


# -- who may -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A server with a password, and the users `writer` and `reader`."""
    place = tmp_path_factory.mktemp("guarded")
    acl = ["--user", *["writer", "on", ">w", "~kcache:*", "+getrange", "+set", "+eval", "+get"]]
    acl += ["--user", *["reader", "on", ">r", "~kcache:*", "+getrange"]]
    with servers.redis(place, "--requirepass", "secret", *acl) as server:
        yield server


def test_users(store: Open, guarded: Redis) -> None:
    host = f"127.0.0.1:{guarded.port}"
    writer, reader = store(f"redis://writer:w@{host}"), store(f"redis://reader:r@{host}")
    writer.put(key(10), VALUE)
    writer.merge(key(10), lambda old: (old or b"") + b"1", MOST)
    store(f"redis://:secret@{host}").put(key(11), VALUE)
    assert reader.get(key(10), MOST) == VALUE + b"1"
    with pytest.raises(RemoteReadOnly, match="permission"):
        reader.put(key(10), b"")
    with pytest.raises(RemoteReadOnly, match="permission"):
        reader.merge(key(10), lambda old: b"", MOST)


@pytest.mark.parametrize("user", ["", ":wrong@", "writer:wrong@", "nobody:x@"])
def test_wrong_credentials(user: str, store: Open, guarded: Redis) -> None:
    cache = store(f"redis://{user}127.0.0.1:{guarded.port}")
    for _ in range(2):
        with pytest.raises(RemoteRefused) as caught:
            cache.get(key(10), MOST)
        assert "wrong" not in str(caught.value).lower().replace("wrongpass", "")


def test_a_password_from_a_file(store: Open, guarded: Redis, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o600)
    store(f"redis://127.0.0.1:{guarded.port}?password_file={file}").put(key(12), VALUE)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        store(f"redis://127.0.0.1:{guarded.port}?password_file={file}")


def test_a_copy_is_read_only(store: Open, redis_server: Redis, tmp_path: Path) -> None:
    with servers.redis(tmp_path, "--replicaof", f"127.0.0.1 {redis_server.port}") as copy:
        cache = store(f"redis://127.0.0.1:{copy.port}")
        with pytest.raises(RemoteReadOnly, match="read only"):
            cache.put(key(13), VALUE)


def test_a_full_server(store: Open, tmp_path: Path) -> None:
    with servers.redis(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as full:
        cache = store(f"redis://127.0.0.1:{full.port}")
        with pytest.raises(RemoteError, match="OutOfMemory|OOM"):
            deque((cache.put(key(number), VALUE) for number in range(100)), maxlen=0)
        assert cache.get(key(0), MOST) == VALUE


# -- TLS -----------------------------------------------------------------------------------------


def test_tls(store: Open, certificate: tuple[Path, Path, Path], tmp_path: Path) -> None:
    cert, private, ca = certificate
    port = servers.free_port()
    settings = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    settings += ["--tls-cert-file", str(cert), "--tls-key-file", str(private)]
    settings += ["--tls-ca-cert-file", str(ca)]
    with servers.redis(tmp_path, *settings) as server:
        url = f"rediss://localhost:{port}"
        cache = store(f"{url}?ca_file={ca}")
        cache.put(key(14), VALUE)
        assert cache.get(key(14), MOST) == VALUE
        with pytest.raises(RemoteRefused, match="certificate"):
            store(url).get(key(14), MOST)
        with pytest.raises(RemoteError):  # no TLS there
            store(f"rediss://localhost:{server.port}", "timeout=1").get(key(14), MOST)
        with pytest.raises(ConfigError, match="can't be read"):
            store(f"{url}?ca_file={ca}-not-there").get(key(14), MOST)


# -- a server in trouble -------------------------------------------------------------------------


@pytest.fixture
def faulty(redis_server: Redis) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", redis_server.port)) as proxy:
        yield proxy


def test_connections_are_used_again(faulty: Proxy, store: Open) -> None:
    cache = store(f"redis://127.0.0.1:{faulty.port}")
    for _ in range(5):
        cache.put(key(15), VALUE)
        assert cache.get(key(15), MOST) == VALUE
    assert faulty.done["connections"] == 2  # one that reads, and one that writes
    faulty.drop()
    assert cache.get(key(15), MOST) == VALUE


def test_several_values_are_asked_for_together(faulty: Proxy, store: Open) -> None:
    cache = store(f"redis://127.0.0.1:{faulty.port}")
    assert isinstance(cache, Several)
    long = bytes(range(256)) * 2000
    for name, value in (("one", VALUE), ("other", long)):
        cache.put(key(name), value)
    assert cache.get_several([key("one"), key("none"), key("other")], MOST) == [VALUE, None, long]
    with pytest.raises(RemoteError):
        cache.get_several([key("one"), key("other")], 1000)
    assert cache.get_several([key("none"), key("one")], MOST) == [None, VALUE]


@pytest.mark.parametrize("faults", [Faults(hole=True), Faults(drip=0.1), Faults(delay=60)])
def test_answers_that_take_too_long(
    faults: Faults, faulty: Proxy, cache: RemoteStore, store: Open
) -> None:
    cache.put(key(16), VALUE)
    faulty.faults = faults
    slow = store(f"redis://127.0.0.1:{faulty.port}", "connect_timeout=60&timeout=0.5")
    for ask in (lambda: slow.get(key(16), MOST), lambda: slow.put(key("new"), b"x")):
        with pytest.raises(RemoteTimeout):
            ask()
    faulty.faults = Faults()
    faulty.drop()


def test_a_stopped_server(store: Open, tmp_path: Path) -> None:
    with servers.redis(tmp_path) as server:
        cache = store(f"redis://127.0.0.1:{server.port}", "connect_timeout=60&timeout=0.5")
        patient = store(f"redis://127.0.0.1:{server.port}")
        patient.put(key(17), VALUE)
        with servers.frozen(server.process.pid), pytest.raises(RemoteTimeout):
            cache.get(key(17), MOST)
        assert patient.get(key(17), MOST) == VALUE
        server.process.kill()
        server.process.wait(timeout=60)
        with pytest.raises(RemoteError):
            patient.get(key(17), MOST)


@pytest.mark.parametrize("length", [0, 1, 5, 1000, 102_300])
def test_a_truncated_answer(length: int, faulty: Proxy, cache: RemoteStore, store: Open) -> None:
    cache.put(key(18), VALUE)
    faulty.faults = Faults(truncate=length)
    with pytest.raises(RemoteError):
        store(f"redis://127.0.0.1:{faulty.port}").get(key(18), MOST)


def test_nobody_listens(faulty: Proxy, store: Open) -> None:
    faulty.close()
    with pytest.raises(RemoteError, match="refused"):
        store(f"redis://127.0.0.1:{faulty.port}").get(key(19), MOST)


@pytest.fixture
def liar() -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers every question with the same bytes, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    said: list[bytes] = []

    def serve(client: socket.socket) -> None:
        with client:
            try:
                while client.recv(1 << 16):
                    client.sendall(said[0])
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1], said
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(timeout=30)


@pytest.mark.parametrize(
    "answer",
    [
        b"$9999999999\r\n" + bytes(4 << 20),
        b"$-5\r\n",
        b"$x\r\n\r\n",
        b"*1\r\n" * 100_000,
        b"*999999999999\r\n" + b":1\r\n" * 1_000_000,
        b":" + b"1" * 5_000_000,
        b"*1\r\n$1\r\nx\r\n",
        b":1\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-\xff\xfe\r\n",
        b"\r\n\r\n",
    ],
    ids=lambda answer: repr(answer[:16]),
)
def test_what_a_server_may_send(answer: bytes, liar: tuple[int, list[bytes]], store: Open) -> None:
    port, said = liar
    said.append(answer)
    cache = store(f"redis://127.0.0.1:{port}", "timeout=2")
    with pytest.raises(RemoteError):
        cache.get(key(20), 1000)


# -- a cluster -----------------------------------------------------------------------------------


def test_a_cluster(store: Open, redis_cluster: list[Redis]) -> None:
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in redis_cluster[:2])
    cache = store(f"redis+cluster://{nodes}/team")
    for number in range(30):
        cache.put(key(number), b"%d" % number)
    assert [cache.get(key(number), MOST) for number in range(30)] == [b"%d" % n for n in range(30)]
    assert cache.get(key("absent"), MOST) is None
    sizes = [int(command(node, "DBSIZE") or 0) for node in redis_cluster]
    assert sum(1 for size in sizes if size) >= 3  # over all who write
    merge_from_threads(cache, key("merged"), writers=4, each=5)
    assert isinstance(cache, Leases)
    assert cache.lease(key(1), "here", 60)
    assert not cache.lease(key(1), "there", 60)
    cache.release(key(1), "here")
    assert cache.lease(key(1), "there", 60)


def test_a_cluster_that_is_none(store: Open, redis_server: Redis, faulty: Proxy) -> None:
    with pytest.raises(RemoteError):
        store(f"redis+cluster://127.0.0.1:{redis_server.port}").get(key(1), MOST)
    faulty.faults = Faults(hole=True)
    with pytest.raises(RemoteTimeout):
        store(f"redis+cluster://127.0.0.1:{faulty.port}", "timeout=0.5").get(key(1), MOST)
