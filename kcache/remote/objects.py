"""Objects: remotes in S3 or a compatible store, Google Cloud Storage or Azure.

The address `s3://bucket/prefix` and a key make the object `prefix/ab/cdef...`. Credentials come
from the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`), for S3 also from `~/.aws/credentials`,
otherwise from the machine's own identity. Lifecycle rules of the bucket delete old objects.

obstore finds the credentials. It follows redirects, and sends the session token of S3 and (in the
header `Referer`) the shared access signature of Azure to the host of a redirect (seen with 0.12.1).
So for S3 it only signs the URL, for Azure this module adds the signature to the URL, and
`HttpValues`, which follows no redirect here, sends the request.

obstore hangs in a child that was forked after its first use (seen with 0.12.1). So only this module
imports it, in the process of the daemon, which was started by exec and never forks.
"""

from __future__ import annotations

import configparser
import os
import re
from datetime import timedelta
from typing import Any, Literal, cast
from urllib.parse import quote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from kcache.environment import drop_unsafe_variables, variable
from kcache.errors import ConfigError
from kcache.remote.address import Address
from kcache.remote.credentials import content_of, is_private, not_private
from kcache.remote.http import HttpValues, origin_of
from kcache.remote.storage import RemoteError, RemoteTooLong, Storage, Stored, translated

#: Scheme -> obstore's class, its option for the server, and the variables that may name it, too.
_MAKERS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "s3": (S3Store, "endpoint", ()),
    "gs": (GCSStore, "base_url", ("GOOGLE_BASE_URL",)),
    "az": (AzureStore, "endpoint", ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")),
}
#: How long a signature is valid. A request uses it at once, but clocks may differ.
_SIGNED_FOR = timedelta(minutes=15)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
#: The code in the XML of an error.
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_HINT = "S3 also answers this for an absent object if the user may not list the bucket"
#: Where cloud machines ask for their identity. If an error names one of these, there are no
#: credentials.
_IDENTITY = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
#: In the messages of errors that are time-outs; obstore has no exception for them.
_LATE = re.compile("timed out|TimedOut|kind: Timeout")
_MOST_TEXT = 300


def open_bucket(address: Address) -> Storage:
    """Return the storage in the bucket of an address.

    Raises:
        ConfigError: a file or an option can't be used.
    """
    drop_unsafe_variables()
    names = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY") if address.scheme == "az" else ()
    signature = next(filter(None, map(variable, names)), "").lstrip("?")
    if address.flag("anonymous") or (address.scheme != "s3" and not signature):
        return ObjectStorage(address)
    return SignedStorage(address, signature)


class SignedStorage(HttpValues):
    """Values under URLs with a signature: in S3, and in Azure with a shared access signature.

    Args:
        address: address of the remote.
        signature: the shared access signature of Azure.

    Raises:
        ConfigError: a file or an option can't be used.
    """

    _most_redirects = 0
    _lost = (404, 409, 412)

    def __init__(self, address: Address, signature: str = "") -> None:
        super().__init__(address)
        self._signature = signature
        self._store: Any = None if signature else _open_store(address, address.timeout)
        if signature:
            self._put_headers = {**self._put_headers, "x-ms-blob-type": "BlockBlob"}

    def _url_of(self, method: str, key: str) -> str:
        """Return the signed URL of a key.

        Raises:
            ConfigError: others could read the signature.
        """
        if self._signature:
            names = filter(None, (self._address.hosts, self._address.path, _path(key)))
            url = f"{_server(self._address)}/{quote('/'.join(names))}?{self._signature}"
        else:
            with translated(_explained):
                url = obstore.sign(
                    self._store, cast('Literal["GET", "PUT"]', method), _path(key), _SIGNED_FOR
                )
        origin = origin_of(url)
        if not is_private(origin.scheme, origin.host):
            raise not_private(self._address, f"the server {origin.scheme}://{origin.host}")
        return url

    def _require_absent(self, _response: Any, body: bytes) -> None:  # noqa: ANN401
        if any(code.encode() in body for code in _NO_BUCKET):
            raise RemoteError("there is no such bucket")

    def _failure(self, response: Any, body: bytes) -> RemoteError:  # noqa: ANN401
        """Return the error for a response, with the store's error code."""
        self._require_absent(response, body)
        code = _CODE.search(body)
        text = f"{super()._failure(response, body)}{f' ({code[1].decode()})' if code else ''}"
        return RemoteError(f"{text}; {_HINT}" if response.status == 403 else text)


