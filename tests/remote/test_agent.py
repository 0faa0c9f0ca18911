"""The agent and its clients: what is asked, counted, left alone, and survived."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from remote.fakes import MemoryStore, addresses, agent, client_at, tier, until

from kcache.entry import Entry, decode, encode
from kcache.errors import ConfigError
from kcache.remote import agent as agent_module
from kcache.remote import start
from kcache.remote.address import Address
from kcache.remote.agent import Agent
from kcache.remote.agent_setup import Setup
from kcache.remote.breaker import (
    FAILURES,
    FIRST_PAUSE,
    LACKING,
    LACKING_PAUSE,
    LONGEST_PAUSE,
    REFUSED,
    REFUSED_PAUSE,
    SOON,
    Breaker,
)
from kcache.remote.client import FIRST_PAUSE as CLIENT_PAUSE
from kcache.remote.client import Client, Lease, client_for
from kcache.remote.counts import Counts
from kcache.remote.keys import make_keys, write_keys
from kcache.remote.protocol import Found, Upload
from kcache.remote.seal import make_sealer
from kcache.remote.store import RemoteError, RemoteRefused, RemoteTimeout
from kcache.remote.tier import Tier
from kcache.util.private_socket import bound

KEY, OTHER = "ab" * 32, "cd" * 32


def envelope(key: str, **payload: bytes) -> bytes:
    return encode(key, Entry(payload or {"cubin": b"code" * 100}), producer=b"test")


def counts(client: Client, index: int = 0) -> dict[str, object]:
    status = client.status()
    assert status is not None
    tiers = status["tiers"]
    assert isinstance(tiers, list)
    found = tiers[index]
    assert isinstance(found, dict)
    return found


def test_what_is_put_is_found(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store)) as client:
        missing = client.get(KEY)
        assert missing is not None
        assert missing.value is None
        value = envelope(KEY)
        assert client.put(Upload((KEY, value)))
        assert client.flush(30)
        found = client.get(KEY)
        assert found is not None
        assert found.value == value
        assert found.tier == 0
        told = counts(client)
    assert (told["hits"], told["misses"], told["uploads"]) == (1, 1, 1)
    assert told["bytes_in"] == told["bytes_out"] == len(store.values[KEY])


def test_tiers_are_asked_in_order_and_written_if_writable(tmp_path: Path) -> None:
    first, second, third = MemoryStore(), MemoryStore(), MemoryStore()
    second.values[KEY] = tier(MemoryStore())._sealer.seal(KEY, envelope(KEY))
    tiers = (
        tier(first, "http://a?ro&slow=60"),
        tier(second, "http://b?slow=60"),
        tier(third, "http://c?slow=60"),
    )
    with agent(tmp_path, *tiers) as client:
        found = client.get(KEY)
        assert found is not None
        assert found.tier == 1
        after = client.get(KEY, first=found.tier + 1)
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
    stores = [MemoryStore(), MemoryStore()]
    with agent(tmp_path, *map(tier, stores)) as client:
        assert client.get(KEY, OTHER) == Found(None, 2, 0.0)
        assert [counts(client, n)["misses"] for n in (0, 1)] == [1, 1]
        sealer = make_sealer()
        stores[1].values[KEY] = sealer.seal(KEY, b"under the one")
        stores[0].values[OTHER] = sealer.seal(OTHER, b"under the other")
        assert client.get(KEY, OTHER) == Found(b"under the other", 0, 0.0, 1)
        assert client.get(KEY, OTHER, first=1) == Found(b"under the one", 1, 0.0, 0)
        assert client.flush(60)  # the first one has the values of the second, too
        stores[0].values[KEY] = b"damaged"
        assert client.get(KEY, OTHER) == Found(b"under the other", 0, 0.0, 1)
        assert counts(client)["damaged"] == 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_hit_further_down_is_kept_further_up(tmp_path: Path, keep: bool) -> None:
    near, far = MemoryStore(), MemoryStore()
    sealer = tier(far)._sealer
    manifest = envelope(OTHER, set0=b"headers")
    far.values = {KEY: sealer.seal(KEY, envelope(KEY)), OTHER: sealer.seal(OTHER, manifest)}
    address = f"http://far?slow=60&keep={int(keep)}"
    with agent(tmp_path, tier(near, "http://near?slow=60"), tier(far, address)) as client:
        for _ in range(2):
            for key in (KEY, OTHER):
                found = client.get(key)
                assert found is not None
                assert found.value is not None
            assert client.flush(30)
    assert near.values == (far.values if keep else {})
    assert far.operations.count("get") == (2 if keep else 4)


def test_manifests_are_merged_and_say_nothing_of_one_machine(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store)) as client:
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
    store = MemoryStore()
    store.values[KEY] = tier(store)._sealer.seal(KEY, envelope(KEY))
    store.answer = lambda value: value and change(value)  # type: ignore[operator]
    with agent(tmp_path, tier(store)) as client:
        found = client.get(KEY)
        assert found is not None
        assert found.value is None
        told = counts(client)
    assert (told["damaged"], told["hits"], told["misses"]) == (1, 0, 1)


def test_a_value_under_another_key_is_a_miss(tmp_path: Path) -> None:
    store = MemoryStore()
    store.values[OTHER] = tier(store)._sealer.seal(KEY, envelope(KEY))
    with agent(tmp_path, tier(store)) as client:
        found = client.get(OTHER)
        assert found is not None
        assert found.value is None
        assert counts(client)["damaged"] == 1


# -- failures --------------------------------------------------------------------------------------


def test_after_some_failures_nobody_asks_until_a_probe_succeeds(tmp_path: Path) -> None:
    store = MemoryStore()

    def fail(_: str) -> None:
        raise RemoteTimeout("too late")

    store.trouble = fail
    down = tier(store)
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
        down.breaker._until = 0.0
        store.trouble = lambda _: None
        client.nothing_until = 0.0
        client.get(KEY)
        until(lambda: not down.breaker.is_open)
        client.nothing_until = 0.0
        assert client.get(KEY) is not None
        assert client.worth_asking


def test_a_refusal_is_found_out_once(tmp_path: Path) -> None:
    store = MemoryStore()

    def refuse(_: str) -> None:
        raise RemoteRefused("no such user")

    store.trouble = refuse
    with agent(tmp_path, tier(store)) as client:
        for _ in range(20):
            client.get(KEY)
            client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        told = counts(client)
    assert told["refused"] == 1
    assert store.operations == ["get"]
    assert told["dropped"] == 20


def test_a_package_that_was_missing_is_used_once_it_is_there(tmp_path: Path) -> None:
    store = MemoryStore()
    store.values[KEY] = make_sealer().seal(KEY, envelope(KEY))
    there: list[MemoryStore] = []

    def make(_: Address) -> MemoryStore:
        if not there:
            raise ConfigError("no package")
        return store

    lacking = Tier(addresses()[0], make_sealer, Counts(), make=make)
    with agent(tmp_path, lacking) as client:
        client.get(KEY)
        assert client.nothing_until <= client._clock() + LACKING_PAUSE
        assert counts(client)["reason"] == "get: no package"
        there.append(store)
        lacking.breaker._until = client.nothing_until = 0.0  # the pause is over
        found = client.get(KEY)
        assert found is not None
        assert found.value == envelope(KEY), "the first question after it"
        assert counts(client)["breaker"] == "closed"


def test_keys_that_could_not_be_read_are_read_once_they_are_there(tmp_path: Path) -> None:
    store = MemoryStore()
    path = tmp_path / "keys.pem"
    signed = Tier(addresses()[0], lambda: make_sealer(str(path)), Counts(), make=lambda _: store)
    with agent(tmp_path, signed) as client:
        client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        assert not store.operations, "without keys nothing goes, and nothing is asked for"
        write_keys(str(path), make_keys("hmac")[0])
        signed.breaker._until = 0.0
        client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        assert store.operations == ["put"]


def test_credentials_are_read_again_after_a_refusal(tmp_path: Path) -> None:
    """The file of a password may have another one by the time of the probe."""
    made: list[MemoryStore] = []

    def refuse(_: str) -> None:
        raise RemoteRefused("wrong password")

    def make(_: Address) -> MemoryStore:
        made.append(MemoryStore())
        if len(made) == 1:
            made[0].trouble = refuse
        return made[-1]

    refused = Tier(addresses()[0], make_sealer, Counts(), make=make)
    with agent(tmp_path, refused) as client:
        client.get(KEY)
        refused.breaker._until = client.nothing_until = 0.0
        client.get(KEY)
        until(lambda: not refused.breaker.is_open)
    assert len(made) == 2


def test_an_agent_that_lacks_a_package_goes_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may be installed where this agent does not look; the next agent looks there."""
    monkeypatch.setattr(agent_module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(agent_module, "LACKING_IDLE", 0.05)

    def make(_: Address) -> MemoryStore:
        raise ConfigError("no package")

    path = str(tmp_path / "agent.socket")
    lacking = Tier(addresses()[0], make_sealer, Counts(), make=make)
    served = Agent(socket.socket(fileno=bound(path)), path, [lacking])
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    client = client_at(path)
    client.get(KEY)
    client.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not os.path.exists(path)


def test_a_store_that_raises_anything_is_survived(tmp_path: Path) -> None:
    store = MemoryStore()

    def break_down(_: str) -> None:
        raise ZeroDivisionError

    store.trouble = break_down
    with agent(tmp_path, tier(store)) as client:
        found = client.get(KEY)
        assert found is not None
        assert found.value is None
        assert counts(client)["errors"] == 1


def test_one_tier_that_fails_leaves_the_others(tmp_path: Path) -> None:
    down, well = MemoryStore(), MemoryStore()

    def fail(_: str) -> None:
        raise RemoteError("closed")

    down.trouble = fail
    with agent(tmp_path, tier(down, "http://a?slow=60"), tier(well, "http://b?slow=60")) as client:
        client.put(Upload((KEY, envelope(KEY))))
        assert client.flush(30)
        for _ in range(2 * FAILURES):
            found = client.get(KEY)
            assert found is not None
            assert found.tier == 1
            assert client.worth_asking
    assert down.operations.count("get") <= FAILURES


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_breaker() -> None:
    clock = _Clock()
    breaker = Breaker(0.25, clock)
    for _ in range(FAILURES - 1):
        breaker.failed("down")
    breaker.succeeded(0.001, hit=False)
    for _ in range(FAILURES):
        assert not breaker.is_open
        breaker.failed("down")
    assert breaker.is_open
    assert 0 < breaker.wait() <= FIRST_PAUSE
    assert not breaker.begin_probe()
    pause = FIRST_PAUSE
    for _ in range(10):
        clock.now += breaker.wait() + 0.1
        assert breaker.begin_probe()
        assert not breaker.begin_probe(), "one at a time"
        breaker.end_probe("still down")
        pause = min(2 * pause, LONGEST_PAUSE)
        assert breaker.wait() == pytest.approx(pause)
    clock.now += LONGEST_PAUSE
    assert breaker.begin_probe()
    breaker.end_probe("")
    assert not breaker.is_open
    breaker.failed("who are you?", REFUSED)
    assert breaker.wait() == pytest.approx(REFUSED_PAUSE)
    breaker.failed("no package", LACKING)
    assert breaker.wait() == pytest.approx(LACKING_PAUSE)


def test_a_probe_that_takes_long_is_asked_about_a_few_times() -> None:
    clock = _Clock()
    breaker = Breaker(0.25, clock)
    for _ in range(FAILURES):
        breaker.failed("down")
    clock.now += breaker.wait()
    assert breaker.begin_probe()
    assert breaker.wait() == SOON, "a remote that is back is soon used"
    end = clock.now + 10
    asked = 0
    while clock.now < end:
        clock.now += breaker.wait()
        asked += 1
    assert asked < 12
    breaker.end_probe("still down")
    assert breaker.wait() == pytest.approx(2 * FIRST_PAUSE)
    clock.now += breaker.wait()
    assert breaker.begin_probe()
    assert breaker.wait() == SOON


def test_a_probe_without_a_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    remote = tier(MemoryStore())
    remote.breaker = Breaker(0.25, clock)
    for _ in range(FAILURES):
        remote.breaker.failed("down")

    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    clock.now += FIRST_PAUSE
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert remote.get(KEY) is None
    assert remote.breaker.is_open
    clock.now += remote.breaker.wait()
    assert remote.get(KEY) is None
    until(lambda: not remote.breaker.is_open)


def test_slow_misses_open_the_breaker_and_slow_hits_do_not() -> None:
    breaker = Breaker(0.25, _Clock())
    for _ in range(2 * FAILURES):
        breaker.succeeded(0.5, hit=True)
    assert not breaker.is_open
    for _ in range(FAILURES):
        breaker.succeeded(0.5, hit=False)
    assert breaker.is_open


# -- leases ----------------------------------------------------------------------------------------

LEASES = "redis://memory?leases=1&slow=60"


def test_a_lease_belongs_to_one_and_ends_with_its_upload(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store, LEASES)) as client:
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
    store = MemoryStore()
    begun, go_on = threading.Event(), threading.Event()
    there: list[bool] = []

    def trouble(operation: str) -> None:
        if operation == "put":
            begun.set()
            go_on.wait(60)
        elif operation == "release":
            there.append(KEY in store.values)

    store.trouble = trouble
    with agent(tmp_path, tier(store, LEASES)) as client:
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


