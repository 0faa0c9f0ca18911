"""Objects: remotes in S3 or a compatible store, Google Cloud Storage or Azure.

If the address is `s3://bucket/prefix`, the entry with the key `abcdef...` is the object
`prefix/ab/cdef...`. Credentials come from the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`),
for S3 also from `~/.aws/credentials`, and otherwise from the identity that the machine has in its
cloud. kcache does not delete objects; lifecycle rules of the bucket can delete old ones.

obstore finds the credentials. If it sends a request that is redirected, the new host gets the
session token of S3, or (in the header `Referer`) the shared access signature of Azure; this was
seen with obstore 0.12.1. So `HttpValues` sends these requests, and follows no redirect. For S3,
obstore only signs their URLs. For Azure, this module adds the signature to their URLs.

obstore hangs in a process that was forked after the first use of obstore (seen with 0.12.1). So
only this module imports it, and only the daemon and commands import this module. They do not fork.
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

#: Maps each scheme to obstore's class, the option of this class for the URL of the server, and the
#: environment variables that may also contain this URL.
_MAKERS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "s3": (S3Store, "endpoint", ()),
    "gs": (GCSStore, "base_url", ("GOOGLE_BASE_URL",)),
    "az": (AzureStore, "endpoint", ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")),
}
#: How long a signed URL is valid. It is used at once, but the clocks of machines differ.
_SIGNED_FOR = timedelta(minutes=15)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
#: The code in the XML of an error.
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_HINT = "S3 also gives this answer for an absent object if the user may not list the bucket"
#: Addresses from which the machines of clouds get their identity. An error with one of them means
#: that there are no other credentials, and that this machine has no identity.
_IDENTITY = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
#: Matches the messages of time-outs, for which obstore has no exception of its own.
_LATE = re.compile("timed out|TimedOut|kind: Timeout")
_MOST_TEXT = 300


def open_bucket(address: Address) -> Storage:
    """Return the client for the bucket that `address` names.

    Raises:
        ConfigError: a file or an option in the address can't be used.
    """
    drop_unsafe_variables()
    names = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY") if address.scheme == "az" else ()
    signature = next(filter(None, map(variable, names)), "").lstrip("?")
    if address.flag("anonymous") or (address.scheme != "s3" and not signature):
        return ObjectStorage(address)
    return SignedStorage(address, signature)


class SignedStorage(HttpValues):
    """The values in a bucket to which requests have signed URLs.

    These are buckets in S3, and in Azure if there is a shared access signature.

    Args:
        address: the address of the remote.
        signature: the shared access signature of Azure; empty for S3.

    Raises:
        ConfigError: a file or an option in the address can't be used.
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
        """Return the signed URL of the value under `key`, for a request with `method`.

        Raises:
            ConfigError: the signature would be sent to another machine without TLS.
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
            raise RemoteError("the bucket does not exist")

    def _failure(self, response: Any, body: bytes) -> RemoteError:  # noqa: ANN401
        """Return the error for a response, with the error code that its body contains."""
        self._require_absent(response, body)
        code = _CODE.search(body)
        text = f"{super()._failure(response, body)}{f' ({code[1].decode()})' if code else ''}"
        return RemoteError(f"{text}; {_HINT}" if response.status == 403 else text)


class ObjectStorage:
    """The values in a bucket to which obstore itself sends the requests.

    These are buckets of Google, of Azure without a shared access signature, and, without
    credentials, of S3.

    A store without conditional writes replaces values unconditionally. AWS, GCS, Azure, MinIO and
    Ceph have conditional writes.

    Threads: Several threads may use one object. Fork: A forked child must not use it; the daemon
    and the commands that use remotes do not fork.

    Args:
        address: the address of the remote.

    Raises:
        ConfigError: a file or an option in the address can't be used.
    """

    def __init__(self, address: Address) -> None:
        server = urlsplit(_server(address))
        # obstore 0.12.1 sends Google's token with a put even if requests are to be anonymous.
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
        """Return the value under `key`, or None if there is none; see `Storage.get`."""
        with translated(_explained):
            try:
                answer: Any = obstore.get(self._reader, _path(key))
            except FileNotFoundError as error:
                if any(code in str(error) for code in _NO_BUCKET):
                    raise
                return None
            size = answer.meta["size"]
            if size > limit:  # the content was not read; the download ends with `answer`
                raise RemoteTooLong(f"expected an object of at most {limit} bytes, got {size}")
            value = bytearray()
            for piece in answer.stream():  # the chunks may have more bytes than announced
                value += piece
                if len(value) > size:
                    break
            if len(value) != size:
                raise RemoteError(f"expected an object of {size} bytes, got {len(value)}")
            version = {n: answer.meta.get(n) for n in ("e_tag", "version")}
            return Stored(bytes(value), {n: each for n, each in version.items() if each})

    def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, in place of any older value."""
        with translated(_explained):
            self._put(key, value, "overwrite")

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store `value` in place of `old`; return whether it is stored. See `Storage.replace`."""
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
    """Return obstore's object for the bucket of `address`.

    Each request takes at most `timeout` seconds.

    Raises:
        ConfigError: the certificates or the user's profile can't be read.
    """
    make, endpoint, _ = _MAKERS[address.scheme]
    options: dict[str, Any] = {
        "allow_http": _server(address).startswith("http://"),
        "connect_timeout": timedelta(seconds=address.connect_timeout),
        "timeout": timedelta(seconds=timeout),
    }
    server = urlsplit(_server(address))
    if server.scheme == "http" and is_private(server.scheme, server.hostname or ""):
        # obstore interprets NO_PROXY differently from Python, but it ignores the variables if it is
        # given a proxy. This proxy is never used, because all hosts are excluded.
        options |= {"proxy_url": "http://localhost", "proxy_excludes": "*,0.0.0.0/0,::/0"}
    path = address.option("ca_file")
    if path:
        options["root_certificate"] = content_of(path)
    anonymous = address.flag("anonymous")
    known: dict[str, Any] = {endpoint: address.option("endpoint"), "skip_signature": anonymous}
    if address.scheme == "az":  # an address can't name the emulator, which has no TLS
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
        # obstore does not retry, because a program waits for the result. The daemon retries later.
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
        **{name: value for name, value in known.items() if value != ""},
    )


def _server(address: Address) -> str:
    """Return the URL of the server, from the address or the environment, or the default URL.

    The default is the URL of the account in Azure. The default servers of S3 and Google are known
    only to obstore. The same URL is returned for these two, because callers then use only its
    scheme, which is https for all three.
    """
    named = next(filter(None, map(variable, _MAKERS[address.scheme][2])), "")
    account = variable("AZURE_STORAGE_ACCOUNT_NAME") or ""
    usual = f"https://{account}.blob.core.windows.net"
    return (address.option("endpoint") or named or usual).rstrip("/")


def _profile() -> dict[str, str]:
    """Return the credentials in the user's profile in `~/.aws/credentials`, as obstore's options.

    obstore itself does not read this file. The result is empty if the environment has credentials,
    or if the profile has none.

    Raises:
        ConfigError: the file can't be read or is malformed.
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
        raise ConfigError(f"{path} can't be read as a file of AWS credentials") from error
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
        line = f"there are no credentials, and this machine has no identity of its own: {line}"
    elif "InvalidCertificate" in text:
        line = f"the certificate of the server is not trusted: {line}"
    elif isinstance(error, FileNotFoundError):
        line = "the bucket does not exist"
    elif isinstance(error, exceptions.PermissionDeniedError):
        line = f"{line}; {_HINT}"
    return line, _LATE.search(text) is not None


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message without URLs.

    The URLs are removed because those of Azure may contain signatures.
    """
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"(for path|at location|[A-Z]+ https?://)\S* ?\S*", "", line)[:_MOST_TEXT]
