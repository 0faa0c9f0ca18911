"""The agent and its clients: what is asked, counted, left alone, and survived."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from remote.fakes import LEASES, MemoryClient, addresses, agent, client_at, remote, until

from kcache.entry import Entry, decode, encode
from kcache.errors import ConfigError
from kcache.remote import agent as agent_module
from kcache.remote import start
from kcache.remote.address import Address
from kcache.remote.agent import Agent
from kcache.remote.agent_setup import Setup
from kcache.remote.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, SOON, Breaker
from kcache.remote.client import Client, Lease, client_for
from kcache.remote.counts import Counts
from kcache.remote.keys import make_keys, write_keys
from kcache.remote.protocol import Found, Upload
from kcache.remote.remote import Remote
from kcache.remote.remote_client import RemoteError, RemoteTimeout
from kcache.remote.seal import make_sealer
from kcache.util.private_socket import bound

KEY, OTHER = "ab" * 32, "cd" * 32


def envelope(key: str, **payload: bytes) -> bytes:
    return encode(key, Entry(payload or {"cubin": b"code" * 100}), producer=b"test")


def counts(client: Client, index: int = 0) -> dict[str, object]:
    status = client.status()
    assert status is not None
    remotes = status["remotes"]
    assert isinstance(remotes, list)
    found = remotes[index]
    assert isinstance(found, dict)
    return found


def test_what_is_put_is_found(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store)) as client:
        missing = client.get(KEY)
        assert missing is not None
        assert missing.value is None
        value = envelope(KEY)
        assert client.put(Upload((KEY, value)))
        assert client.flush(30)
        found = client.get(KEY)
        assert found is not None
        assert found.value == value
        assert found.remote == 0
        told = counts(client)
    assert (told["hits"], told["misses"], told["uploads"]) == (1, 1, 1)
    assert told["bytes_in"] == told["bytes_out"] == len(store.values[KEY])


def test_remotes_are_asked_in_order_and_written_if_writable(tmp_path: Path) -> None:
    first, second, third = MemoryClient(), MemoryClient(), MemoryClient()
    second.values[KEY] = envelope(KEY)
    remotes = (
        remote(first, "http://a?ro&slow=60"),
        remote(second, "http://b?slow=60"),
        remote(third, "http://c?slow=60"),
    )
    with agent(tmp_path, *remotes) as client:
        found = client.get(KEY)
        assert found is not None
        assert found.remote == 1
        after = client.get(KEY, first=found.remote + 1)
        assert after is not None
        assert after.value is None
        client.put(Upload((OTHER, envelope(OTHER))))
        assert client.flush(30)
    assert OTHER not in first.values
    assert OTHER in second.values
    assert OTHER in third.values
    assert third.operations.count("get") == 1


def test_two_keys_are_one_question(tmp_path: Path) -> None:
    """The answer says which key it is of; each remote is asked for both before the next one is."""
    stores = [MemoryClient(), MemoryClient()]
    with agent(tmp_path, *map(remote, stores)) as client:
        assert client.get(KEY, OTHER) == Found(None, 2, 0.0)
        assert [counts(client, n)["misses"] for n in (0, 1)] == [1, 1]
        stores[1].values[KEY] = envelope(KEY)
        stores[0].values[OTHER] = envelope(OTHER)
        assert client.get(KEY, OTHER) == Found(envelope(OTHER), 0, 0.0, 1)
        assert client.get(KEY, OTHER, first=1) == Found(envelope(KEY), 1, 0.0, 0)
        assert client.flush(60)  # the first one has the values of the second, too
        stores[0].values[KEY] = b"damaged"
        assert client.get(KEY, OTHER) == Found(envelope(OTHER), 0, 0.0, 1)
        assert counts(client)["damaged"] == 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_hit_further_down_is_kept_further_up(tmp_path: Path, keep: bool) -> None:
    near, far = MemoryClient(), MemoryClient()
    far.values = {KEY: envelope(KEY), OTHER: envelope(OTHER, set0=b"headers")}
    address = f"http://far?slow=60&keep={int(keep)}"
    with agent(tmp_path, remote(near, "http://near?slow=60"), remote(far, address)) as client:
        for _ in range(2):
            for key in (KEY, OTHER):
                found = client.get(key)
                assert found is not None
                assert found.value is not None
            assert client.flush(30)
    assert near.values == (far.values if keep else {})
    assert far.operations.count("get") == (2 if keep else 4)


def test_manifests_are_merged_and_say_nothing_of_one_machine(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store)) as client:
        for number in range(3):
            manifest = envelope(KEY, set0=b"headers of %d" % number)
            client.put(Upload((OTHER, envelope(OTHER)), (KEY, manifest)))
            assert client.flush(30)
        found = client.get(KEY)
    assert found is not None
    assert found.value is not None
    payload = decode(found.value, KEY, producer=b"test").payload
    assert list(payload.values()) == [b"headers of 2", b"headers of 1", b"headers of 0"]


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v[:-1],
        lambda v: v + b"x",
        lambda v: v[:50] + bytes((v[50] ^ 1,)) + v[51:],
        lambda _: b"",
        lambda _: os.urandom(200),
    ],
)
def test_damaged_values_are_misses(tmp_path: Path, change: object) -> None:
    store = MemoryClient()
    store.values[KEY] = envelope(KEY)
    store.answer = lambda value: value and change(value)  # type: ignore[operator]
    with agent(tmp_path, remote(store)) as client:
        found = client.get(KEY)
        assert found is not None
        assert found.value is None
        told = counts(client)
    assert (told["damaged"], told["hits"], told["misses"]) == (1, 0, 1)


def test_a_value_under_another_key_is_a_miss(tmp_path: Path) -> None:
    store = MemoryClient()
    store.values[OTHER] = envelope(KEY)
    with agent(tmp_path, remote(store)) as client:
        found = client.get(OTHER)
        assert found is not None
        assert found.value is None
        assert counts(client)["damaged"] == 1


# -- failures --------------------------------------------------------------------------------------


def test_after_some_failures_nobody_asks_until_a_probe_succeeds(tmp_path: Path) -> None:
    store = MemoryClient()

    def fail(_: str) -> None:
        raise RemoteTimeout("too late")

    store.trouble = fail
    down = remote(store)
    with agent(tmp_path, down) as client:
        for _ in range(FAILURES):
            assert client.worth_asking
            client.get(KEY)
        assert not client.worth_asking
        asked = len(store.operations)
        for _ in range(1000):
            assert client.get(KEY) is None
        assert len(store.operations) == asked
        told = counts(client)
        assert (told["timeouts"], told["breaker"]) == (FAILURES, "open")
        # Another program has the same agent.
        down.reading._until = 0.0
        store.trouble = lambda _: None
        client.nothing_until = 0.0
        client.get(KEY)
        until(lambda: not down.reading.is_open)
        client.nothing_until = 0.0
        assert client.get(KEY) is not None
        assert client.worth_asking


def test_uploads_that_fail_leave_the_remote_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who may not write, and a server that is full, are still asked."""
    store = MemoryClient()
    store.values[KEY] = envelope(KEY)

    def refuse(operation: str) -> None:
        if operation == "put":
            raise RemoteError("not for you")

    store.trouble = refuse
    with agent(tmp_path, remote(store)) as client:
        for _ in range(20):
            client.put(Upload((OTHER, envelope(OTHER))))
        assert client.flush(30)
        found = client.get(KEY)
        assert found is not None
        assert found.value == envelope(KEY)
        told = counts(client)
    assert store.operations.count("put") <= FAILURES + 3  # four threads upload
    assert (told["dropped"], told["breaker"], told["reason"]) == (20, "closed", "not for you")
    warning = "http://memory: not for you; kcache stores nothing there for now"
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_a_package_that_was_missing_is_used_once_it_is_there(tmp_path: Path) -> None:
    store = MemoryClient()
    store.values[KEY] = envelope(KEY)
    there: list[MemoryClient] = []

    def make(_: Address) -> MemoryClient:
        if not there:
            raise ConfigError("no package")
        return store

    lacking = Remote(addresses()[0], make_sealer, Counts(), make=make)
    with agent(tmp_path, lacking) as client:
        for _ in range(FAILURES):
            client.get(KEY)
        assert counts(client)["reason"] == "no package"
        there.append(store)
        lacking.reading._until = client.nothing_until = 0.0  # the pause is over
        client.get(KEY)
        until(lambda: not lacking.reading.is_open)
        client.nothing_until = 0.0
        found = client.get(KEY)
        assert found is not None
        assert found.value == envelope(KEY)


