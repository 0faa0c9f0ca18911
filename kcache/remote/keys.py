"""Keys: sign kernels that travel between machines, and prove who signed them. They are PEM files.

A file holds one or more of these, one after the other:

=============================  ====================================================================
block                          what
=============================  ====================================================================
``KCACHE HMAC KEY``            32 bytes that all readers and writers have (HMAC-SHA256)
``PRIVATE KEY``                Ed25519, PKCS #8, not encrypted: signs, and verifies
``PUBLIC KEY``                 Ed25519: verifies, and can't sign
=============================  ====================================================================

The first key that can sign is used for signing. All keys verify, so keys can be exchanged one after
the other. `openssl genpkey -algorithm ed25519` makes the same files as `kcache key`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kcache.errors import ConfigError
from kcache.util.open_file import SAFE
from kcache.util.safe_path import present_user, unsafe_part

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

__all__ = ["Key", "Keys", "make_keys", "public_part", "read_keys", "write_keys"]

HMAC, ED25519 = 1, 2
_HMAC_LABEL = "KCACHE HMAC KEY"
_HMAC_BYTES = 32
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.DOTALL)
#: Room for more than a hundred keys. Longer files are not read to their end, and refused.
_MOST_BYTES = 1 << 16
#: Stands before the signed bytes, so that our signatures are valid nowhere else, and signatures
#: that were made for something else are not valid here.
_CONTEXT = b"kcache seal 1\n"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Key(Protocol):
    """One key. Threads: safe to share."""

    how: int
    id: bytes

    def sign(self, digest: bytes) -> bytes:
        """Return the signature of a digest."""
        ...

    def verifies(self, signature: bytes, digest: bytes) -> bool:
        """Tell whether this key made a signature."""
        ...


class Keys(NamedTuple):
    """The keys of a file.

    Attributes:
        signer: the key that signs; None if there are only public keys.
        verifiers: the keys whose signatures are good.
    """

    signer: Key | None
    verifiers: tuple[Key, ...]


class _HmacKey:
    """HMAC-SHA256: a machine that can verify can also sign."""

    how = HMAC

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = hmac.digest(secret, b"kcache key id\n", "sha256")[:8]

    def sign(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, _CONTEXT + digest, "sha256")

    def verifies(self, signature: bytes, digest: bytes) -> bool:
        return hmac.compare_digest(self.sign(digest), signature)

    def __repr__(self) -> str:
        return f"<HMAC key {self.id.hex()}>"


class _PublicKey:
    """Ed25519's public half."""

    how = ED25519

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        self.id = hashlib.sha256(public.public_bytes_raw()).digest()[:8]

    def verifies(self, signature: bytes, digest: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, _CONTEXT + digest)
        except InvalidSignature:
            return False
        return True

    def sign(self, digest: bytes) -> bytes:
        raise TypeError("a public key can't sign")

    def __repr__(self) -> str:
        return f"<Ed25519 key {self.id.hex()}>"