class ObjectStorage:
    """Values as objects in a bucket of Google or Azure, or of S3 without credentials.

    Threads: may share it. Fork: used only by the daemon, which does not fork. A store without
    conditional writes replaces values unconditionally (AWS, GCS, Azure, MinIO and Ceph have them).

    Args:
        address: address of the remote.

    Raises:
        ConfigError: a file or an option can't be used.
    """

    def __init__(self, address: Address) -> None:
        server = urlsplit(_server(address))
        # obstore 0.12.1 sends the token of Google with a put even if the put is to be anonymous.
        is_secret = address.scheme == "gs" or not address.flag("anonymous")
        if is_secret and not is_private(server.scheme, server.hostname or ""):
            raise not_private(address, f"the server {server.scheme}://{server.hostname}")
        try:
            self._reader: Any = _open_store(address, address.timeout)
            self._writer: Any = _open_store(address, address.seconds(address.max_entry))
        except exceptions.BaseError as error:
            text = _first_line(error)
            raise ConfigError(f"{address.redacted()} can't be used: {text}") from error
        self._conditional = True

    def get(self, key: str, limit: int) -> Stored | None:
        """Return the value, or None if there is none."""
        with translated(_explained):
            try:
                answer: Any = obstore.get(self._reader, _path(key))
            except FileNotFoundError as error:
                if any(code in str(error) for code in _NO_BUCKET):
                    raise
                return None
            size = answer.meta["size"]
            if size > limit:  # nothing of it was read; the download ends with `answer`
                raise RemoteTooLong(f"expected at most {limit} bytes, the object has {size}")
            value = bytearray()
            for piece in answer.stream():  # chunks may hold more than the announced length
                value += piece
                if len(value) > size:
                    break
            if len(value) != size:
                raise RemoteError(f"expected an object of {size} bytes, got {len(value)}")
            version = {n: answer.meta.get(n) for n in ("e_tag", "version")}
            return Stored(bytes(value), {n: each for n, each in version.items() if each})

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing the one that is there."""
        with translated(_explained):
            self._put(key, value, "overwrite")

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store a value in place of `old`; return whether it is stored."""
        mode: Any = "create" if old is None else (old.version or "overwrite")
        with translated(_explained):
            try:
                self._put(key, value, mode if self._conditional else "overwrite")
            except (
                exceptions.PreconditionError,
                exceptions.AlreadyExistsError,
                FileNotFoundError,
            ) as error:
                if any(code in str(error) for code in _NO_BUCKET):
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


def _open_store(address: Address, timeout: float) -> object:
    """Return obstore's object for a bucket, whose requests take at most `timeout` seconds.

    Raises:
        ConfigError: a file can't be used.
    """
    make, endpoint, _ = _MAKERS[address.scheme]
    options: dict[str, Any] = {
        "allow_http": _server(address).startswith("http://"),
        "connect_timeout": timedelta(seconds=address.connect_timeout),
        "timeout": timedelta(seconds=timeout),
    }
    server = urlsplit(_server(address))
    if server.scheme == "http" and is_private(server.scheme, server.hostname or ""):
        # obstore interprets NO_PROXY differently from Python. If it is given a proxy, it does not
        # read the variables, and no host uses the proxy that is given here.
        options |= {"proxy_url": "http://localhost", "proxy_excludes": "*,0.0.0.0/0,::/0"}
    path = address.option("ca_file")
    if path:
        options["root_certificate"] = content_of(path)
    anonymous = address.flag("anonymous")
    known: dict[str, Any] = {endpoint: address.option("endpoint"), "skip_signature": anonymous}
    if address.scheme == "az":  # no address names the emulator, which has no TLS
        known["use_emulator"] = False
    if address.scheme == "s3":
        known["region"] = address.option("region")
        known["virtual_hosted_style_request"] = address.flag("virtual_hosted")
        if not anonymous:
            known |= _profile()
    return make(
        address.hosts,
        prefix=address.path or None,
        client_options=options,
        # A program that asks has no time for a second try; the daemon tries again later.
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
        **{name: value for name, value in known.items() if value != ""},
    )


def _server(address: Address) -> str:
    """Return the URL of the server, from the address or the environment, or the default one.

    For S3 and Google, only obstore knows the default server. It has TLS, and so has the URL that is
    returned in place of its own.
    """
    named = next(filter(None, map(variable, _MAKERS[address.scheme][2])), "")
    account = variable("AZURE_STORAGE_ACCOUNT_NAME") or ""
    usual = f"https://{account}.blob.core.windows.net"
    return (address.option("endpoint") or named or usual).rstrip("/")


def _profile() -> dict[str, str]:
    """Return the keys of the user's profile in `~/.aws/credentials`, which obstore does not read.

    The result is empty if the environment has credentials, or if the file has none.

    Raises:
        ConfigError: the file can't be understood.
    """
    if any(map(variable, ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"))):
        return {}
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
    return {option: found[name] for name, option in names.items() if name in found}


def _explained(error: Exception) -> tuple[str, bool]:
    text, line = str(error), _first_line(error)
    if any(name in text for name in _IDENTITY):
        line = f"no credentials, and this machine has no identity of its own: {line}"
    elif "InvalidCertificate" in text:
        line = f"its certificate is not trusted: {line}"
    elif isinstance(error, FileNotFoundError):
        line = "there is no such bucket"
    elif isinstance(error, exceptions.PermissionDeniedError):
        line = f"{line}; {_HINT}"
    return line, _LATE.search(text) is not None


def _first_line(error: Exception) -> str:
    """Return the first line of a message, without URLs: in Azure, their queries hold signatures."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"(for path|at location|[A-Z]+ https?://)\S* ?\S*", "", line)[:_MOST_TEXT]