def test_keys_that_could_not_be_read_are_read_once_they_are_there(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is missing")
    store = MemoryClient()
    path = tmp_path / "keys.pem"
    signed = Remote(addresses()[0], lambda: make_sealer(str(path)), Counts(), make=lambda _: store)
    with agent(tmp_path, signed) as client:
        client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        assert not store.operations, "without keys nothing goes, and nothing is asked for"
        write_keys(str(path), make_keys()[0])
        client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        assert store.operations == ["put"]


def test_credentials_are_read_again_after_failures(tmp_path: Path) -> None:
    """The file of a password may have another one by the time of the next trial."""
    made: list[MemoryClient] = []

    def refuse(_: str) -> None:
        raise RemoteError("wrong password")

    def make(_: Address) -> MemoryClient:
        made.append(MemoryClient())
        if len(made) == 1:
            made[0].trouble = refuse
        return made[-1]

    refused = Remote(addresses()[0], make_sealer, Counts(), make=make)
    with agent(tmp_path, refused) as client:
        for _ in range(FAILURES):
            client.get(KEY)
        refused.reading._until = client.nothing_until = 0.0
        client.get(KEY)
        until(lambda: not refused.reading.is_open)
    assert len(made) == 2


def test_an_agent_ends_soon_after_its_last_program_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(agent_module, "IDLE", 0.05)
    path = str(tmp_path / "agent.socket")
    served = Agent(socket.socket(fileno=bound(path)), path, [remote(MemoryClient())])
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    client = client_at(path)
    client.get(KEY)
    client.close()
    thread.join(60)
    assert not thread.is_alive()
    assert os.listdir(tmp_path) == []


def test_a_store_that_raises_anything_is_survived(tmp_path: Path) -> None:
    store = MemoryClient()

    def break_down(_: str) -> None:
        raise ZeroDivisionError

    store.trouble = break_down
    with agent(tmp_path, remote(store)) as client:
        found = client.get(KEY)
        assert found is not None
        assert found.value is None
        assert counts(client)["errors"] == 1


def test_one_remote_that_fails_leaves_the_others(tmp_path: Path) -> None:
    down, well = MemoryClient(), MemoryClient()

    def fail(_: str) -> None:
        raise RemoteError("closed")

    down.trouble = fail
    with agent(
        tmp_path, remote(down, "http://a?slow=60"), remote(well, "http://b?slow=60")
    ) as client:
        client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        for _ in range(5 * FAILURES):
            found = client.get(KEY)
            assert found is not None
            assert (found.remote, found.unanswered) == (1, 1)
            assert client.worth_asking
            assert client.flush(30)
    assert down.operations.count("get") <= 2 * FAILURES  # questions, and merges of what was found


def test_each_process_group_is_told_once(tmp_path: Path) -> None:
    store = MemoryClient()

    def fail(_: str) -> None:
        raise RemoteError("Authentication required")

    store.trouble = fail
    known = remote(store, "redis://me:hunter2@cache.example:1?slow=60")
    with agent(tmp_path, known):
        warned: dict[int, list[str]] = {1: [], 2: []}
        clients = [client_at(str(tmp_path / "agent.socket")) for _ in range(4)]
        for number, client in enumerate(clients):
            client.group = 1 + number % 2
            client._warn = warned[client.group].append
            client.get(KEY)
            client.nothing_until = 0.0
            client.get(KEY)
        text = "redis://***@cache.example:1: Authentication required; kcache works without it"
        assert warned == {1: [text], 2: [text]}
        for client in clients:
            client.close()
        later = client_at(str(tmp_path / "agent.socket"))  # the next command of a script
        later.group, later._warn = 1, warned[1].append
        until(lambda: (later.status() and len(warned[1]) == 2) or later.close())
        later.close()


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_breaker() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES - 1):
        breaker.failed("down")
    breaker.succeeded()
    for _ in range(FAILURES):
        assert not breaker.is_open
        assert breaker.wait == 0.0
        breaker.failed("down")
    assert breaker.is_open
    for _ in range(5):  # operations that were under way say nothing new
        breaker.failed("down")
    assert 0 < breaker.wait <= FIRST_PAUSE
    assert not breaker.try_again()
    pause = FIRST_PAUSE
    for _ in range(10):
        clock.now += breaker.wait + 0.1
        assert breaker.try_again()
        assert not breaker.try_again(), "one at a time"
        assert breaker.wait == SOON, "a remote that is back is soon used"
        breaker.failed("still down")
        pause = min(2 * pause, LONGEST_PAUSE)
        assert breaker.wait == pytest.approx(pause)
    clock.now += LONGEST_PAUSE
    assert breaker.try_again()
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.reason == ""