def test_an_agent_that_ends_leaves_no_lease(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store, LEASES)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        client.stop()
        until(lambda: not store.leases)


def test_a_lease_ends_with_the_program(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store, LEASES)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        lease.connection.close()
        until(lambda: KEY not in store.leases)


def test_without_leases_everybody_compiles(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store)) as client:
        assert client.lease(KEY) is False

    def fail(_: str) -> None:
        raise RemoteError("closed")

    store.trouble = fail
    with agent(tmp_path, tier(store, LEASES)) as client:
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
        assert client.failures == 1


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
        assert client.failures == 1


def test_other_programs_do_not_wait_for_a_frozen_agent() -> None:
    setup = Setup(addresses("http://127.0.0.1:9"), {}, {})
    with tempfile.TemporaryDirectory(prefix="ka-", dir="/tmp") as folder:
        path = start.socket_path([folder], setup)
        with socket.socket(fileno=bound(path)):  # nobody accepts
            first, other = (client_for(setup, [folder], os.environ) for _ in range(2))
            first.timeout, other.timeout = 0.05, 3600.0
            assert first.get(KEY) is None
            assert other.get(KEY) is None
            assert (first.failures, other.failures) == (1, 1)
            past = time.time() - 2 * start.SILENT_FOR
            os.utime(f"{path}.silent", (past, past))
            start.connected(path, setup, os.environ).close()  # it may answer again


