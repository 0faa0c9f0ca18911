"""ObjectStorage: a remote in S3 or a compatible store, Google Cloud Storage or Azure, by obstore.

The address `s3://bucket/prefix` and a key make the object `prefix/ab/cdef...`. Credentials come
from the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`), for S3 also from `~/.aws/credentials`,
otherwise from the machine's own identity. Lifecycle rules of the bucket delete old objects.

obstore hangs in a child that was forked after its first use (seen with 0.12.1). So only this module
imports it, in the service's process, which was started by exec and never forks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from kcache.config import variable
from kcache.errors import ConfigError
from kcache.remote.credentials import content_of
from kcache.remote.storage import RemoteError, RemoteTimeout, RemoteTooLong, Stored

if TYPE_CHECKING:
    from kcache.remote.address import Address

#: Scheme -> obstore's class, and its name for the address of a server.
_MAKERS: dict[str, tuple[Any, str]] = {
    "s3": (S3Store, "endpoint"),
    "gs": (GCSStore, "base_url"),
    "az": (AzureStore, "endpoint"),
}
#: Where cloud machines ask for their identity. If an error names one of these, there are no
#: credentials.
_IDENTITY = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
#: In the messages of errors that are time-outs; obstore has no exception for them.
_LATE = re.compile("timed out|TimedOut|kind: Timeout")
_MOST_TEXT = 300


class ObjectStorage:
    """Values as objects in a bucket.

    Threads: safe to share. Fork: only for the service, which does not fork. A service that knows no
    conditional writes (AWS, GCS, Azure, MinIO and Ceph know them) replaces values without one.

    Args:
        address: address of the remote.

    Raises:
        ConfigError: a file or an option can't be used.
    """

    def __init__(self, address: Address) -> None:
        try:
            self._reader: Any = _made(address, address.timeout)
            self._writer: Any = _made(address, address.seconds(address.max_entry))
        except exceptions.BaseError as error:
            raise ConfigError(f"{address.redacted()} can't be used: {_short(error)}") from error
        self._conditional = True

    def get(self, key: str, limit: int) -> Stored | None:
        """Return the value, or None if there is none."""
        with _answering():
            try:
                answer: Any = obstore.get(self._reader, _path(key))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    raise
                return None
            size = answer.meta["size"]
            if size > limit:  # nothing of it was read; the download ends with `answer`
                raise RemoteTooLong(f"the object has {size} bytes; allowed: {limit}")
            value = bytearray()
            for piece in answer.stream():  # in chunks, there may be more than the length says
                value += piece
                if len(value) > size:
                    break
            if len(value) != size:
                raise RemoteError(f"the object has not the {size} bytes that were announced")
            version = {n: answer.meta.get(n) for n in ("e_tag", "version")}
            return Stored(bytes(value), {n: each for n, each in version.items() if each})

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing the one that is there."""
        with _answering():
            self._put(key, value, "overwrite")

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store a value in place of `old`; tell whether it is stored."""
        mode: Any = "create" if old is None else (old.version or "overwrite")
        with _answering():
            try:
                self._put(key, value, mode if self._conditional else "overwrite")
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
                self._put(key, value, "overwrite")
            return True

    def _put(self, key: str, value: bytes, mode: Any) -> None:  # noqa: ANN401  obstore's PutMode
        obstore.put(self._writer, _path(key), value, mode=mode, use_multipart=False)

    def close(self) -> None:
        """Release the clients. Idempotent."""
        self._reader = self._writer = None


def _path(key: str) -> str:
    return f"{key[:2]}/{key[2:]}"


def _made(address: Address, timeout: float) -> object:
    """Return obstore's object for a bucket, whose requests take at most `timeout` seconds.

    Raises:
        ConfigError: a file can't be used.
    """
    make, endpoint = _MAKERS[address.scheme]
    server = address.option("endpoint")
    options: dict[str, Any] = {
        "allow_http": server.startswith("http://"),
        "connect_timeout": timedelta(seconds=address.connect_timeout),
        "timeout": timedelta(seconds=timeout),
    }
    path = address.option("ca_file")
    if path:
        options["root_certificate"] = content_of(path)
    known: dict[str, Any] = {endpoint: server, "skip_signature": address.flag("anonymous")}
    if address.scheme == "s3":
        known["region"] = address.option("region")
        known["virtual_hosted_style_request"] = address.flag("virtual_hosted")
        if not address.flag("anonymous"):
            known |= _profile()
    return make(
        address.hosts,
        prefix=address.path or None,
        client_options=options,
        # A program that asks has no time for a second try; the service tries again later.
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
        **{name: value for name, value in known.items() if value},
    )


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
def _answering() -> Generator[None]:
    """Turn obstore's exceptions into RemoteError."""
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        late = _LATE.search(str(error)) is not None
        raise (RemoteTimeout if late else RemoteError)(_explained(error)) from error


def _explained(error: Exception) -> str:
    said = str(error)
    if any(name in said for name in _IDENTITY):
        lacking = "there are no credentials, and this machine has no identity of its own"
        return f"{lacking}: {_short(error)}"
    if "InvalidCertificate" in said:
        return f"its certificate is not trusted: {_short(error)}"
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket"
    if isinstance(error, exceptions.PermissionDeniedError):
        hint = "without the right to list a bucket, S3 says this of what is not there, too"
        return f"{_short(error)}; {hint}"
    return _short(error) or type(error).__name__


def _short(error: Exception) -> str:
    """Return the first line of a message, without URLs: in Azure, their queries hold signatures."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"(for path|at location|[A-Z]+ https?://)\S* ?\S*", "", line)[:_MOST_TEXT]
