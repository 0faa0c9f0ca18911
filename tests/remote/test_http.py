"""HTTP: against a real nginx, and against servers that misbehave."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from remote.proxy import Faults, Proxy
from remote.servers import Nginx

from kcache.errors import ConfigError
from kcache.remote.address import parse_addresses
from kcache.remote.deadline import DeadlineSocket
from kcache.remote.http import HttpStore
from kcache.remote.store import (
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteTimeout,
    RemoteTooLong,
)

MOST = 1 << 20
VALUE = os.urandom(100 << 10)
#: Long enough for a loaded machine, where the test is not about time.
PATIENT = "connect_timeout=60&timeout=60"


def key(number: object) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture
def store() -> Iterator[Callable[..., HttpStore]]:
    """Opens stores, and closes them after the test."""
    made: list[HttpStore] = []

    def open_store(url: str) -> HttpStore:
        (address,) = parse_addresses(url, name="remote")
        made.append(HttpStore(address))
        return made[-1]

    yield open_store
    for each in made:
        each.close()


@pytest.fixture
def at(store: Callable[..., HttpStore], nginx: Nginx) -> Callable[..., HttpStore]:
    """A store below a path of nginx."""
    return lambda path, more="", user="": store(
        f"http://{user}127.0.0.1:{nginx.port}/{path}?{PATIENT}{more}"
    )


def test_what_is_put_is_there(at: Callable[..., HttpStore], nginx: Nginx) -> None:
    cache = at("cache")
    assert cache.get(key(1), MOST) is None
    for value in (VALUE, b"x", b"other"):
        cache.put(key(1), value)
        assert cache.get(key(1), MOST) == value
    assert (nginx.files / "cache" / key(1)[:2] / key(1)[2:]).read_bytes() == b"other"


@pytest.mark.parametrize(
    ("layout", "below"), [("flat", key(2)), ("bazel", f"ac/{key(2)}"), ("subdirs", None)]
)
def test_layouts(layout: str, below: str, at: Callable[..., HttpStore], nginx: Nginx) -> None:
    cache = at(f"cache/{layout}", f"&layout={layout}")
    cache.put(key(2), VALUE)
    assert cache.get(key(2), MOST) == VALUE
    where = nginx.files / "cache" / layout / (below or f"{key(2)[:2]}/{key(2)[2:]}")
    assert where.read_bytes() == VALUE


def test_an_unknown_layout(at: Callable[..., HttpStore]) -> None:
    with pytest.raises(ConfigError, match="allowed: subdirs, flat, bazel"):
        at("cache", "&layout=other")


def test_connections_are_used_again(at: Callable[..., HttpStore], nginx: Nginx) -> None:
    with Proxy(("127.0.0.1", nginx.port)) as proxy:
        cache = HttpStore(
            parse_addresses(f"http://127.0.0.1:{proxy.port}/cache?{PATIENT}", name="x")[0]
        )
        for number in range(5):
            cache.put(key("again"), VALUE)
            assert cache.get(key("again"), MOST) == VALUE
            assert cache.get(key(f"absent {number}"), MOST) is None
        assert proxy.done["connections"] == 1
        # Like a server that closes idle connections: the client opens a new one, without an error.
        proxy.drop()
        assert cache.get(key("again"), MOST) == VALUE
        assert proxy.done["connections"] == 2
        cache.close()
        cache.close()


# -- who may -------------------------------------------------------------------------------------


def test_basic_credentials(at: Callable[..., HttpStore]) -> None:
    mine = at("private", user="user:secret@")
    mine.put(key(3), VALUE)
    assert mine.get(key(3), MOST) == VALUE
    for user in ("", "user:wrong@", "other:secret@"):
        with pytest.raises(RemoteRefused, match="401"):
            at("private", user=user).get(key(3), MOST)
        with pytest.raises(RemoteReadOnly, match="401"):
            at("private", user=user).put(key(3), VALUE)


def test_a_token_from_the_environment(
    at: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    at("token").put(key(4), VALUE)
    assert at("token").get(key(4), MOST) == VALUE
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "wrong")
    with pytest.raises(RemoteRefused, match="401"):
        at("token").get(key(4), MOST)
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "two\nlines")
    with pytest.raises(ConfigError, match="no header"):
        at("token")


def test_a_token_from_a_file(at: Callable[..., HttpStore], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t0ken\n")
    file.chmod(0o600)
    at("token", f"&token_file={file}").put(key(5), VALUE)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        at("token", f"&token_file={file}")
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        at("token", f"&token_file={file}")
    with pytest.raises(ConfigError, match="No such file"):
        at("token", f"&token_file={file}-not-there")


def test_netrc(at: Callable[..., HttpStore]) -> None:
    home = Path(os.environ["HOME"])
    home.mkdir()
    netrc = home / ".netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    netrc.chmod(0o600)
    at("private").put(key(6), VALUE)
    netrc.write_text("machine elsewhere login user password secret\n")
    with pytest.raises(RemoteRefused, match="401"):
        at("private").get(key(6), MOST)
    netrc.write_text("what is this")
    with pytest.raises(ConfigError, match="understood"):
        at("private")
    netrc.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it"):
        at("private")


def test_what_the_address_does_not_name_is_not_sent_in_the_clear(
    store: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    assert store("http://cache.example/x")._authorization is None
    assert store("https://cache.example/x")._authorization == "Bearer t0ken"
    assert store("http://localhost/x")._authorization == "Bearer t0ken"
    monkeypatch.setenv("http_proxy", "http://proxy.example")
    assert store("http://localhost/x")._authorization is None
    monkeypatch.setenv("no_proxy", "localhost")
    assert store("http://localhost/x")._authorization == "Bearer t0ken"
    assert (store("http://u:p@cache.example/x")._authorization or "").startswith("Basic ")


def test_read_only(at: Callable[..., HttpStore], nginx: Nginx) -> None:
    place = nginx.files / "ro" / key(7)[:2]
    place.mkdir(parents=True)
    (place / key(7)[2:]).write_bytes(VALUE)
    assert at("ro").get(key(7), MOST) == VALUE
    with pytest.raises(RemoteReadOnly, match="403"):
        at("ro").put(key(7), VALUE)
    with pytest.raises(RemoteReadOnly, match="403"):
        at("ro").merge(key(7), lambda old: b"new", MOST)


def test_other_answers(at: Callable[..., HttpStore]) -> None:
    assert at("gone").get(key(1), MOST) is None
    with pytest.raises(RemoteRefused, match="403 Forbidden"):
        at("closed").get(key(1), MOST)
    with pytest.raises(RemoteError, match="500 Internal") as caught:
        at("broken").get(key(1), MOST)
    assert not isinstance(caught.value, RemoteRefused)
    with pytest.raises(RemoteTooLong, match="413"):
        at("cache").put(key(1), bytes(9 << 20))


# -- redirects -----------------------------------------------------------------------------------


def test_redirects_are_followed(at: Callable[..., HttpStore]) -> None:
    at("cache").put(key(8), VALUE)
    assert at("moved").get(key(8), MOST) == VALUE
    with pytest.raises(RemoteError, match="301"):  # a PUT would become a GET
        at("moved").put(key(8), VALUE)
    at("moved307").put(key(8), b"by 307")
    assert at("moved307").get(key(8), MOST) == b"by 307"


def test_another_host_gets_no_credentials(
    at: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")  # what `/token/` of that host asks for
    with pytest.raises(RemoteRefused, match="401"):
        at("away").get(key(8), MOST)


@pytest.mark.parametrize(
    ("path", "why"),
    [("round", "again and again"), ("file", "not followed"), ("nowhere", "to nowhere")],
)
def test_redirects_to_nowhere(path: str, why: str, at: Callable[..., HttpStore]) -> None:
    with pytest.raises(RemoteError, match=why):
        at(path).get(key(8), MOST)


# -- TLS -----------------------------------------------------------------------------------------


def test_tls(store: Callable[..., HttpStore], nginx: Nginx) -> None:
    url = f"https://127.0.0.1:{nginx.tls_port}/cache?{PATIENT}"
    cache = store(f"{url}&ca_file={nginx.certificate}")
    cache.put(key(9), VALUE)
    assert cache.get(key(9), MOST) == VALUE
    with pytest.raises(RemoteRefused, match="certificate"):
        store(url).get(key(9), MOST)
    with pytest.raises(RemoteError, match="SSL"):  # no TLS there
        store(f"https://127.0.0.1:{nginx.port}/cache?{PATIENT}").get(key(9), MOST)
    with pytest.raises(ConfigError, match="certificate"):
        store(f"{url}&ca_file={nginx.certificate}-not-there")


def test_a_certificate_of_the_client(
    store: Callable[..., HttpStore], nginx: Nginx, tmp_path: Path
) -> None:
    ca, cert, private = (nginx.certificate.with_suffix(s) for s in (".ca", ".pem", ".key"))
    url = f"https://127.0.0.1:{nginx.tls_port}/certified?{PATIENT}&ca_file={ca}"
    own = store(f"{url}&cert_file={cert}&key_file={private}")
    own.put(key(9), VALUE)
    assert own.get(key(9), MOST) == VALUE
    with pytest.raises(RemoteRefused, match="403"):
        store(url).get(key(9), MOST)
    (tmp_path / "other").write_text("no key")
    with pytest.raises(ConfigError, match="certificate or its key"):
        store(f"{url}&cert_file={cert}&key_file={tmp_path / 'other'}")


def test_a_redirect_out_of_tls_is_not_followed(
    store: Callable[..., HttpStore], nginx: Nginx
) -> None:
    url = f"https://127.0.0.1:{nginx.tls_port}/untls?{PATIENT}&ca_file={nginx.certificate}"
    with pytest.raises(RemoteError, match="out of TLS"):
        store(url).get(key(9), MOST)


def test_the_certificate_of_another_name(store: Callable[..., HttpStore], nginx: Nginx) -> None:
    url = f"https://127.0.0.2:{nginx.tls_port}/cache?{PATIENT}&ca_file={nginx.certificate}"
    with Proxy(("127.0.0.1", nginx.tls_port)) as proxy:
        url = url.replace(f"127.0.0.2:{nginx.tls_port}", f"ip6-localhost:{proxy.port}")
        with pytest.raises(RemoteError):
            store(url).get(key(9), MOST)


# -- bounds --------------------------------------------------------------------------------------


def test_a_value_beyond_the_limit_is_not_read(at: Callable[..., HttpStore]) -> None:
    cache = at("cache")
    cache.put(key(10), VALUE)
    with pytest.raises(RemoteError, match=f"{len(VALUE)} bytes; allowed: 100"):
        cache.get(key(10), 100)
    assert cache.get(key(10), len(VALUE)) == VALUE


@pytest.fixture
def faulty(nginx: Nginx) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", nginx.port)) as proxy:
        yield proxy


def behind(proxy: Proxy, *, timeout: float) -> HttpStore:
    text = f"http://127.0.0.1:{proxy.port}/cache?connect_timeout=60&timeout={timeout}"
    return HttpStore(parse_addresses(text, name="x")[0])


@pytest.mark.parametrize("length", [0, 1, 100, 50_000, 102_500])
def test_a_truncated_answer(length: int, faulty: Proxy, at: Callable[..., HttpStore]) -> None:
    at("cache").put(key(11), VALUE)
    faulty.faults = Faults(truncate=length)
    with pytest.raises(RemoteError):
        behind(faulty, timeout=60).get(key(11), MOST)


@pytest.mark.parametrize("faults", [Faults(hole=True), Faults(drip=0.1), Faults(delay=60)])
def test_answers_that_take_too_long(
    faults: Faults, faulty: Proxy, at: Callable[..., HttpStore]
) -> None:
    at("cache").put(key(12), VALUE)
    faulty.faults = faults
    cache = behind(faulty, timeout=0.5)
    for ask in (lambda: cache.get(key(12), MOST), lambda: cache.put(key("new"), b"x")):
        with pytest.raises(RemoteTimeout):
            ask()


def test_nobody_listens(faulty: Proxy) -> None:
    cache = behind(faulty, timeout=60)
    faulty.close()
    with pytest.raises(RemoteError, match="Refused"):
        cache.get(key(13), MOST)


def test_a_reset_connection(faulty: Proxy) -> None:
    faulty.faults = Faults(refuse=True)
    with pytest.raises(RemoteError):
        behind(faulty, timeout=60).get(key(13), MOST)


# -- a server of our own: conditions, and bodies without a length ---------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that knows If-Match, and that sends what it is told."""

    protocol_version = "HTTP/1.1"
    values: ClassVar[dict[str, bytes]] = {}
    raw: ClassVar[dict[str, bytes]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    weak: ClassVar[bool] = False

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.raw:
            self.wfile.write(self.raw[self.path])
            self.close_connection = True
            return
        value = self.values.get(self.path)
        self.answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            before = self.values.get(self.path)
            match, absent = self.headers["If-Match"], self.headers["If-None-Match"]
            if (match and (before is None or match != self.tag(before))) or (absent and before):
                self.answer(412, b"")
                return
            self.values[self.path] = body
        self.answer(204, b"")

    def tag(self, value: bytes) -> str:
        return f'{"W/" if self.weak else ""}"{hashlib.md5(value).hexdigest()}"'

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", self.tag(body))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def strict() -> Iterator[str]:
    """A server that knows If-Match; yields its URL."""
    Handler.values.clear()
    Handler.raw.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=30)


