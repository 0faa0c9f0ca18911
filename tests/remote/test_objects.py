"""Object stores: against Moto's S3, and against servers that answer as GCS and Azure do."""

import base64
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from core.helpers import key
from remote.fakes import MOST, SOUND, VALUE, Open, RawServer, answering, value_in
from remote.servers import S3, Nginx, free_port

from kcache.environment import drop_unsafe_variables
from kcache.errors import ConfigError
from kcache.remote.storage import RemoteError, Storage

pytest.importorskip("obstore", reason="the package obstore is missing")


def test_no_such_bucket(store: Open, s3: S3) -> None:
    cache = store(f"s3://nowhere?endpoint={s3.endpoint}")
    for ask in (
        lambda: cache.get(key(5), MOST),
        lambda: cache.put(key(5), b"x"),
        lambda: cache.replace(key(5), b"x", None),
    ):
        with pytest.raises(RemoteError, match="the bucket does not exist"):
            ask()


# -- credentials ---------------------------------------------------------------------------------


def test_no_credentials(store: Open, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    cache = store(f"s3://kernels?endpoint={s3.endpoint}", "connect_timeout=2&timeout=2")
    with pytest.raises(RemoteError, match="no credentials"):
        cache.get(key(6), MOST)
    store(f"s3://kernels?endpoint={s3.endpoint}&anonymous").get(key(6), MOST)


def test_the_users_profile(store: Open, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match="can't be read as a file of AWS credentials"):
        store(f"s3://kernels?endpoint={s3.endpoint}")


#: Addresses, and variables with credentials for them. Each secret contains `hidden`.
SECRETS = [
    ("s3://bucket/x", {"AWS_SESSION_TOKEN": "hidden"}),
    ("az://bucket/x", {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=hidden"}),
    ("az://bucket/x", {"AZURE_STORAGE_TOKEN": "hidden"}),
    (
        "gs://bucket/x",
        {
            "GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "hidden", "private_key_id": '
            '"", "client_email": "", "disable_oauth": true}'
        },
    ),
]


@pytest.fixture(params=SECRETS)
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a bucket. The environment has credentials for it."""
    url, variables = request.param
    for name, value in {"AZURE_STORAGE_ACCOUNT_NAME": "me", **variables}.items():
        monkeypatch.setenv(name, value)
    return str(url)


def everything(storage: Storage) -> None:
    """Send each kind of request to a storage, and ignore the answers."""
    for ask in (
        lambda: storage.get(key(5), MOST),
        lambda: storage.put(key(5), b"x"),
        lambda: storage.replace(key(5), b"x", None),
    ):
        with suppress(RemoteError):
            ask()


def test_redirects_carry_no_credentials(address: str, server: RawServer, store: Open) -> None:
    port, answers, asked = server
    answers.append(SOUND)

    def redirect(client: socket.socket) -> None:
        client.recv(1 << 16)
        head = f"HTTP/1.1 307 x\r\nLocation: http://localhost:{port}/x\r\nContent-Length: 0\r\n"
        client.sendall(f"{head}Connection: close\r\n\r\n".encode())

    with answering(redirect) as redirecting:
        everything(store(f"{address}?endpoint=http://127.0.0.1:{redirecting}"))
    sent = b"".join(asked)
    assert b"hidden" not in sent
    assert b"authorization" not in sent.lower()


@pytest.mark.parametrize("host", ["store.example", "localhost"])
def test_credentials_are_not_sent_in_the_clear(
    host: str, address: str, server: RawServer, store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials are not sent without TLS to another machine or proxy; the test is the proxy."""
    port, answers, asked = server
    answers.append(SOUND)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="only through TLS"):
        store(f"{address}?endpoint=http://{host}").get(key(5), MOST)
    assert asked == []
    if address.startswith("gs:"):
        return  # obstore sends the token with a PUT, although the client is anonymous
    everything(store(f"{address}?endpoint=http://{host}&anonymous"))
    sent = b"".join(asked)
    assert sent
    assert b"hidden" not in sent
    assert b"authorization" not in sent.lower()


@pytest.mark.parametrize(
    "variables",
    [
        {"no_proxy": "*"},
        {"no_proxy": "127.0.0.1", "NO_PROXY": "elsewhere"},
        {"HTTP_PROXY": "PROXY", "http_proxy": ""},
    ],
)
def test_no_proxy_means_the_same_to_obstore(
    variables: dict[str, str],
    address: str,
    server: RawServer,
    store: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`no_proxy` also works for obstore, which interprets these variables in another way."""
    port, answers, asked = server
    answers.append(SOUND)
    for name, value in {"http_proxy": "PROXY", **variables}.items():
        monkeypatch.setenv(name, value.replace("PROXY", f"http://127.0.0.1:{port}"))
    everything(store(f"{address}?endpoint=http://127.0.0.1:{free_port()}"))
    assert asked == []


@pytest.mark.parametrize(
    ("name", "value", "stays"),
    [
        ("AZURE_storage_sas_token", "sig=hidden", False),  # obstore ignores the case of a name
        ("AZURE_AUTHORITY_HOST", "http://login.example", False),
        ("AZURE_AUTHORITY_HOST", "https://login.example", True),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1.example/x", False),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://[::ffff:10.0.0.1]/x", False),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/x", True),
    ],
)
def test_a_server_for_credentials_has_tls_or_is_near(
    name: str, value: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    drop_unsafe_variables()
    assert (name in os.environ) == stays


def test_the_azure_emulator_does_not_bypass_tls(
    server: RawServer, store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, answers, asked = server
    answers.append(SOUND)
    variables = {
        "STORAGE_ACCOUNT_NAME": "me",
        "STORAGE_TOKEN": "hidden",
        "STORAGE_USE_EMULATOR": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    everything(store(f"az://bucket/x?endpoint=https://127.0.0.1:{free_port()}"))
    assert asked == []


def test_variables_that_would_send_keys_elsewhere_are_dropped(
    server: RawServer, store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, answers, asked = server
    answers.append(SOUND)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    for name in ("AZURE_STORAGE_ENCRYPTION_KEY", "AWS_SSE_CUSTOMER_KEY_BASE64"):
        monkeypatch.setenv(name, base64.b64encode(b"0123456789abcdef" * 2).decode())
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
    for name in ("AWS_PROXY_URL", "AZURE_PROXY_URL", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for scheme in ("s3", "az"):
        everything(store(f"{scheme}://bucket/x?endpoint=http://store.example&anonymous"))
    sent = b"".join(asked)
    assert sent
    assert b"encryption-key" not in sent
    assert b"customer-key" not in sent


def test_tls(store: Open, nginx: Nginx) -> None:
    """A server's certificate is checked, and `ca_file` is used. The test's server is nginx."""
    url = f"s3://cache/x?endpoint=https://127.0.0.1:{nginx.tls_port}&anonymous"
    with pytest.raises(RemoteError, match="certificate"):
        store(url).get(key(11), MOST)
    trusted = store(f"{url}&ca_file={nginx.certificate}")
    assert trusted.get(key(11), MOST) is None
    place = nginx.files / "cache" / "x" / key(11)[:2]
    place.mkdir(parents=True)
    (place / key(11)[2:]).write_bytes(VALUE)
    assert value_in(trusted, key(11)) == VALUE
    with pytest.raises(ConfigError, match="can't be read"):
        store(f"{url}&ca_file={nginx.certificate}-not-there")
