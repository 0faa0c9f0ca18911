"""CacheKey: the key of a request, one SHA-256 digest. Headers on disk are not part of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

#: Part of every digest. Raise it when the meaning of a field changes.
KEY_SCHEMA = "kcache-key/2"


class _Digest(Protocol):
    def hexdigest(self) -> str: ...


def _find_sha256() -> Callable[..., _Digest]:
    """Return SHA-256 without loading OpenSSL, which takes `hashlib` 5 ms of a fresh process.

    Python's own implementation is what hashlib falls back to, and not subject to FIPS policy;
    `random` in the standard library does the same. Its module is `_sha2` from Python 3.12 on.
    """
    for module in ("_sha2", "_sha256"):
        with suppress(ImportError):
            found: Callable[..., _Digest] = import_module(module).sha256
            return found
    import hashlib
    from functools import partial

    return partial(hashlib.sha256, usedforsecurity=False)


_sha256 = _find_sha256()
_LENGTHS = struct.Struct("<IQ")


def digest_fields(label: str, fields: Iterable[tuple[str, bytes]]) -> str:
    """Return SHA-256 over labelled, length-prefixed fields, as 64 hexadecimal digits.

    Each field enters as `u32 len(name), u64 len(value), name, value` (little-endian), so that no
    two different lists of fields give the same bytes. SHA-256 is used as a checksum that does not
    collide, not for secrecy.
    """
    parts: list[bytes] = []
    for name, value in ((label, b""), *fields):
        encoded = name.encode("utf-8", "surrogateescape")
        parts += (_LENGTHS.pack(len(encoded), len(value)), encoded, value)
    return _sha256(b"".join(parts)).hexdigest()


def hash_source(text: str) -> str:
    """Return the digest of a source text: 64 hexadecimal digits, stable across processes."""
    return _sha256(text.encode()).hexdigest()


@runtime_checkable
class SupportsFlags(Protocol):
    """Anything that can say which compiler flags it stands for, such as `CompileOptions`."""

    def flags(self) -> tuple[str, ...]:
        """Return the compiler flags in order."""
        ...


def hash_options(options: Sequence[str] | SupportsFlags) -> str:
    """Return the digest of compiler options: 64 hexadecimal digits, stable across processes.

    `options` is a sequence of flags, or an object with a `flags()` method (`CompileOptions`).
    Order-sensitive, and each flag is length-prefixed: `["ab", "c"]` differs from `["a", "bc"]`.
    """
    flags = options.flags() if isinstance(options, SupportsFlags) else options
    return digest_fields(
        "options", (("flag", flag.encode("utf-8", "surrogateescape")) for flag in flags)
    )


class CacheKey(NamedTuple):
    """Everything that decides what the compiler returns, headers on disk excepted.

    The source's name and directories are among the options if the outcome depends on them, which
    is seldom the case. Headers are added by the header manifest: the result of a source
    that includes files lives under a key made of this digest and the digests of the files that were
    read.

    Attributes:
        source_hash: `hash_source` of the source text.
        arch: target architecture as given to the compiler, such as `sm_90a`.
        options_hash: `hash_options` of the flags, include directories by position only.
        compiler: identity of the compiler's code (GNU build ids), not its version.
        names: name expressions, in order.
        headers: in-memory headers: include name -> `hash_source` of the text.
        outputs: which outputs are kept (`ptx`, `cubin`, `ltoir`).
        extra_key: the caller's own bytes.
    """

    source_hash: str
    arch: str
    options_hash: str
    compiler: str
    names: tuple[str, ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    outputs: tuple[str, ...] = ()
    extra_key: bytes = b""

    def digest(self) -> str:
        """Return the key: 64 hexadecimal digits, equal in every process and on every machine."""
        fields: list[tuple[str, bytes]] = [
            ("source", self.source_hash.encode()),
            ("arch", self.arch.encode()),
            ("options", self.options_hash.encode()),
            ("compiler", self.compiler.encode()),
            ("extra", self.extra_key),
        ]
        fields += (("name", name.encode()) for name in self.names)
        fields += (("output", output.encode()) for output in self.outputs)
        for name, content in sorted(self.headers.items()):
            fields += (("header", name.encode()), ("content", content.encode()))
        return digest_fields(KEY_SCHEMA, fields)