def merge_from_threads(store: HttpStore, place: str, writers: int, each: int) -> int:
    """Add `writers` times `each` different lines to one value; return how often it was refused."""
    gave_up: list[bytes] = []

    def add(number: int) -> None:
        for count in range(each):
            line = b"%d.%d\n" % (number, count)
            while True:
                try:
                    store.merge(place, lambda old, line=line: (old or b"") + line, MOST)  # type: ignore[misc]
                except RemoteError as error:
                    assert "all the time" in str(error)  # noqa: PT017
                    gave_up.append(line)
                    continue
                break

    threads = [threading.Thread(target=add, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)
    return len(gave_up)


def test_merges_lose_nothing(strict: str, store: Callable[..., HttpStore]) -> None:
    cache = store(f"{strict}/x?{PATIENT}")
    merge_from_threads(cache, key(14), writers=6, each=5)
    lines = (cache.get(key(14), MOST) or b"").split()
    assert sorted(lines) == sorted(b"%d.%d" % (n, c) for n in range(6) for c in range(5))


def test_a_merge_that_changes_nothing_writes_nothing(
    strict: str, store: Callable[..., HttpStore]
) -> None:
    cache = store(f"{strict}/x?{PATIENT}")
    seen: list[bytes | None] = []

    def leave(old: bytes | None) -> None:
        seen.append(old)

    cache.merge(key(15), leave, MOST)
    assert cache.get(key(15), MOST) is None
    cache.put(key(15), b"1")
    cache.merge(key(15), leave, MOST)
    assert seen == [None, b"1"]


def test_a_weak_tag_is_no_condition(
    strict: str, store: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "weak", True)
    cache = store(f"{strict}/x?{PATIENT}")
    cache.put(key(16), b"1")
    cache.merge(key(16), lambda old: (old or b"") + b"2", MOST)
    assert cache.get(key(16), MOST) == b"12"


def test_merges_by_nginx_where_the_last_writer_wins(at: Callable[..., HttpStore]) -> None:
    cache = at("cache")
    cache.merge(key("merged"), lambda old: (old or b"") + b"1", MOST)
    cache.merge(key("merged"), lambda old: (old or b"") + b"2", MOST)
    assert (cache.get(key("merged"), MOST) or b"").endswith(b"2")


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (HEAD + b"\r\nabc", None),  # it may have been cut off anywhere
        (HEAD + b"Content-Length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nabc\r\n", None),
        (CHUNKED + b"ffffffffffffffff\r\nabc", None),
        (CHUNKED + b"7d0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n", None),
        (HEAD + b"\r\n" + bytes(2000), None),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\nabc", None),
        (HEAD + b"Content-Length: 5\r\n\r\nabc", None),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500 + b"\r\n", None),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 100_000, None),
        (b"SSH-2.0-OpenSSH\r\n", None),
        (b"", None),
        (b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc", b"abc"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (HEAD + b"A: b\r\n c\r\ncontent-LENGTH:3\r\n\r\nabc", b"abc"),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (HEAD + b"Content-Length: 3\r\n\r\nabc" + HEAD + b"\r\n", b"abc"),
        (HEAD + b"Content-Length: 700\r\n\r\n" + bytes(700), bytes(700)),
        (HEAD + b"Content-Length: +3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + HEAD + b"Content-Length: 3\r\n\r\nabc", b"abc"),
    ],
)
def test_what_a_server_may_send(
    raw: bytes, found: bytes | None, strict: str, store: Callable[..., HttpStore]
) -> None:
    cache = store(f"{strict}/x?layout=flat&{PATIENT}")
    Handler.raw[f"/x/{key('raw')}"] = raw
    if found is None:
        with pytest.raises(RemoteError):
            cache.get(key("raw"), 1000)
    else:
        assert cache.get(key("raw"), 1000) == found


