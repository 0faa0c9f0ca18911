"""Credentials: the user and password, or the token, for a remote; and where they may be sent.

They come from the first of these that has any: the address (`https://user:password@host`), the
file that it names (`token_file`, `password_file`), `KCACHE_REMOTE_TOKEN`, `~/.netrc`; for object
stores, from the environment, the user's profile, or the machine's identity. They never come from
the working directory. Credentials that are not written in the address are sent only to its host,
and only through TLS or within this machine.
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
    """Return whether a host is this machine."""
    return host in _LOOPBACK


def is_private(scheme: str, host: str) -> bool:
    """Return whether what is sent to a host goes through TLS, or stays within this machine."""
    return scheme == "https" or (is_loopback(host) and proxy_for(scheme, host) is None)


def not_private(address: Address, what: str) -> ConfigError:
    """Return the error for credentials that can't be sent to an address."""
    reason = "credentials are sent only through TLS or within this machine"
    return ConfigError(f"{address.redacted()} can't be used with {what}: {reason}")


def authorization(address: Address, host: str) -> str | None:
    """Return the header `Authorization` for an address, or None.

    Raises:
        ConfigError: a file with credentials can't be read or is not safe, or the token would be
            sent unencrypted.
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
    """Return the value of a header with a user and a password."""
    pair = f"{user}:{password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


def _bearer(token: str) -> str:
    if not token.isascii() or not token.isprintable():
        raise ConfigError("the token for the remote has characters that no header can have")
    return f"Bearer {token}"


def read_secret(path: str) -> str:
    """Return the first line of a file that only its owner can read.

    Raises:
        ConfigError: it can't be read, is not safe, or is empty.
    """
    lines = _private_text(path).splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"{path} is empty; its first line should be the secret")
    return lines[0].strip()


def _from_netrc(host: str) -> tuple[str, str] | None:
    """Return user and password of a host in `~/.netrc`; its `default` is not used.

    Raises:
        ConfigError: others can read the file, or it can't be understood.
    """
    path = os.path.join(os.path.expanduser("~"), ".netrc")
    if not os.path.isabs(path) or not os.path.exists(path):
        return None
    _private_text(path)
    try:
        known = netrc.netrc(path).hosts.get(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be understood: {error}") from error
    return None if known is None else (known[0] or "", known[2] or "")


def _private_text(path: str) -> str:
    """Return the content of a file that only its owner can read.

    Raises:
        ConfigError: it can't be read, it belongs to another user, or others can read it.
    """
    content, mode = own_file(path)
    require_unreadable(path, mode)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8") from error


def content_of(path: str) -> bytes:
    """Return the content of a file that may be public.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def own_file(path: str) -> tuple[bytes, int]:
    """Return the first 64 KiB of a file of this user or of root, and its permissions.

    Raises:
        ConfigError: it can't be read, or other users own it or can write to it.
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
