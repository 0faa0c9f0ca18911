"""Object stores: against Moto's S3, and against servers that answer as GCS and Azure do."""

import os
from pathlib import Path

import pytest
from remote.fakes import MOST, VALUE, Open, key, value_in
from remote.servers import S3, Nginx

from kcache.errors import ConfigError
from kcache.remote.storage import RemoteError

pytest.importorskip("obstore", reason="the package obstore is missing")


def test_no_such_bucket(store: Open, s3: S3) -> None:
    cache = store(f"s3://nowhere?endpoint={s3.endpoint}")
    for ask in (
        lambda: cache.get(key(5), MOST),
        lambda: cache.put(key(5), b"x"),
        lambda: cache.replace(key(5), b"x", None),
    ):
        with pytest.raises(RemoteError, match="no such bucket"):
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
    with pytest.raises(ConfigError, match="can't be understood"):
        store(f"s3://kernels?endpoint={s3.endpoint}")


def test_tls(store: Open, nginx: Nginx) -> None:
    """By HTTP's server, which has a certificate: that it is reached shows in its answer."""
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
