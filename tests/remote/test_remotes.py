"""The service for remotes and its clients: requests, counts, pauses after failures, and leases."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.helpers import started
from remote.fakes import LEASES, MemoryClient, addresses, remote, service, until
from remote.machines import service_of

from kcache.daemons.sockets import STOP, ask
from kcache.entry import Entry, encode
from kcache.remote.daemon_client import DaemonClient, Lease
from kcache.remote.daemon_protocol import GetReply, Upload
from kcache.remote.guarded_storage import FAILURES, GuardedStorage
from kcache.remote.signing import make_keys, make_sealer, write_keys
from kcache.remote.storage import RemoteError, RemoteTooLong

KEY, OTHER = "ab" * 32, "cd" * 32


def envelope(key: str, **payload: bytes) -> bytes:
    return encode(key, Entry(payload or {"cubin": b"code" * 100}), producer=b"test")


def counts(client: DaemonClient, index: int = 0) -> dict[str, Any]:
    return dict(service_of(client)["remotes"][index])


def value(client: DaemonClient, *keys: str) -> bytes | None:
    """Return the value that the first remote with one of the keys has, or None if there is none."""
    return client.get(*keys).value


def put(client: DaemonClient, upload: Upload) -> None:
    client.put(upload)
    assert client.flush(60)


def leased(client: DaemonClient, key: str = KEY) -> Lease:
    lease = client.lease(key)
    assert isinstance(lease, Lease)
    return lease


def failing(error: Exception, *operations: str) -> MemoryClient:
    """Return a remote whose operations fail: those in `operations`, or all if there are none."""
    store = MemoryClient()

    def fail(operation: str) -> None:
        if operation in operations or not operations:
            raise error

    store.trouble = fail
    return store


def test_remotes_are_asked_in_order_and_written_if_writable(tmp_path: Path) -> None:
    stores = [MemoryClient() for _ in range(3)]
    stores[1].values[KEY] = envelope(KEY)
    named = ("http://a?ro&slow=60", "http://b?slow=60", "http://c?slow=60")
    with service(tmp_path, *map(remote, stores, named)) as client:
        assert client.get(KEY) == GetReply(envelope(KEY), 1, 0.0)
        assert client.get(KEY, first=2) == GetReply(None, 3, 0.0)
        put(client, Upload((OTHER, envelope(OTHER))))
    assert [OTHER in store.values for store in stores] == [False, True, True]
    assert stores[2].operations.count("get") == 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_hit_further_down_is_kept_further_up(tmp_path: Path, keep: bool) -> None:
    near, far = MemoryClient(), MemoryClient()
    far.values = {KEY: envelope(KEY), OTHER: envelope(OTHER, set0=b"headers")}
    address = f"http://far?slow=60&keep={int(keep)}"
    with service(tmp_path, remote(near, "http://near?slow=60"), remote(far, address)) as client:
        for _ in range(2):
            assert None not in [value(client, key) for key in (KEY, OTHER)]
            assert client.flush(30)
    assert near.values == (far.values if keep else {})
    assert far.operations.count("get") == (2 if keep else 4)


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_kernel_beyond_max_entry_is_a_miss_of_a_remote_that_works(size: int) -> None:
    store = MemoryClient()
    narrow = remote(store, "http://memory?slow=60&max_entry=1000")
    assert remote(store).put(KEY, encode(KEY, Entry({"cubin": bytes(size)})))
    assert [narrow.get(KEY) is None for _ in range(7)] == [size > 1000] * 7
    assert narrow.merge(OTHER, bytes(size)) is (size < 1000)
    told = narrow.as_dict()
    assert (told["breaker"], told["errors"], told["dropped"]) == ("closed", 0, int(size > 1000))


# -- failures --------------------------------------------------------------------------------------


def test_failed_uploads_stop_no_gets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If uploads fail, because the user may not write or the server is full, gets continue."""
    store = failing(RemoteError("not for you"), "put")
    store.values[KEY] = envelope(KEY)
    with service(tmp_path, remote(store)) as client:
        for _ in range(20):
            client.put(Upload((OTHER, envelope(OTHER))))
        assert client.flush(30)
        assert value(client, KEY) == envelope(KEY)
        told = counts(client)
    assert store.operations.count("put") <= FAILURES + 3  # there are four threads for uploads
    assert (told["dropped"], told["breaker"], told["reason"]) == (20, "closed", "not for you")
    warning = "http://memory: not for you; kcache stores nothing there for now"
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_kernels_too_long_for_a_server_do_not_stop_others() -> None:
    """A value that is too long for a server (nginx: over 1 MiB) does not stop other uploads."""
    store = failing(RemoteTooLong("413 Request Entity Too Large"), "put")
    known = remote(store)
    assert not any(known.put(f"{number:064x}", b"long") for number in range(8))
    told = known.as_dict()
    assert (told["breaker"], told["errors"], told["dropped"]) == ("closed", 0, 8)
    assert "413 Request Entity Too Large; kcache does not store such" in known.trouble
    store.trouble = lambda _: None
    assert known.put("ab" * 32, b"short")


def test_without_its_keys_nothing_goes_and_nothing_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is missing")
    store, path = MemoryClient(), tmp_path / "keys.pem"
    signed = GuardedStorage(addresses()[0], lambda: make_sealer(str(path)), make=lambda _: store)
    with service(tmp_path, signed) as client:
        put(client, Upload((KEY, envelope(KEY))))
        assert not store.operations
        write_keys(str(path), make_keys()[0])
        put(client, Upload((KEY, envelope(KEY))))
        assert store.operations == ["put"]


