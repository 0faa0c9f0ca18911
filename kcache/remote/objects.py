"""ObjectStore: a remote in S3 or a compatible store, Google Cloud Storage or Azure, by obstore.

The address `s3://bucket/prefix` and a key make the object `prefix/ab/cdef...`. Credentials come
from the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`), for S3 also from `~/.aws/credentials`,
otherwise from the machine's own identity. Lifecycle rules of the bucket delete old objects.

obstore hangs in a child that was forked after its first use (seen with 0.12.1). So only this module
imports it, in the agent's process, which was started by exec and never forks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kcache.config import variable
from kcache.errors import ConfigError
from kcache.remote.http import pause
from kcache.remote.store import (
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteTimeout,
    RemoteTooLong,
)

try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as error:
    raise ImportError(
        "object stores need the package obstore: pip install obstore, "
        "or install kcache with the extra s3"
    ) from error

if TYPE_CHECKING:
    from kcache.remote.address import Address
    from kcache.remote.store import Change

__all__ = ["ObjectStore"]

#: How often a merge is tried if other clients write the same value.
_TRIES = 6
#: Bytes a second: an upload may take its size divided by this, beyond the time-out. No program
#: waits for an upload.
_UPLOAD_SPEED = 1e6
#: Where cloud machines ask for their identity. If an error names one of these, there are no
#: credentials.
_IDENTITY = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
_MOST_TEXT = 300


class ObjectStore:
    """Values as objects in a bucket.

    Threads: safe to share. Fork: only for the agent, which does not fork. With a service that knows
    conditional writes (AWS, GCS, Azure, MinIO, Ceph), merges lose nothing; otherwise the last
    writer wins.

    Args:
        address: address of the tier.

    Raises:
        ConfigError: a file or an option can't be used.
    """

    def __init__(self, address: Address) -> None:
        make = {"s3": _s3, "gs": _gcs, "az": _azure}[address.scheme]
        upload = address.timeout + address.max_entry / _UPLOAD_SPEED
        try:
            self._reader: Any = make(address, address.timeout)
            self._writer: Any = make(address, upload)
        except exceptions.BaseError as error:
            raise ConfigError(f"{address.redacted()} can't be used: {_short(error)}") from error
        self._conditional = True

    def get(self, key: str, limit: int) -> bytes | None:
        """Return the value, or None if there is none."""
        found = self._read(key, limit)
        return None if found is None else found[0]

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing the one that is there."""
        with _answering(writing=True):
            obstore.put(self._writer, _path(key), value, use_multipart=False)

    def merge(self, key: str, change: Change, limit: int) -> None:
        """Replace a value by the result of `change`, if nobody else has written meanwhile."""
        for attempt in range(_TRIES):
            time.sleep(pause(attempt))
            found = self._read(key, limit)
            value = change(None if found is None else found[0])
            if value is None:
                return
            if self._swap(key, value, None if found is None else found[1]):
                return
        raise RemoteError("others write the same value all the time")

    def close(self) -> None:
        """Release the clients. Idempotent."""
        self._reader = self._writer = None

    def _read(self, key: str, limit: int) -> tuple[bytes, dict[str, str]] | None:
        """Return the value and its version, or None if there is none."""
        with _answering():
            try:
                answer: Any = obstore.get(self._reader, _path(key))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    raise RemoteRefused("there is no such bucket") from error
                return None
            size = answer.meta["size"]
            if size > limit:  # nothing of it was read; the download ends with `answer`
                raise RemoteTooLong(f"the object has {size} bytes; allowed: {limit}")
            value: bytes = answer.bytes().to_bytes()
            if len(value) != size:
                raise RemoteError(f"the object ended after {len(value)} of {size} bytes")
            version = {n: answer.meta.get(n) for n in ("e_tag", "version")}
            return value, {name: value for name, value in version.items() if value is not None}

    def _swap(self, key: str, value: bytes, version: dict[str, str] | None) -> bool:
        """Store a value if the object still has this version (None: if it still does not exist)."""
        mode: Any = "create" if version is None else version
        with _answering(writing=True):
            try:
                if not self._conditional or version == {}:
                    mode = "overwrite"
                obstore.put(self._writer, _path(key), value, mode=mode, use_multipart=False)
            except (
                exceptions.PreconditionError,
                exceptions.AlreadyExistsError,
                FileNotFoundError,
            ) as error:
                if "NoSuchBucket" in str(error):
                    raise
                return False
            except (exceptions.NotSupportedError, NotImplementedError):
                self._conditional = False
                obstore.put(self._writer, _path(key), value, use_multipart=False)
            return True