def test_a_trial_without_a_thread_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    known = remote(MemoryClient())
    known.reading = Breaker(clock)
    for _ in range(FAILURES):
        known.reading.failed("down")
    clock.now += FIRST_PAUSE
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RemoteError):
            known.get(KEY)
    assert known.reading.is_open
    clock.now += known.reading.wait
    with suppress(RemoteError):  # unless the trial is faster
        known.get(KEY)
    until(lambda: not known.reading.is_open)


def test_slow_misses_open_the_breaker_and_slow_hits_do_not() -> None:
    store = MemoryClient()
    slow = remote(store, "http://memory?slow=1e-9")
    store.values[KEY] = envelope(KEY)
    for _ in range(2 * FAILURES):
        assert slow.get(KEY) is not None
    for _ in range(FAILURES):
        assert not slow.reading.is_open
        assert not slow.trouble, "a loaded machine is slow, too"
        assert slow.get(OTHER) is None
    assert slow.reading.is_open
    assert "an answer without a kernel took" in slow.trouble


# -- leases ----------------------------------------------------------------------------------------


def test_a_lease_belongs_to_one_and_ends_with_its_upload(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store, LEASES)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        assert client.lease(KEY) is True
        assert isinstance(client.lease(OTHER), Lease)
        upload = Upload((KEY, envelope(KEY)), lease=(lease.key, lease.token))
        assert client.put(upload, lease)
        until(lambda: KEY not in store.leases)
        assert KEY in store.values
        again = client.lease(KEY)
        assert isinstance(again, Lease)
        client.release(again)
        assert KEY not in store.leases


