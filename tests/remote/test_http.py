"""HTTP: credentials, redirects, TLS and proxies, with a real nginx, and what a server may send."""

import base64
import os
from pathlib import Path

import pytest
from core.helpers import key
from remote.fakes import HEAD, MOST, NO_HURRY, SOUND, VALUE, Open, RawServer, addresses, value_in
from remote.servers import Nginx

from kcache.errors import ConfigError
from kcache.remote.credentials import authorization
from kcache.remote.storage import RemoteError, open_storage

pytest.importorskip("urllib3", reason="the package urllib3 is missing")


@pytest.fixture
def at(store: Open, nginx: Nginx) -> Open:
    """A function that opens a client of a path of nginx."""
    return lambda path, more="", user="": store(
        f"http://{user}127.0.0.1:{nginx.port}/{path}?{NO_HURRY}{more}"
    )


@pytest.mark.parametrize(
    ("layout", "below"), [("flat", key(2)), ("bazel", f"ac/{key(2)}"), ("subdirs", None)]
)
def test_layouts(layout: str, below: str, at: Open, nginx: Nginx) -> None:
    cache = at(f"cache/{layout}", f"&layout={layout}")
    cache.put(key(2), VALUE)
    assert value_in(cache, key(2)) == VALUE
    where = nginx.files / "cache" / layout / (below or f"{key(2)[:2]}/{key(2)[2:]}")
    assert where.read_bytes() == VALUE


def test_an_unknown_layout(at: Open) -> None:
    with pytest.raises(ConfigError, match="expected one of subdirs, flat, bazel"):
        at("cache", "&layout=other")


# -- credentials ---------------------------------------------------------------------------------


def test_basic_credentials(at: Open) -> None:
    mine = at("private", user="user:secret@")
    mine.put(key(3), VALUE)
    assert value_in(mine, key(3)) == VALUE
    for user in ("", "user:wrong@", "other:secret@"):
        with pytest.raises(RemoteError, match="401 Unauthorized"):
            at("private", user=user).get(key(3), MOST)
        with pytest.raises(RemoteError, match="401 Unauthorized"):
            at("private", user=user).put(key(3), VALUE)


def test_a_token_from_the_environment(at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    at("token").put(key(4), VALUE)
    assert value_in(at("token"), key(4)) == VALUE
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "wrong")
    with pytest.raises(RemoteError, match="401"):
        at("token").get(key(4), MOST)
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "two\nlines")
    with pytest.raises(ConfigError, match="an HTTP header"):
        at("token")


