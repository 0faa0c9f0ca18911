"""Object stores: against Moto's S3, and against servers that answer as GCS and Azure do."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest
from remote.proxy import Faults, Proxy
from remote.servers import S3, Nginx

from kcache.errors import ConfigError
from kcache.remote.address import parse_addresses
from kcache.remote.store import (
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteStore,
    RemoteTimeout,
    open_store,
)

pytest.importorskip("obstore", reason="the package obstore is missing")

MOST = 1 << 20
VALUE = os.urandom(100 << 10)
PATIENT = "connect_timeout=60&timeout=60"
Open = Callable[..., RemoteStore]


def key(number: object) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def store(url: str, more: str = PATIENT) -> RemoteStore:
    separator = "&" if "?" in url else "?"
    (address,) = parse_addresses(f"{url}{separator}{more}", name="remote")
    return open_store(address)


@pytest.fixture
def cache(s3: S3) -> RemoteStore:
    return store(f"s3://kernels/team%20one/x?endpoint={s3.endpoint}")


def test_what_is_put_is_there(cache: RemoteStore, s3: S3) -> None:
    assert cache.get(key(1), MOST) is None
    for value in (VALUE, b"x", b"other"):
        cache.put(key(1), value)
        assert cache.get(key(1), MOST) == value
    other = store(f"s3://kernels?endpoint={s3.endpoint}")
    assert other.get(key(1), MOST) is None
    cache.close()
    cache.close()


def test_a_value_beyond_the_limit(cache: RemoteStore) -> None:
    cache.put(key(2), VALUE)
    with pytest.raises(RemoteError, match=f"{len(VALUE)} bytes; allowed: 100"):
        cache.get(key(2), 100)
    assert cache.get(key(2), len(VALUE)) == VALUE


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


def test_a_merge_that_changes_nothing_writes_nothing(cache: RemoteStore) -> None:
    cache.merge(key(3), lambda old: None, MOST)
    assert cache.get(key(3), MOST) is None


def test_merges(cache: RemoteStore) -> None:
    cache.merge(key(4), lambda old: (old or b"") + b"1", MOST)
    cache.merge(key(4), lambda old: (old or b"") + b"2", MOST)
    assert cache.get(key(4), MOST) == b"12"


def test_no_such_bucket(s3: S3) -> None:
    cache = store(f"s3://nowhere?endpoint={s3.endpoint}")
    for ask in (
        lambda: cache.get(key(5), MOST),
        lambda: cache.put(key(5), b"x"),
        lambda: cache.merge(key(5), lambda old: b"x", MOST),
    ):
        with pytest.raises(RemoteRefused, match="no such bucket"):
            ask()


# -- credentials ---------------------------------------------------------------------------------


def test_no_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    cache = store(f"s3://kernels?endpoint={s3.endpoint}", "connect_timeout=2&timeout=2")
    with pytest.raises(RemoteRefused, match="no credentials"):
        cache.get(key(6), MOST)
    store(f"s3://kernels?endpoint={s3.endpoint}&anonymous").get(key(6), MOST)


def test_the_users_profile(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = Path(os.environ["HOME"], ".aws", "credentials")
    file.parent.mkdir(parents=True)
    keys = "aws_access_key_id = k%\naws_secret_access_key = s\n"
    file.write_text(f"[default]\n{keys}\n[team]\n{keys}aws_session_token = t\n")
    for profile in ("", "team"):
        monkeypatch.setenv("AWS_PROFILE", profile)
        store(f"s3://kernels?endpoint={s3.endpoint}").put(key(7), b"x")
    file.write_text("what is this")
    with pytest.raises(ConfigError, match="can't be understood"):
        store(f"s3://kernels?endpoint={s3.endpoint}")


# -- a server in trouble -------------------------------------------------------------------------


@pytest.fixture
def faulty(s3: S3) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", s3.port)) as proxy:
        yield proxy


@pytest.mark.parametrize("faults", [Faults(hole=True), Faults(drip=0.1), Faults(delay=60)])
def test_answers_that_take_too_long(faults: Faults, faulty: Proxy, cache: RemoteStore) -> None:
    cache.put(key(8), VALUE)
    faulty.faults = faults
    url = f"s3://kernels/team%20one/x?endpoint=http://127.0.0.1:{faulty.port}&max_entry=1"
    slow = store(url, "connect_timeout=60&timeout=0.5")
    with pytest.raises(RemoteTimeout):
        slow.get(key(8), MOST)
    with pytest.raises(RemoteTimeout):
        slow.put(key("new"), b"x")


@pytest.mark.parametrize("length", [0, 1, 100, 50_000, 102_600])
def test_a_truncated_answer(length: int, faulty: Proxy, cache: RemoteStore) -> None:
    cache.put(key(9), VALUE)
    faulty.faults = Faults(truncate=length)
    with pytest.raises(RemoteError):
        store(f"s3://kernels/team%20one/x?endpoint=http://127.0.0.1:{faulty.port}").get(
            key(9), MOST
        )


def test_nobody_listens(faulty: Proxy) -> None:
    faulty.close()
    cache = store(f"s3://kernels?endpoint=http://127.0.0.1:{faulty.port}")
    with pytest.raises(RemoteError) as caught:
        cache.get(key(10), MOST)
    assert not isinstance(caught.value, (RemoteRefused, RemoteTimeout))


def test_tls(nginx: Nginx) -> None:
    """By HTTP's server, which has a certificate: that it is reached shows in its answer."""
    url = f"s3://cache/x?endpoint=https://127.0.0.1:{nginx.tls_port}&anonymous"
    with pytest.raises(RemoteRefused, match="certificate"):
        store(url).get(key(11), MOST)
    trusted = store(f"{url}&ca_file={nginx.certificate}")
    assert trusted.get(key(11), MOST) is None
    place = nginx.files / "cache" / "x" / key(11)[:2]
    place.mkdir(parents=True)
    (place / key(11)[2:]).write_bytes(VALUE)
    assert trusted.get(key(11), MOST) == VALUE
    with pytest.raises(ConfigError, match="can't be read"):
        store(f"{url}&ca_file={nginx.certificate}-not-there")