def test_an_agent_that_is_told_to_end_uploads_first(tmp_path: Path) -> None:
    """Others wait for what was made under a lease: it is there before the lease is given back."""
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
    with agent(tmp_path, remote(store, LEASES)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        client.put(Upload((KEY, envelope(KEY)), None, (lease.key, lease.token)), lease)
        assert begun.wait(60)
        client.stop()
        until(lambda: not (tmp_path / "agent.socket").exists())  # another one can be started
        assert store.leases
        go_on.set()
    assert KEY in store.values
    assert there == [True]
    assert not store.leases


def test_a_lease_is_renewed_while_its_program_lives(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store, f"{LEASES}&lease_seconds=0.1")) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        until(lambda: store.operations.count("renew") > 2)
        lease.connection.close()
        until(lambda: not store.leases)


def test_an_agent_that_ends_leaves_no_lease(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store, LEASES)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        client.stop()
        until(lambda: not store.leases)


def test_a_lease_ends_with_the_program(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store, LEASES)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        lease.connection.close()
        until(lambda: KEY not in store.leases)


#: Takes a lease, and forks a child that stays when this process is killed.
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
    with agent(tmp_path, remote(store, LEASES)):
        with subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path / "agent.socket"), KEY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        ) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline().split()[0])
            assert KEY in store.leases
            parent.kill()
        try:
            until(lambda: KEY not in store.leases)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_without_leases_everybody_compiles(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store)) as client:
        assert client.lease(KEY) is False

    def fail(_: str) -> None:
        raise RemoteError("closed")

    store.trouble = fail
    with agent(tmp_path, remote(store, LEASES)) as client:
        assert client.lease(KEY) is False


# -- bad agents, bad clients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"KCW1" + b"\xff" * 100, b"KCW1" + bytes(4)]
)
def test_an_agent_that_says_nonsense_is_left_alone(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "agent.socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        client = client_at(path)
        assert client.get(KEY) is None
        thread.join()
        assert not client.worth_asking
        assert client.get(KEY) is None


def test_an_agent_that_is_frozen_costs_one_wait(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = client_at(path)
        client.timeout = 0.05
        for _ in range(100):
            assert client.get(KEY) is None
            assert not client.put(Upload((KEY, envelope(KEY))))


def test_a_frozen_agent_is_replaced_by_the_next_program() -> None:
    setup = Setup(addresses("http://127.0.0.1:9"), {}, {})
    with tempfile.TemporaryDirectory(prefix="ka-", dir="/tmp") as folder:
        path = start.socket_path([folder], setup)
        with socket.socket(fileno=bound(path)):  # nobody accepts
            first, other = (client_for(setup, [folder], os.environ) for _ in range(2))
            first.timeout = 0.05
            assert first.get(KEY) is None
            assert not os.path.exists(path)
            assert other.status() is not None
            first.nothing_until = first._silent_until = 0.0
            first.timeout = 60
            assert first.status() is not None
            other.stop()


def test_no_agent_at_all_is_found_out_once_per_pause(tmp_path: Path) -> None:
    client, warned = client_at(str(tmp_path / "nothing")), list[str]()
    client._warn = warned.append
    for _ in range(100):
        assert client.get(KEY) is None
    assert len(warned) == 1
    assert "No such file" in warned[0]


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"KCW1" + b"\xff" * 100,
        b"KCW1\x01\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00foo",
        b"KCW1\x02\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00getkey",
    ],
)
def test_a_client_that_says_nonsense_harms_nobody(tmp_path: Path, question: bytes) -> None:
    with agent(tmp_path, remote(MemoryClient())) as client:
        with socket.socket(socket.AF_UNIX) as bad:
            bad.connect(str(tmp_path / "agent.socket"))
            bad.sendall(question)
            bad.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert bad.recv(100) == b""
        found = client.get(KEY)
        assert found is not None


