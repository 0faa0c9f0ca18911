r"""Signing: keys and signatures of kernels that travel between machines. Keys are PEM files.

A file holds one or more Ed25519 keys, one after the other, in the form of
`openssl genpkey -algorithm ed25519` (private, not encrypted: signs, and verifies) and of
`openssl pkey -pubout` (public: verifies, and can't sign). The first private key is used for
signing. All keys verify, so keys can be replaced one after the other.

A seal is a signature before the envelope of an entry:

====================  ============================================================================
bytes                 what
====================  ============================================================================
8                     magic ``KCSIGN1\n``
8                     id of the key that signed: the first bytes of the SHA-256 of its public half
64                    the Ed25519 signature of the magic and the envelope
n                     the envelope (`kcache.entry`)
====================  ============================================================================

The envelope has the entry's key, its length and a checksum against accidents. Without a signing
key, the envelope travels alone, and a reader accepts envelopes with any signature or none.
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

#: Bytes of a key's id.
ID_SIZE = 8
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL)
#: The magic is signed, too, so that these signatures are valid nowhere else, and signatures that
#: were made for something else are not valid here.
_MAGIC = b"KCSIGN1\n"
_SIGNATURE = len(_MAGIC) + ID_SIZE
#: Bytes that a seal adds.
SEAL_ROOM = _SIGNATURE + 64


class SealError(Exception):
    """A value is not signed as it has to be."""


class Sealer(NamedTuple):
    """The keys of a file: signs with the first private key, accepts what any key has signed.

    Without any key, it signs nothing, and accepts everything.

    Threads: may share it.

    Attributes:
        signer: the key that signs; None if there is no private key.
        verifiers: id -> the key whose signatures are good.
    """

    signer: Ed25519PrivateKey | None = None
    verifiers: Mapping[bytes, Ed25519PublicKey] = MappingProxyType({})

    def __repr__(self) -> str:
        """Return the ids alone."""
        return f"<Ed25519 keys {', '.join(each.hex() for each in self.verifiers)}>"

    @property
    def can_seal(self) -> bool:
        """Whether `seal` can return what others with these keys accept; if not, nothing is sent."""
        return self.signer is not None or not self.verifiers

    def seal(self, envelope: bytes) -> bytes:
        """Return the envelope with a signature.

        Raises:
            SealError: the private key is missing.
        """
        if not self.verifiers:
            return envelope
        if self.signer is None:
            raise SealError("the key file has no private key to sign with")
        signature: bytes = self.signer.sign(_MAGIC + envelope)
        return b"".join((_MAGIC, id_of(self.signer.public_key()), signature, envelope))

    def unseal(self, sealed: bytes) -> bytes:
        """Return the envelope, which the caller checks like every other.

        Raises:
            SealError: no known key has signed the envelope.
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
    """Return the sealer, which signs and verifies if there is a file of keys.

    Raises:
        ConfigError: the file can't be used.
    """
    return Sealer() if key_file is None else read_keys(key_file)


# -- files of keys ---------------------------------------------------------------------------------


def read_keys(path: str) -> Sealer:
    """Return the keys in a file.

    The file must belong to the present user or to root. Other users may not
    write to it, and if it has a private key, they may not read it.

    Raises:
        ConfigError: the file can't be read, is not safe, or holds no key.
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
        raise ConfigError(f"the file of signing keys {path} can't be used: {error}") from error


def _parsed(blocks: Mapping[bytes, bytes]) -> Sealer:
    """Return the keys in some blocks of PEM, each with its label.

    Raises:
        ConfigError, ValueError, TypeError: there is no key, or a key is of another kind or damaged.
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
            raise ConfigError(f"expected Ed25519 keys, got another {label.decode()}")
    if not public:
        raise ConfigError("expected an Ed25519 key in PEM, found none (`kcache key new` makes one)")
    return Sealer(next(iter(private), None), {id_of(key): key for key in public})


def _cryptography() -> tuple[Any, Any, Any]:
    """Return the modules for PEM, for Ed25519, and of the exceptions.

    Raises:
        ConfigError: the package `cryptography` is missing.
    """
    try:
        with importing:
            from cryptography import exceptions  # noqa: PLC0415
            from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
            from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        needs = "the package cryptography: install kcache with the extra signing"
        raise ConfigError(f"signing keys need {needs}") from error
    return serialization, ed25519, exceptions


def id_of(key: Ed25519PublicKey) -> bytes:
    """Return the id by which a signature names its key."""
    return hashlib.sha256(key.public_bytes_raw()).digest()[:ID_SIZE]


def make_keys() -> tuple[bytes, bytes]:
    """Return a new key as PEM, and its public half.

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
    """Return the public halves of all keys as PEM."""
    return b"".join(map(_public_pem, keys.verifiers.values()))


def _public_pem(key: Ed25519PublicKey) -> bytes:
    pem = _cryptography()[0]
    text: bytes = key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return text


def write_keys(path: str, text: bytes, *, mode: int = 0o600) -> None:
    """Write a new file of keys; never replace a file.

    Raises:
        OSError: the file exists, or can't be written.
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