# -- proxies -------------------------------------------------------------------------------------


def test_a_proxy_from_the_environment(
    strict: str, store: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a proxy sees of a request by HTTP is the whole URL."""
    monkeypatch.setenv("http_proxy", strict)
    url = f"http://cache.example/{key('proxied')}"
    Handler.values[url] = b"by the proxy"
    cache = store(f"http://cache.example?layout=flat&{PATIENT}")
    assert cache.get(key("proxied"), MOST) == b"by the proxy"
    monkeypatch.setenv("no_proxy", "cache.example")
    with pytest.raises(RemoteError):
        cache.get(key("proxied"), MOST)


@pytest.fixture
def tunnel(nginx: Nginx) -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that knows CONNECT, and leads to nginx whatever the name; yields what it is asked."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def serve(client: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += client.recv(1 << 12)
        asked.append(request)
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with client, socket.create_connection(("127.0.0.1", nginx.tls_port)) as server:
            back = threading.Thread(target=pump, args=(server, client), daemon=True)
            back.start()
            pump(client, server)
            back.join(timeout=30)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1], asked
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(timeout=30)


def test_a_tunnel_through_a_proxy(
    tunnel: tuple[int, list[bytes]],
    store: Callable[..., HttpStore],
    nginx: Nginx,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proxy sees the host, and its own credentials, and nothing of the remote's."""
    port, asked = tunnel
    monkeypatch.setenv("https_proxy", f"http://us%20er:pass@127.0.0.1:{port}")
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    cache = store(f"https://localhost:{nginx.tls_port}/token?{PATIENT}&ca_file={nginx.certificate}")
    for _ in range(2):
        cache.put(key("tunnel"), VALUE)
        assert cache.get(key("tunnel"), MOST) == VALUE
    assert len(asked) == 1
    assert asked[0].startswith(f"CONNECT localhost:{nginx.tls_port} ".encode())
    assert base64.b64encode(b"us er:pass") in asked[0]
    assert b"t0ken" not in asked[0]


def test_a_proxy_whose_answer_never_ends_is_not_waited_for(
    store: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(b"HTTP/1.1 200 Connection established\r\nX: ")
            while not done.wait(0.02):
                client.sendall(b"x")

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(RemoteTimeout):
            store("https://cache.example?connect_timeout=0.3").get(key("tunnel"), MOST)
        done.set()
        thread.join(timeout=30)


def test_too_long_an_answer_is_not_read_whoever_reads_it() -> None:
    here, there = socket.socketpair()
    with contextlib.closing(DeadlineSocket(here, 60)) as limited, there:
        there.sendall(bytes(100))
        limited.start(60, 99)
        assert limited.recv_into(bytearray(99)) == 99
        with pytest.raises(OSError, match="too long"):
            limited.recv_into(bytearray(99))


def test_chunks_of_less_than_nothing_are_not_all_that_follows(
    store: Callable[..., HttpStore],
) -> None:
    """http.client reads a chunk of -1 bytes to the end of the connection, whatever the limit."""
    sent = []

    def flood() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n")
            for _ in range(64):
                client.sendall(bytes(1 << 20))
                sent.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        cache = store(f"http://127.0.0.1:{listener.getsockname()[1]}?{PATIENT}")
        with pytest.raises(RemoteError, match="too long"):
            cache.get(key("flood"), MOST)
        thread.join(timeout=60)
    assert len(sent) < 64


@pytest.mark.parametrize("proxy", ["http://me:hid/den@proxy:1", "me:hid/den@proxy", "http://[hid"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_no_url_is_not_shown(
    scheme: str, proxy: str, store: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{scheme}_proxy", proxy)
    with pytest.raises(RemoteError, match="proxy") as caught:
        store(f"{scheme}://cache.example").get(key("proxied"), MOST)
    assert "hid" not in str(caught.value)


def test_a_host_whose_name_is_not_of_latin_letters(
    strict: str, store: Callable[..., HttpStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", strict)
    Handler.values[f"http://xn--j1a2ao.example/{key('named')}"] = b"by its name"
    cache = store(f"http://\u043a\u044d\u0448.example?layout=flat&{PATIENT}")
    assert cache.get(key("named"), MOST) == b"by its name"
    with pytest.raises(ConfigError, match="names no host"):
        store("http://" + "\u043a" * 70 + ".example")
