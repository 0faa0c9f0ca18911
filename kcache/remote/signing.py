r"""Signing: signs the entries that machines exchange, and verifies their signatures.

A key file contains one or more Ed25519 keys in PEM. A private key has the form that
`openssl genpkey -algorithm ed25519` prints, without encryption; it can sign and verify. A public
key has the form that `openssl pkey -pubout` prints; it can only verify. The first private key in
the file signs. A signature is accepted if any key in the file verifies it, so that keys can be
replaced one after the other.

A sealed entry is a signature, followed by the envelope of the entry:

====================  ============================================================================
bytes                 what
====================  ============================================================================
8                     magic ``KCSIGN1\n``
8                     id of the key that signed: the first bytes of the SHA-256 of its public half
64                    the Ed25519 signature of the magic and the envelope
n                     the envelope (`kcache.entry`)
====================  ============================================================================

The envelope contains the entry's key and its own length, so the signature covers both. If there is
no key file, an envelope is sent without a signature, and a reader accepts envelopes with any
signature or none.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kcache.errors import ConfigError
from kcache.remote.credentials import own_file, require_unreadable
from kcache.util.forks import importing
from kcache.util.open_file import SAFE
from kcache.util.path_safety import unsafe_part

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

#: The number of bytes of a key's id.
ID_SIZE = 8
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL)
#: The magic is part of what is signed. So a signature that was made here can't be used for another
#: purpose, and a signature that was made for another purpose is not valid here.
_MAGIC = b"KCSIGN1\n"
_SIGNATURE = len(_MAGIC) + ID_SIZE
#: The number of bytes that a signature adds to an envelope.
SEAL_ROOM = _SIGNATURE + 64


class SealError(Exception):
    """A value is not signed as required, or it can't be signed."""


class Sealer(NamedTuple):
    """The keys in a key file, which sign and verify entries.

    The first private key signs. A signature is accepted if any of the keys verifies it. A sealer
    without keys does not sign, and accepts every value.

    Threads: Several threads may use one object.

    Attributes:
        signer: the private key that signs, or None if there is no private key.
        verifiers: the public keys whose signatures are accepted; maps the id of each to the key.
    """

    signer: Ed25519PrivateKey | None = None
    verifiers: Mapping[bytes, Ed25519PublicKey] = MappingProxyType({})

    def __repr__(self) -> str:
        """Return the ids of the keys, which are not secret."""
        return f"<Ed25519 keys {', '.join(each.hex() for each in self.verifiers)}>"

    @property
    def can_seal(self) -> bool:
        """Whether there is a private key, or there are no keys, so that no signature is needed.

        Otherwise, `seal` fails, and no entry is sent to a remote.
        """
        return self.signer is not None or not self.verifiers

    def seal(self, envelope: bytes) -> bytes:
        """Return `envelope` with a signature before it, or only `envelope` if there are no keys.

        Raises:
            SealError: there are only public keys.
        """
        if not self.verifiers:
            return envelope
        if self.signer is None:
            raise SealError("the key file has no private key to sign with")
        signature: bytes = self.signer.sign(_MAGIC + envelope)
        return b"".join((_MAGIC, id_of(self.signer.public_key()), signature, envelope))

    def unseal(self, sealed: bytes) -> bytes:
        """Verify the signature of a value, and return its envelope, which the caller has to check.

        Without keys, a signature is removed and not verified.

        Raises:
            SealError: there are keys, and none of them has signed the envelope.
        """
        is_signed = sealed.startswith(_MAGIC)
        envelope = sealed[SEAL_ROOM:] if is_signed else sealed
        if not self.verifiers:
            return envelope
        if not is_signed:
            raise SealError("it is not signed")
        signer = sealed[len(_MAGIC) : _SIGNATURE]
        key = self.verifiers.get(signer)
        if key is None:
            raise SealError(f"it is signed by an unknown key, {signer.hex()}")
        try:
            key.verify(sealed[_SIGNATURE:SEAL_ROOM], _MAGIC + envelope)
        except _cryptography()[2].InvalidSignature:
            raise SealError("its signature is wrong") from None
        return envelope