def test_a_new_agent_is_found_after_the_old_one_has_ended(tmp_path: Path) -> None:
    store = MemoryClient()
    with agent(tmp_path, remote(store)) as client:
        assert client.get(KEY) is not None
    with agent(tmp_path, remote(store)):
        assert client.get(KEY) is not None, "the connection that was kept is of no use"
        client.close()


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcache.remote.uploads.MAX_WAITING", 5)
    store = MemoryClient()
    go_on = threading.Event()
    store.trouble = lambda _: go_on.wait(60)
    with agent(tmp_path, remote(store)) as client:
        for number in range(30):
            client.put(Upload((f"{number:064x}", envelope(f"{number:064x}"))))
        assert not client.flush(0.01)
        go_on.set()
        assert client.flush(60)
        told = counts(client)
    assert told["uploads"] == len(store.values)
    assert 5 <= len(store.values) <= 9 + 4
    assert told["dropped"] == 30 - len(store.values)


def no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


def test_an_agent_without_threads_goes_on_once_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(tmp_path, remote(MemoryClient())) as client:
        assert client.status() is not None
        client.close()  # the next question comes over a new connection
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            assert client.get(KEY) is None
        client._silent_until = client.nothing_until = 0.0
        assert client.get(KEY) is not None


def test_an_upload_without_threads_waits_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(tmp_path, remote(MemoryClient())) as client:
        assert client.status() is not None
        upload = Upload((KEY, envelope(KEY)))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            assert client.put(upload)
        assert not client.flush(0)
        assert client.put(upload)
        assert client.flush(60)
        assert counts(client)["uploads"] == 2


def test_a_program_that_is_stopped_while_it_starts_an_agent_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "TURN_TIMEOUT", 0.05)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(RemoteError, match="stopped"):
        start.connected(str(tmp_path / "agent.socket"), Setup(addresses(), {}, {}), {})
    os.close(other)


def test_what_a_server_says_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    store = MemoryClient()

    def refuse(_: str) -> None:
        raise RemoteError("\x1b]0;yours\x07 no\r\nentry " + "x" * 5000)

    store.trouble = refuse
    with agent(tmp_path, remote(store)) as client:
        client.get(KEY)
        reason = str(counts(client)["reason"])
    assert reason.isprintable()
    assert "no??entry" in reason
    assert len(reason) < 1000


def test_while_a_question_hangs_no_other_one_is_asked() -> None:
    """As behind a name server that does not answer: no time-out of a client reaches that."""
    store, go_on = MemoryClient(), threading.Event()
    store.trouble = lambda _: go_on.wait(60)
    hanging = remote(store, "http://memory?slow=60&connect_timeout=0.005&timeout=0.005")
    for _ in range(5):
        with pytest.raises(RemoteError):
            hanging.get(KEY)
    assert store.operations == ["get"]
    assert hanging.wait > 0
    told = hanging.counts.as_dict()
    assert (told["timeouts"], told["skipped"]) == (1, 4)
    go_on.set()
    until(lambda: not hanging.wait)
    store.trouble = lambda _: None
    assert hanging.get(OTHER) is None


def test_a_folder_that_others_can_exchange_holds_no_socket() -> None:
    setup = Setup(addresses(), {}, {})
    with tempfile.TemporaryDirectory(prefix="kc-") as place:  # a socket's path is short
        shared, own = Path(place, "shared"), Path(place, "own")
        own.mkdir(mode=0o700)
        shared.mkdir()
        shared.chmod(0o777)
        assert start.socket_path([str(shared), str(own)], setup).startswith(f"{own}/")
        assert os.listdir(shared) == []
        with pytest.raises(RemoteError, match="no private folder"):
            start.socket_path([str(shared)], setup)
        shared.chmod(0o1777)
        assert start.socket_path([str(shared), str(own)], setup).startswith(f"{shared}/")