def test_one_remote_that_fails_leaves_the_others(tmp_path: Path) -> None:
    down, well = failing(RemoteError("closed")), MemoryClient()
    remotes = remote(down, "http://a?slow=60"), remote(well, "http://b?slow=60")
    with service(tmp_path, *remotes) as client:
        put(client, Upload((KEY, envelope(KEY))))
        for _ in range(5 * FAILURES):
            found = client.get(KEY)
            assert (found.remote, found.unanswered) == (1, 1)
            assert client.worth_asking
            assert client.flush(30)
    assert down.operations.count("get") <= 2 * FAILURES  # gets, and merges of found manifests


def test_slow_misses_open_the_breaker_and_slow_hits_do_not() -> None:
    store = MemoryClient()
    slow = remote(store, "http://memory?slow=1e-9")
    store.values[KEY] = envelope(KEY)
    assert None not in [slow.get(KEY) for _ in range(2 * FAILURES)]
    for _ in range(FAILURES):
        assert not slow.reading.is_open
        assert not slow.trouble, "a busy machine is slow, too"
        assert slow.get(OTHER) is None
    assert slow.reading.is_open
    assert "an answer without a kernel took" in slow.trouble


def test_while_a_question_hangs_no_other_one_is_asked() -> None:
    """While an operation hangs, others are skipped. A name lookup, for example, has no timeout."""
    store, go_on = MemoryClient(), threading.Event()
    store.trouble = lambda _: go_on.wait(60)
    hanging = remote(store, "http://memory?slow=60&connect_timeout=0.005&timeout=0.005")
    for _ in range(5):
        with pytest.raises(RemoteError):
            hanging.get(KEY)
    until(lambda: store.operations)  # the thread may start late
    assert store.operations == ["get"]
    assert hanging.wait > 0
    told = hanging.counts.as_dict()
    assert (told["timeouts"], told["skipped"]) == (1, 4)
    go_on.set()
    until(lambda: not hanging.wait)
    store.trouble = lambda _: None
    assert hanging.get(OTHER) is None


def test_control_characters_of_a_server_are_escaped(tmp_path: Path) -> None:
    store = failing(RemoteError("\x1b]0;yours\x07 no\r\nentry " + "x" * 5000))
    with service(tmp_path, remote(store)) as client:
        client.get(KEY)
        reason = str(counts(client)["reason"])
    assert reason.isprintable()
    assert "no\\r\\nentry" in reason
    assert len(reason) < 1000


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcache.remote.daemon.MAX_WAITING", 5)
    store, go_on = MemoryClient(), threading.Event()
    store.trouble = lambda _: go_on.wait(60)
    with service(tmp_path, remote(store)) as client:
        for number in range(30):
            client.put(Upload((f"{number:064x}", envelope(f"{number:064x}"))))
        assert not client.flush(0.01)
        go_on.set()
        assert client.flush(60)
        told = counts(client)
    assert told["uploads"] == len(store.values)
    assert 5 <= len(store.values) <= 9 + 4
    assert told["dropped"] == 30 - len(store.values)


# -- leases ----------------------------------------------------------------------------------------


def test_a_daemon_uploads_before_it_exits(tmp_path: Path) -> None:
    """A daemon that stops uploads an entry before it releases the entry's lease."""
    store = MemoryClient()
    begun, go_on = threading.Event(), threading.Event()
    there: list[bool] = []

    def trouble(operation: str) -> None:
        if operation == "put":
            begun.set()
            go_on.wait(60)
        elif operation == "release":
            there.append(KEY in store.values)

    store.trouble = trouble
    with service(tmp_path, remote(store, LEASES)) as client:
        lease = leased(client)
        client.put(Upload((KEY, envelope(KEY)), None, (lease.key, lease.token)), lease)
        assert begun.wait(60)
        assert ask(str(tmp_path / "socket"), STOP) == []
        until(lambda: not (tmp_path / "socket").exists())  # another daemon can be started
        assert store.leases
        go_on.set()
    assert KEY in store.values
    assert there == [True]
    assert not store.leases


def end(lease: Lease, path: str) -> None:
    ask(path, STOP)


@pytest.mark.parametrize("how", [lambda lease, _: lease.connection.close(), end])
def test_a_lease_is_renewed(tmp_path: Path, how: Callable[[Lease, str], object]) -> None:
    store = MemoryClient()
    with service(tmp_path, remote(store, f"{LEASES}&lease_seconds=0.1")) as client:
        lease = leased(client)
        until(lambda: store.operations.count("renew") > 2)
        how(lease, str(tmp_path / "socket"))
        until(lambda: not store.leases)


#: Acquires a lease, and forks a child that continues to run when this process is killed.
PARENT = """
import os, signal, sys
from remote.fakes import LEASES, addresses, client_at
lease = client_at(sys.argv[1], *addresses(LEASES)).lease(sys.argv[2])
if os.fork() == 0:
    print(os.getpid(), lease.token != "", flush=True)
    signal.pause()
sys.stdin.read()
"""


def test_a_child_does_not_keep_the_lease_of_its_killed_parent(tmp_path: Path) -> None:
    store = MemoryClient()
    with service(tmp_path, remote(store, LEASES)):
        with started(PARENT, tmp_path / "socket", KEY) as parent:
            child = int(parent.stdout.readline().split()[0])
            assert KEY in store.leases
            parent.kill()
        try:
            until(lambda: KEY not in store.leases)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_without_leases_everybody_compiles(tmp_path: Path) -> None:
    for known in (remote(MemoryClient()), remote(failing(RemoteError("closed")), LEASES)):
        with service(tmp_path, known) as client:
            assert client.lease(KEY) is False
