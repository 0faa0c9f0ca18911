"""Redis, with a real server: alone, with TLS, as a cluster, and with damaged answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from core.helpers import key, run
from remote import servers
from remote.fakes import MOST, VALUE, Open, value_in
from remote.servers import Redis

from kcache.errors import ConfigError
from kcache.remote.storage import RemoteError, Storage

pytest.importorskip("redis", reason="the package redis is missing")


@pytest.fixture
def cache(store: Open, redis_server: Redis) -> Storage:
    return store(f"redis://127.0.0.1:{redis_server.port}")


def command(server: Redis, *words: str) -> str:
    """Return the output of redis-cli for a command."""
    client = servers.program("redis-cli", "redis-tools")
    done = run(client, "-p", server.port, *words)
    return done.stdout.strip()


def test_where_a_value_is(cache: Storage, redis_server: Redis) -> None:
    cache.put(key(1), b"other")
    assert command(redis_server, "GET", f"kcache:{key(1)}") == "other"
    assert command(redis_server, "TTL", f"kcache:{key(1)}") == "-1"


def test_databases_prefixes_and_expiry(store: Open, redis_server: Redis) -> None:
    url = f"valkey://127.0.0.1:{redis_server.port}"
    mine = store(f"{url}/3/team/x?expire=30d")
    mine.put(key(2), VALUE)
    assert mine.replace(key(3), b"merged", None)
    assert store(url).get(key(2), MOST) is None
    for each in (key(2), key(3)):
        assert 0 < int(command(redis_server, "-n", "3", "TTL", f"kcache:team:x:{each}")) <= 2592000
    with pytest.raises(ConfigError, match="expire: expected .*, got 'soon'"):
        store(f"{url}?expire=soon")


def test_another_type_of_value(cache: Storage, redis_server: Redis) -> None:
    command(redis_server, "LPUSH", f"kcache:{key(5)}", "x")
    with pytest.raises(RemoteError, match="WRONGTYPE"):
        cache.get(key(5), MOST)


# -- conditions and leases ------------------------------------------------------------------------


def test_leases(store: Open, redis_server: Redis) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}"
    here, there = store(url), store(url)
    assert here.lease(key(7), "here", 60)
    assert not there.lease(key(7), "there", 60)
    assert here.renew(key(7), "here", 120)
    assert 60_000 < int(command(redis_server, "PTTL", f"kcache:lease:{key(7)}")) <= 120_000
    assert not there.renew(key(7), "there", 120)
    there.release(key(7), "there")  # has no effect: the lease is held by "here"
    assert not there.lease(key(7), "there", 60)
    here.release(key(7), "here")
    assert there.lease(key(7), "there", 60)
    assert not here.renew(key(7), "here", 60)


def test_a_lease_ends_by_itself(cache: Storage) -> None:
    assert cache.lease(key(9), "dead", 0.05)
    for _ in range(10_000):
        if cache.lease(key(9), "next", 60):
            return
    pytest.fail("the lease never ended")


# -- credentials ---------------------------------------------------------------------------------


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
    assert writer.replace(key(10), VALUE + b"1", writer.get(key(10), MOST))
    store(f"redis://:secret@{host}").put(key(11), VALUE)
    assert value_in(reader, key(10)) == VALUE + b"1"
    with pytest.raises(RemoteError, match="permission"):
        reader.put(key(10), b"")
    with pytest.raises(RemoteError, match="permission"):
        reader.replace(key(10), b"", None)


def test_a_password_from_a_file(store: Open, guarded: Redis, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o600)
    store(f"redis://127.0.0.1:{guarded.port}?password_file={file}").put(key(12), VALUE)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        store(f"redis://127.0.0.1:{guarded.port}?password_file={file}")


# -- TLS -----------------------------------------------------------------------------------------


def test_tls(store: Open, tmp_path: Path) -> None:
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    ca = servers.certificate(cert, private)
    port = servers.free_port()
    settings = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    settings += ["--tls-cert-file", str(cert), "--tls-key-file", str(private)]
    settings += ["--tls-ca-cert-file", str(ca)]
    with servers.redis(tmp_path, *settings) as server:
        url = f"rediss://localhost:{port}"
        cache = store(f"{url}?ca_file={ca}")
        cache.put(key(14), VALUE)
        assert value_in(cache, key(14)) == VALUE
        with pytest.raises(RemoteError, match="certificate"):
            store(url).get(key(14), MOST)
        with pytest.raises(RemoteError):  # this port does not use TLS
            store(f"rediss://localhost:{server.port}", "timeout=1").get(key(14), MOST)
        with pytest.raises(ConfigError, match="can't be read"):
            store(f"{url}?ca_file={ca}-not-there").get(key(14), MOST)


# -- a cluster -----------------------------------------------------------------------------------


def test_a_cluster(store: Open, redis_cluster: list[Redis]) -> None:
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in redis_cluster[:2])
    cache = store(f"redis+cluster://{nodes}/team")
    for number in range(30):
        cache.put(key(number), b"%d" % number)
    assert [value_in(cache, key(number)) for number in range(30)] == [b"%d" % n for n in range(30)]
    assert cache.get(key("absent"), MOST) is None
    sizes = [int(command(node, "DBSIZE") or 0) for node in redis_cluster]
    assert sum(1 for size in sizes if size) >= 3  # spread over all primaries
    assert cache.replace(key("merged"), b"1", None)
    assert not cache.replace(key("merged"), b"2", None)
    assert cache.lease(key(1), "here", 60)
    assert not cache.lease(key(1), "there", 60)
    cache.release(key(1), "here")
    assert cache.lease(key(1), "there", 60)