@pytest.mark.parametrize("path", ["closed", "ro"])
def test_no_permission(path: str, nginx: Nginx) -> None:
    cache = store(f"s3://{path}/x?endpoint=http://127.0.0.1:{nginx.port}&anonymous")
    with pytest.raises(RemoteReadOnly, match="privileges"):
        cache.put(key(12), b"x")
    if path == "closed":
        with pytest.raises(RemoteRefused, match="right to list"):
            cache.get(key(12), MOST)
    else:
        assert cache.get(key(12), MOST) is None


# -- a server of our own, with the conditions of all three -----------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """As much of the protocols as obstore uses to get and put."""

    protocol_version = "HTTP/1.1"
    values: ClassVar[dict[str, tuple[int, bytes]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    refuses_conditions: ClassVar[bool] = False

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = self.values.get(self.path)
        self.answer(404 if found is None else 200, *(found or (0, b"")))

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            version, _ = self.values.get(self.path, (0, b""))
            match, absent = self.headers["If-Match"], self.headers["If-None-Match"]
            generation = self.headers["x-goog-if-generation-match"]
            if (
                (match and match != f'"{version}"')
                or (absent and version)
                or (generation and int(generation) != version)
            ):
                self.answer(412, version, b"")
                return
            if self.refuses_conditions and (match or absent):
                self.answer(501, version, b"")
                return
            self.values[self.path] = version + 1, body
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
    """Such a server; yields its port."""
    Handler.values.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    fake = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(fake))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(timeout=30)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_merges_lose_nothing(scheme: str, strict: int) -> None:
    cache = store(f"{scheme}://kernels/x?endpoint=http://127.0.0.1:{strict}")
    assert cache.get(key(13), MOST) is None
    cache.put(key(13), VALUE)
    assert cache.get(key(13), MOST) == VALUE
    merge_from_threads(cache, key(14), writers=4, each=5)
    where = f"kernels/x/{key(13)[:2]}/{key(13)[2:]}"
    assert any(unquote(path).endswith(where) for path in Handler.values)


def test_a_panic_in_the_client_is_an_error_of_the_remote() -> None:
    """It is no Exception, and would end the thread that asks."""
    from kcache.remote.objects import _answering

    class Panic(BaseException):
        pass

    with pytest.raises(RemoteError, match="Panic"), _answering():
        raise Panic
