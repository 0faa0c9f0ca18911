"""Credentials for remotes: a user name and password, or a token; and where they may be sent.

An HTTP server gets the first credentials that are found: in the address
(`https://user:password@host`), in the file that its option `token_file` names, in the variable
`KCACHE_REMOTE_TOKEN`, or in `~/.netrc`. Redis gets those in the address, but the password in the
file that `password_file` names takes precedence. The credentials for an object store come from the
environment, the user's profile or the machine's identity. No credentials come from the working
directory. Credentials are sent only to the servers of the remote. Unless the address itself
contains them, they are sent only through TLS or within this machine.
"""

from __future__ import annotations

import base64
import netrc
import os
import stat

from kcache.environment import proxy_for, remote_token
from kcache.errors import ConfigError
from kcache.remote.address import Address
from kcache.util.open_file import SAFE
from kcache.util.path_safety import present_user

_MOST_BYTES = 1 << 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine's loopback interface."""
    return host in _LOOPBACK


def is_private(scheme: str, host: str) -> bool:
    """Return whether a request to `host` is encrypted by TLS or does not leave this machine."""
    return scheme == "https" or (is_loopback(host) and proxy_for(scheme, host) is None)


def not_private(address: Address, what: str) -> ConfigError:
    """Return the error that `address` can't be used with `what`, which would reveal credentials."""
    reason = "credentials are sent only through TLS or within this machine"
    return ConfigError(f"{address.redacted()} can't be used with {what}: {reason}")


def authorization(address: Address, host: str) -> str | None:
    """Return the value of the HTTP header `Authorization` for an address, or None for no header.

    Args:
        address: the address of an HTTP server.
        host: the host in the address.

    Raises:
        ConfigError: a file with credentials can't be read or is not safe; or the token in a
            `token_file` would be sent unencrypted; or the token has characters that are not allowed
            in a header.
    """
    if address.user is not None or address.password is not None:
        return _basic(address.user or "", address.password or "")
    token_file = address.option("token_file")
    if not is_private(address.scheme, host):
        if token_file:
            raise not_private(address, "token_file")
        return None
    token = read_secret(token_file) if token_file else remote_token()
    if token:
        return _bearer(token)
    known = _from_netrc(host)
    return None if known is None else _basic(*known)


def _basic(user: str, password: str) -> str:
    """Return the value of the HTTP header `Authorization` for a user name and a password."""
    pair = f"{user}:{password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


def _bearer(token: str) -> str:
    if not token.isascii() or not token.isprintable():
        raise ConfigError("the token for the remote has characters that an HTTP header can't have")
    return f"Bearer {token}"


def read_secret(path: str) -> str:
    """Return the first line of a file that only its owner can read, without outer white space.

    Raises:
        ConfigError: the file can't be read, belongs to another user or can be read by others, or
            its first line is empty.
    """
    lines = _private_text(path).splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"{path}: expected the secret in the first line, which is empty")
    return lines[0].strip()


def _from_netrc(host: str) -> tuple[str, str] | None:
    """Return the user name and password for `host` in `~/.netrc`, or None if it has none.

    The `default` entry of the file is ignored, so that a password is sent only to hosts that the
    file names.

    Raises:
        ConfigError: the file can't be read, belongs to another user, can be read by others, or is
            malformed.
    """
    path = os.path.join(os.path.expanduser("~"), ".netrc")
    if not os.path.isabs(path) or not os.path.exists(path):
        return None
    _private_text(path)
    try:
        known = netrc.netrc(path).hosts.get(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as a netrc file: {error}") from error
    return None if known is None else (known[0] or "", known[2] or "")


def _private_text(path: str) -> str:
    """Return the text in a file that only its owner can read.

    Raises:
        ConfigError: the file can't be read or is not UTF-8, belongs to another user, or can be read
            by others.
    """
    content, mode = own_file(path)
    require_unreadable(path, mode)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8") from error


def content_of(path: str) -> bytes:
    """Return the content of a file, such as a certificate, without a check of its permissions.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def own_file(path: str) -> tuple[bytes, int]:
    """Return the first 64 KiB of a file that this user or root owns, and the file's permissions.

    Anything but a regular file counts as empty. On Windows, the owner is not checked, and the
    permissions are 0.

    Raises:
        ConfigError: the file can't be read, belongs to another user, or can be written to by
            others.
    """
    try:
        with open(os.open(path, os.O_RDONLY | (SAFE & ~getattr(os, "O_NOFOLLOW", 0))), "rb") as f:
            status = os.fstat(f.fileno())
            content = f.read(_MOST_BYTES) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    mode = 0 if os.name == "nt" else stat.S_IMODE(status.st_mode)
    if os.name != "nt" and status.st_uid not in (present_user(), 0):
        raise ConfigError(f"{path} is not used: it belongs to user {status.st_uid}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} is not used: others can write to it (mode {mode:04o})")
    return content, mode


def require_unreadable(path: str, mode: int) -> None:
    """Raise ConfigError if others can read the file at `path`, whose permissions are `mode`."""
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"others can read it (expected mode 0600, got {mode:04o})"
        raise ConfigError(f"{path} is not used: {problem}")