def make_sealer(key_file: str | None = None) -> Sealer:
    """Return a sealer with the keys in `key_file`, or without keys if `key_file` is None.

    Raises:
        ConfigError: the key file can't be used.
    """
    return Sealer() if key_file is None else read_keys(key_file)


# -- files of keys ---------------------------------------------------------------------------------


def read_keys(path: str) -> Sealer:
    """Return a sealer with the keys in a key file.

    The file must belong to the present user or to root. No other user may be able to write to the
    file, or to read it if it contains a private key.

    Raises:
        ConfigError: the file can't be read, is not safe, or contains no Ed25519 key.
    """
    try:
        unsafe = unsafe_part(os.path.abspath(path))
        if unsafe:
            raise ConfigError(f"{path} is not used: {unsafe}")
        text, mode = own_file(path)
        blocks = {found[0]: found[1] for found in _BLOCK.finditer(text)}
        if any(label != b"PUBLIC KEY" for label in blocks.values()):
            require_unreadable(path, mode)
        return _parsed(blocks)
    except (OSError, ValueError, TypeError) as error:  # ConfigError is a ValueError
        raise ConfigError(f"the signing keys in {path} can't be used: {error}") from error


def _parsed(blocks: Mapping[bytes, bytes]) -> Sealer:
    """Return a sealer with the keys in `blocks`, which maps each block of PEM to its label.

    Raises:
        ConfigError: there is no key, or a key is not an Ed25519 key.
        ValueError, TypeError: a key is damaged or encrypted.
    """
    pem, ed25519, exceptions = _cryptography()
    private: list[Ed25519PrivateKey] = []
    public: list[Ed25519PublicKey] = []
    for block, label in blocks.items():
        try:
            if label == b"PUBLIC KEY":
                key: Any = pem.load_pem_public_key(block)
            else:
                key = pem.load_pem_private_key(block, None)
        except exceptions.UnsupportedAlgorithm:
            key = None
        if isinstance(key, ed25519.Ed25519PrivateKey):
            private.append(key)
            public.append(key.public_key())
        elif isinstance(key, ed25519.Ed25519PublicKey):
            public.append(key)
        else:
            raise ConfigError(f"expected Ed25519 keys, got another kind of {label.decode()}")
    if not public:
        raise ConfigError("expected an Ed25519 key in PEM, found none (`kcache key new` makes one)")
    return Sealer(next(iter(private), None), {id_of(key): key for key in public})


def _cryptography() -> tuple[Any, Any, Any]:
    """Import and return the modules of `cryptography` for PEM, for Ed25519 and with exceptions.

    Raises:
        ConfigError: the package `cryptography` is missing.
    """
    try:
        with importing:
            from cryptography import exceptions  # noqa: PLC0415
            from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
            from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        needs = "the package cryptography, which is missing: install kcache with the extra signing"
        raise ConfigError(f"signing needs {needs}") from error
    return serialization, ed25519, exceptions


def id_of(key: Ed25519PublicKey) -> bytes:
    """Return the id of a key. Each signature contains the id of the key that made it."""
    return hashlib.sha256(key.public_bytes_raw()).digest()[:ID_SIZE]


def make_keys() -> tuple[bytes, bytes]:
    """Make a key, and return the private key and the public key as PEM.

    Raises:
        ConfigError: the package `cryptography` is missing.
    """
    pem, ed25519, _ = _cryptography()
    private = ed25519.Ed25519PrivateKey.generate()
    text: bytes = private.private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
    )
    return text, _public_pem(private.public_key())


def public_part(keys: Sealer) -> bytes:
    """Return the public keys of a sealer as PEM."""
    return b"".join(map(_public_pem, keys.verifiers.values()))


def _public_pem(key: Ed25519PublicKey) -> bytes:
    pem = _cryptography()[0]
    text: bytes = key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return text


def write_keys(path: str, text: bytes, *, mode: int = 0o600) -> None:
    """Write keys in PEM to a new file at `path`. An existing file is never replaced.

    Raises:
        OSError: the file exists, or it can't be written.
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