def test_no_agent_at_all_is_found_out_once_per_pause(tmp_path: Path) -> None:
    client = client_at(str(tmp_path / "nothing"))
    for _ in range(100):
        assert client.get(KEY) is None
    assert client.failures == 1
    assert CLIENT_PAUSE >= 10


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
    with agent(tmp_path, tier(MemoryStore())) as client:
        with socket.socket(socket.AF_UNIX) as bad:
            bad.connect(str(tmp_path / "agent.socket"))
            bad.sendall(question)
            bad.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert bad.recv(100) == b""
        found = client.get(KEY)
        assert found is not None


def test_a_new_agent_is_found_after_the_old_one_has_ended(tmp_path: Path) -> None:
    store = MemoryStore()
    with agent(tmp_path, tier(store)) as client:
        assert client.get(KEY) is not None
    with agent(tmp_path, tier(store)):
        assert client.get(KEY) is not None, "the connection that was kept is of no use"
        client.close()


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcache.remote.uploads.MAX_WAITING", 5)
    store = MemoryStore()
    go_on = threading.Event()
    store.trouble = lambda _: go_on.wait(60)
    with agent(tmp_path, tier(store)) as client:
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
    with agent(tmp_path, tier(MemoryStore())) as client:
        assert client.status() is not None
        client.close()  # the next question comes over a new connection
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            assert client.get(KEY) is None
        client._silent_until = client.nothing_until = 0.0
        assert client.get(KEY) is not None