def test_a_token_from_a_file(at: Open, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t0ken\n")
    file.chmod(0o600)
    at("token", f"&token_file={file}").put(key(5), VALUE)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        at("token", f"&token_file={file}")
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(ConfigError, match="which is empty"):
        at("token", f"&token_file={file}")
    with pytest.raises(ConfigError, match="No such file"):
        at("token", f"&token_file={file}-not-there")


def test_netrc(at: Open) -> None:
    home = Path(os.environ["HOME"])
    home.mkdir()
    netrc = home / ".netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    netrc.chmod(0o600)
    at("private").put(key(6), VALUE)
    netrc.write_text("machine elsewhere login user password secret\n")
    with pytest.raises(RemoteError, match="401"):
        at("private").get(key(6), MOST)
    netrc.write_text("what is this")
    with pytest.raises(ConfigError, match="can.t be read as a netrc file"):
        at("private")
    netrc.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it"):
        at("private")


def test_tokens_are_not_sent_in_the_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sent(url: str, host: str) -> str | None:
        return authorization(addresses(url)[0], host)

    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    assert sent("http://cache.example/x", "cache.example") is None
    assert sent("https://cache.example/x", "cache.example") == "Bearer t0ken"
    assert sent("http://localhost/x", "localhost") == "Bearer t0ken"
    monkeypatch.setenv("http_proxy", "http://proxy.example")
    assert sent("http://localhost/x", "localhost") is None
    monkeypatch.setenv("no_proxy", "localhost")
    assert sent("http://localhost/x", "localhost") == "Bearer t0ken"
    assert (sent("http://u:p@cache.example/x", "cache.example") or "").startswith("Basic ")
    for url in (
        "http://cache.example?token_file=/secret",
        "redis://cache.example?password_file=/secret",
        "redis+cluster://127.0.0.1?password_file=/secret",  # the node may name other nodes
    ):
        with pytest.raises(ConfigError, match="only through TLS"):
            open_storage(*addresses(url))


def test_other_answers(at: Open, nginx: Nginx) -> None:
    place = nginx.files / "ro" / key(7)[:2]
    place.mkdir(parents=True)
    (place / key(7)[2:]).write_bytes(VALUE)
    assert value_in(at("ro"), key(7)) == VALUE
    assert at("gone").get(key(1), MOST) is None
    for path, answer in (("closed", "403 Forbidden"), ("broken", "500 Internal Server Error")):
        with pytest.raises(RemoteError, match=answer):
            at(path).get(key(1), MOST)
    for path, size, answer in (("ro", 1, "403 Forbidden"), ("cache", 9 << 20, "413 ")):
        with pytest.raises(RemoteError, match=answer):
            at(path).put(key(1), bytes(size))


# -- redirects -----------------------------------------------------------------------------------


def test_redirects_are_followed(at: Open) -> None:
    at("cache").put(key(8), VALUE)
    assert value_in(at("moved"), key(8)) == VALUE
    with pytest.raises(RemoteError, match="301"):  # a PUT would become a GET
        at("moved").put(key(8), VALUE)
    at("moved307").put(key("moved"), VALUE)


def test_credentials_do_not_go_to_another_host(at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")  # `/token/` of the other host requires it
    with pytest.raises(RemoteError, match="401"):
        at("away").get(key(8), MOST)


@pytest.mark.parametrize(
    ("path", "why"),
    [("round", "more than 3 times"), ("file", "not to an HTTP"), ("nowhere", "malformed URL")],
)
def test_redirects_to_nowhere(path: str, why: str, at: Open) -> None:
    with pytest.raises(RemoteError, match=why):
        at(path).get(key(8), MOST)


# -- TLS -----------------------------------------------------------------------------------------


def test_tls(store: Open, nginx: Nginx) -> None:
    url = f"https://127.0.0.1:{nginx.tls_port}/cache"
    cache = store(f"{url}?ca_file={nginx.certificate}")
    cache.put(key(9), VALUE)
    assert value_in(cache, key(9)) == VALUE
    with pytest.raises(RemoteError, match="certificate"):
        store(url).get(key(9), MOST)
    with pytest.raises(RemoteError, match="SSL"):  # this port does not use TLS
        store(f"https://127.0.0.1:{nginx.port}/cache").get(key(9), MOST)
    with pytest.raises(ConfigError, match="certificate"):
        store(f"{url}?ca_file={nginx.certificate}-not-there")
    with pytest.raises(RemoteError, match="from https to http"):
        store(f"{url.replace('/cache', '/untls')}?ca_file={nginx.certificate}").get(key(9), MOST)


def test_a_certificate_of_the_client(store: Open, nginx: Nginx, tmp_path: Path) -> None:
    ca, cert, private = (nginx.certificate.with_suffix(s) for s in (".ca", ".pem", ".key"))
    url = f"https://127.0.0.1:{nginx.tls_port}/certified?ca_file={ca}"
    own = store(f"{url}&cert_file={cert}&key_file={private}")
    own.put(key(9), VALUE)
    assert value_in(own, key(9)) == VALUE
    with pytest.raises(RemoteError, match="403"):
        store(url).get(key(9), MOST)
    (tmp_path / "other").write_text("no key")
    with pytest.raises(ConfigError, match="certificate or its key"):
        store(f"{url}&cert_file={cert}&key_file={tmp_path / 'other'}")


# -- what a server may send ------------------------------------------------------------------------


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (HEAD + b"\r\nabc", None),  # its end may be missing
        (HEAD + b"Content-Length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nabc\r\n", None),
        (CHUNKED + b"7d0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n", None),
        (HEAD + b"Content-Length: 5\r\n\r\nabc", None),
        (b"SSH-2.0-OpenSSH\r\n", None),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (SOUND + HEAD + b"\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + SOUND, b"abc"),
    ],
)
def test_odd_answers(raw: bytes, found: bytes | None, server: RawServer, store: Open) -> None:
    port, answers, _ = server
    answers.append(raw)
    cache = store(f"http://127.0.0.1:{port}/x?layout=flat")
    if found is None:
        with pytest.raises(RemoteError):
            cache.get(key("raw"), 1000)
    else:
        assert value_in(cache, key("raw"), 1000) == found


def test_a_weak_tag_is_not_used_as_a_condition(server: RawServer, store: Open) -> None:
    port, answers, asked = server
    cache = store(f"http://127.0.0.1:{port}/x")
    for tag in ('"strong"', 'W/"weak"'):
        # The server answers once per connection, which the head tells the client.
        head = HEAD + b"Connection: close\r\n"
        answers[:] = [head + f"ETag: {tag}\r\nContent-Length: 3\r\n\r\nabc".encode()]
        found = cache.get(key("tag"), MOST)
        assert cache.replace(key("tag"), b"new", found)
    assert [b'If-Match: "strong"' in question for question in asked] == [False, True, False, False]


# -- proxies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "login"), [("us%20er:p%3A", b"us er:p:"), ("token", b"token:")])
def test_a_proxy_from_the_environment(
    given: str, login: bytes, server: RawServer, store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in the environment receives the whole URL and its own credentials."""
    port, answers, asked = server
    answers.append(SOUND)
    monkeypatch.setenv("http_proxy", f"http://{given}@127.0.0.1:{port}")
    cache = store("http://cache.example?layout=flat")
    assert value_in(cache, key("proxied")) == b"abc"
    assert asked[0].startswith(f"GET http://cache.example/{key('proxied')} ".encode())
    assert b" Basic " + base64.b64encode(login) + b"\r\n" in asked[0]
    monkeypatch.setenv("no_proxy", "cache.example")
    with pytest.raises(RemoteError):
        store("http://cache.example?layout=flat").get(key("proxied"), MOST)


@pytest.mark.parametrize("proxy", ["http://me:hid/den@proxy:1", "me:hid/den@proxy", "http://[hid"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_invalid_proxy_is_not_shown(
    scheme: str, proxy: str, store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{scheme}_proxy", proxy)
    with pytest.raises(RemoteError, match="proxy") as caught:
        store(f"{scheme}://cache.example").get(key("proxied"), MOST)
    assert "hid" not in str(caught.value)


def test_an_invalid_host_is_refused(store: Open) -> None:
    for host in ("\u043a" * 70 + ".example", "-\u043a-.example"):
        with pytest.raises(ConfigError, match="the host is malformed"):
            store(f"http://{host}")
