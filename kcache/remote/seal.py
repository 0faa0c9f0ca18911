r"""Seal: a signature before the envelope of an entry that travels between machines.

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

from kcache.remote.keys import ID_SIZE, Keys, id_of, read_keys

__all__ = ["SEAL_ROOM", "SealError", "Sealer", "make_sealer"]

#: It is signed, too, so that our signatures are valid nowhere else, and signatures that were made
#: for something else are not valid here.
_MAGIC = b"KCSIGN1\n"
_SIGNATURE = len(_MAGIC) + ID_SIZE
#: Bytes that a seal adds.
SEAL_ROOM = _SIGNATURE + 64


class SealError(Exception):
    """A value is not signed as it has to be."""


class Sealer:
    """Signs with the private key, and accepts only what one of the keys has signed.

    Threads: safe to share.

    Args:
        keys: the keys of the file; None signs nothing, and accepts everything.

    Attributes:
        can_seal: whether others accept what this object seals. Without a private key, it should
            not be sent.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._keys = keys
        self.can_seal = keys is None or keys.signer is not None

    def seal(self, envelope: bytes) -> bytes:
        """Return the envelope with a signature.

        Raises:
            SealError: there is no private key.
        """
        if self._keys is None:
            return envelope
        signer = self._keys.signer
        if signer is None:
            raise SealError("the key file has no private key to sign with")
        signature: bytes = signer.sign(_MAGIC + envelope)
        return b"".join((_MAGIC, id_of(signer.public_key()), signature, envelope))

    def unseal(self, sealed: bytes) -> bytes:
        """Return the envelope, which the caller checks as every other one.

        Raises:
            SealError: no known key has signed it.
        """
        is_signed = sealed.startswith(_MAGIC)
        envelope = sealed[SEAL_ROOM:] if is_signed else sealed
        if self._keys is None:
            return envelope
        if not is_signed:
            raise SealError("it is not signed")
        signer = sealed[len(_MAGIC) : _SIGNATURE]
        key = self._keys.verifiers.get(signer)
        if key is None:
            raise SealError(f"it is signed by an unknown key, {signer.hex()}")
        from cryptography.exceptions import InvalidSignature

        try:
            key.verify(sealed[_SIGNATURE:SEAL_ROOM], _MAGIC + envelope)
        except InvalidSignature:
            raise SealError("its signature is wrong") from None
        return envelope


def make_sealer(key_file: str | None = None) -> Sealer:
    """Return the sealer, which signs and verifies if there is a file of keys.

    Raises:
        ConfigError: the file can't be used.
    """
    return Sealer(None if key_file is None else read_keys(key_file))