class _PrivateKey(_PublicKey):
    """Ed25519's private half."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        super().__init__(private.public_key())
        self._private = private

    def sign(self, digest: bytes) -> bytes:
        signature: bytes = self._private.sign(_CONTEXT + digest)
        return signature


def read_keys(path: str) -> Keys:
    """Return the keys in a file.

    The file must belong to the present user or to root. If it has a key that signs, nobody else may
    read it. If it has public keys only, nobody else may write to it.

    Raises:
        ConfigError: it can't be read, is not safe, or holds no key.
    """
    text = _read_safely(path)
    keys = [_parsed(path, label, body) for label, body in _blocks(text)]
    if not keys:
        raise _refused(path, "it holds no key in PEM (kcache key new makes one)")
    signers = [key for key in keys if not _is_public(key)]
    return Keys(signers[0] if signers else None, tuple(keys))


def _is_public(key: Key) -> bool:
    return type(key) is _PublicKey


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(f"the file of signing keys {path} can't be used: {why}")


def _read_safely(path: str) -> bytes:
    """Return the content of a file that nobody else could have written.

    Raises:
        ConfigError: it is not safe, or can't be read.
    """
    try:
        unsafe = unsafe_part(os.path.abspath(path))
        fd = os.open(path, os.O_RDONLY | (SAFE & ~getattr(os, "O_NOFOLLOW", 0)))
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            text = file.read(_MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(status.st_mode) or len(text) > _MOST_BYTES:
        raise _refused(path, "it is no plain file of a few keys")
    secret = any(label != b"PUBLIC KEY" for label, _ in _blocks(text))
    problem = unsafe or _problem(status, secret=secret)
    if problem:
        raise _refused(path, problem)
    return text


def _problem(status: os.stat_result, *, secret: bool) -> str:
    """Return why the owner or the mode of a file is not safe; always empty on Windows."""
    if os.name == "nt":
        return ""
    if status.st_uid not in (present_user(), 0):
        return f"it belongs to user {status.st_uid}"
    if secret and status.st_mode & _OTHERS:
        return f"others can read it (mode {stat.S_IMODE(status.st_mode):04o}; allowed: 0600)"
    if status.st_mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _blocks(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    for found in _BLOCK.finditer(text):
        yield found[1], found[0]


def _parsed(path: str, label: bytes, block: bytes) -> Key:
    """Return the key in one block of PEM.

    Raises:
        ConfigError: there is no key in it.
    """
    if label == _HMAC_LABEL.encode():
        return _HmacKey(_hmac_secret(path, block))
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )
    except ImportError as error:
        raise _refused(path, _NO_PACKAGE) from error
    try:
        if label == b"PUBLIC KEY":
            public = serialization.load_pem_public_key(block)
            if isinstance(public, Ed25519PublicKey):
                return _PublicKey(public)
        elif label == b"PRIVATE KEY":
            private = serialization.load_pem_private_key(block, None)
            if isinstance(private, Ed25519PrivateKey):
                return _PrivateKey(private)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _refused(path, f"a {label.decode()} in it is damaged") from error
    raise _refused(path, f"a {label.decode()} in it is no key for HMAC or Ed25519")


_NO_PACKAGE = (
    "an Ed25519 key needs the package cryptography: pip install cryptography, "
    "or install kcache with the extra remote"
)


def _hmac_secret(path: str, block: bytes) -> bytes:
    try:
        secret = base64.b64decode(b"".join(block.split(b"\n")[1:-1]), validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != _HMAC_BYTES:
        raise _refused(path, f"a {_HMAC_LABEL} in it is damaged")
    return secret


def make_keys(kind: str) -> tuple[bytes, bytes | None]:
    """Return a new key as PEM, and its public half (None for HMAC).

    Args:
        kind: `"ed25519"` or `"hmac"`.

    Raises:
        ConfigError: there is no such kind, or the package `cryptography` is missing.
    """
    if kind == "hmac":
        return _hmac_pem(secrets.token_bytes(_HMAC_BYTES)), None
    if kind != "ed25519":
        raise ConfigError(f"kind={kind!r} is not allowed; allowed: ed25519, hmac")
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigError(f"no key can be made: {_NO_PACKAGE}") from error
    private = Ed25519PrivateKey.generate()
    text: bytes = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return text, _public_pem(private.public_key())


def _hmac_pem(secret: bytes) -> bytes:
    text = base64.b64encode(secret).decode()
    return f"-----BEGIN {_HMAC_LABEL}-----\n{text}\n-----END {_HMAC_LABEL}-----\n".encode()


def _public_pem(public: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    text: bytes = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return text


def public_part(keys: Keys) -> bytes:
    """Return the public halves of all Ed25519 keys as PEM; empty if there are none."""
    return b"".join(_public_pem(k._public) for k in keys.verifiers if isinstance(k, _PublicKey))


def write_keys(path: str, text: bytes, *, mode: int = 0o600) -> None:
    """Write a new file of keys; never replace a file.

    Raises:
        OSError: there is one, or it can't be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(text)
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
    except BaseException:
        os.unlink(path)
        raise