def test_an_upload_without_threads_is_dropped_and_its_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    leased = "redis://memory?slow=60&leases=1"
    with agent(tmp_path, tier(store, leased)) as client:
        lease = client.lease(KEY)
        assert isinstance(lease, Lease)
        upload = Upload((KEY, envelope(KEY)), lease=(KEY, lease.token))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            assert client.put(upload, lease)
        assert client.flush(60)
        assert not store.leases
        assert client.put(upload)
        assert client.flush(60)
        told = counts(client)
    assert (told["dropped"], told["uploads"]) == (1, 1)


def test_a_program_that_is_stopped_while_it_starts_an_agent_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "START_TIMEOUT", 0.05)
    path = str(tmp_path / "agent.socket")
    with open(f"{path}.lock", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RemoteError, match="stopped"):
            start.connected(path, Setup(addresses(), {}, {}), {})


def test_what_a_server_says_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    store = MemoryStore()

    def refuse(_: str) -> None:
        raise RemoteRefused("\x1b]0;yours\x07 no\r\nentry " + "x" * 5000)

    store.trouble = refuse
    with agent(tmp_path, tier(store)) as client:
        client.get(KEY)
        reason = str(counts(client)["reason"])
    assert reason.isprintable()
    assert "no??entry" in reason
    assert len(reason) < 1000


def test_while_a_question_hangs_no_other_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a name server that does not answer: no time-out of ours reaches that."""
    monkeypatch.setattr("kcache.remote.tier._GRACE", 0.0)
    store, go_on = MemoryStore(), threading.Event()
    store.trouble = lambda _: go_on.wait(60)
    remote = tier(store, "http://memory?slow=60&connect_timeout=0.005&timeout=0.005")
    thread = threading.Thread(target=remote.get, args=(KEY,))
    thread.start()
    until(remote._hangs)
    assert remote.get(OTHER) is None
    assert remote.counts.as_dict()["skipped"] == 1
    go_on.set()
    thread.join()
    assert remote.get(OTHER) is None
    assert remote.counts.as_dict()["misses"] == 2


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