def _path(key: str) -> str:
    return f"{key[:2]}/{key[2:]}"


def _client(address: Address, timeout: float) -> dict[str, Any]:
    """Return the options of every kind of client.

    Raises:
        ConfigError: the file of a certificate can't be read.
    """
    options: dict[str, Any] = {
        "allow_http": address.option("endpoint").startswith("http://"),
        "connect_timeout": timedelta(seconds=address.connect_timeout),
        "timeout": timedelta(seconds=timeout),
    }
    path = address.option("ca_file")
    if path:
        try:
            with open(path, "rb") as file:
                options["root_certificate"] = file.read()
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    return {
        "prefix": address.path or None,
        "client_options": options,
        # A program that asks has no time for a second try; the agent tries again later.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
    }


def _s3(address: Address, timeout: float) -> object:
    known = {
        "region": address.option("region"),
        "virtual_hosted_style_request": address.flag("virtual_hosted"),
        **({} if address.flag("anonymous") else _profile()),
    }
    options: dict[str, Any] = {name: value for name, value in known.items() if value}
    options |= _known(address, endpoint="endpoint")
    return S3Store(address.hosts, **options, **_client(address, timeout))


def _gcs(address: Address, timeout: float) -> object:
    options = _known(address, endpoint="base_url")
    return GCSStore(address.hosts, **options, **_client(address, timeout))


def _azure(address: Address, timeout: float) -> object:
    options = _known(address, endpoint="endpoint")
    return AzureStore(address.hosts, **options, **_client(address, timeout))


def _known(address: Address, *, endpoint: str) -> dict[str, Any]:
    """Return obstore's options for any store; `endpoint` is its name for the address."""
    known = {
        endpoint: address.option("endpoint"),
        "skip_signature": address.flag("anonymous"),
    }
    return {name: value for name, value in known.items() if value}


def _profile() -> dict[str, str]:
    """Return the keys of the user's profile in `~/.aws/credentials`, which obstore does not read.

    It is empty if the environment has credentials, or if the file has none.

    Raises:
        ConfigError: the file can't be understood.
    """
    if any(map(variable, ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"))):
        return {}
    import configparser

    path = variable("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    if not os.path.isabs(path):
        return {}
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be understood") from error
    name = variable("AWS_PROFILE") or "default"
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    found: dict[str, str] = dict(parser[name]) if parser.has_section(name) else {}
    return {ours: found[theirs] for theirs, ours in names.items() if theirs in found}


@contextmanager
def _answering(*, writing: bool = False) -> Generator[None]:
    """Turn obstore's exceptions into RemoteError."""
    try:
        yield
    except RemoteError:
        raise
    except exceptions.PermissionDeniedError as error:
        if writing:
            raise RemoteReadOnly(_short(error)) from error
        hint = "; without the right to list a bucket, S3 says this of what is not there, too"
        raise RemoteRefused(_short(error) + hint) from error
    except exceptions.UnauthenticatedError as error:
        raise RemoteRefused(_short(error)) from error
    except FileNotFoundError as error:
        raise RemoteRefused("there is no such bucket") from error
    except BaseException as error:  # a panic of Rust is no Exception
        raise _translated(error) from error


#: How to tell errors for which obstore has no exception of its own, by their messages.
_KINDS: tuple[tuple[Callable[[str], bool], Callable[[str], RemoteError], str], ...] = (
    (
        lambda said: any(name in said for name in _IDENTITY),
        RemoteRefused,
        "there are no credentials, and this machine has no identity of its own: ",
    ),
    (
        lambda said: "InvalidCertificate" in said,
        RemoteRefused,
        "its certificate is not trusted: ",
    ),
    (
        lambda said: re.search("timed out|TimedOut|kind: Timeout", said) is not None,
        RemoteTimeout,
        "",
    ),
)


def _translated(error: BaseException) -> RemoteError:
    said = str(error)
    for is_so, kind, hint in _KINDS:
        if is_so(said):
            return kind(f"{hint}{_short(error)}")
    return RemoteError(f"{type(error).__name__}: {_short(error)}")


def _short(error: BaseException) -> str:
    """Return the first line of a message, without URLs: in Azure, their queries hold signatures."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"(for path|at location|[A-Z]+ https?://)\S* ?\S*", "", line)[:_MOST_TEXT]
