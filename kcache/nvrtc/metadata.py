"""RequestSummary: what an entry's metadata says about its request, for tools that show it.

The key decides whether an entry is served, not this summary. Entries of older versions say less.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc.key import digest_fields, hash_source

if TYPE_CHECKING:
    from kcache.entry import JSON
    from kcache.nvrtc.request import Request

__all__ = ["RequestSummary", "metadata_of", "number_of", "text_of", "texts_of"]

_YEAR_9999 = 253e9


class RequestSummary(NamedTuple):
    """What is known about a request, or an entry's request; None or empty if unknown.

    Attributes:
        source_name: name of the source; likewise `names`, `arch`, `flags` and `compiler` as they
            were asked for.
        source_hash: digest of the source text.
        headers: in-memory headers, include name -> digest of the text.
        extra_key: digest of the caller's own bytes, empty without any.
        bound: the directories in the key; see `Request`.
        request: key of the request.
        nvrtc: version of the compiler, such as `"13.0"`.
        created: seconds since the epoch.
    """

    source_name: str
    names: tuple[str, ...]
    arch: str
    flags: tuple[str, ...]
    compiler: str
    source_hash: str | None = None
    headers: Mapping[str, str] | None = None
    extra_key: str | None = None
    bound: tuple[str, ...] | None = None
    request: str | None = None
    nvrtc: str = ""
    created: float | None = None

    @classmethod
    def of(cls, request: Request) -> RequestSummary:
        """Return the summary of a request."""
        return cls(
            _shown(request.source_name),
            request.names,
            request.options.target or "",
            tuple(map(_shown, request.options.flags())),
            request.compiler,
            hash_source(request.source),
            {name: hash_source(text) for name, text in request.headers.items()},
            _digest(request.extra_key),
            tuple(map(_shown, request.bound)),
            request.key,
        )

    @classmethod
    def read(cls, metadata: Mapping[str, JSON], key: str) -> RequestSummary:
        """Return the summary in the metadata of the kernel under `key`, which may be wrong."""
        new = isinstance(metadata.get("source_hash"), str)
        headers = metadata.get("headers")
        return cls(
            text_of(metadata.get("source_name")),
            texts_of(metadata.get("names")),
            text_of(metadata.get("arch")),
            texts_of(metadata.get("flags")),
            text_of(metadata.get("compiler")),
            text_of(metadata.get("source_hash")) if new else None,
            {str(name): text_of(value) for name, value in headers.items()}
            if isinstance(headers, dict)
            else {}
            if new
            else None,
            text_of(metadata.get("extra_key")) if new else None,
            texts_of(metadata.get("bound")) if new else None,
            text_of(metadata.get("request")) or key if new else None,
            text_of(metadata.get("nvrtc")),
            number_of(metadata.get("created")),
        )


def metadata_of(request: Request, key: str) -> dict[str, JSON]:
    """Return the metadata about the request for the entry under `key`, just compiled."""
    about = RequestSummary.of(request)
    found: dict[str, JSON] = {
        "source_name": about.source_name,
        "names": [*about.names],
        "arch": request.options.target,
        "flags": [*about.flags],
        "compiler": about.compiler,
        "created": time.time(),
        "source_hash": about.source_hash,
    }
    optional: dict[str, JSON] = {
        "request": "" if request.key == key else request.key,
        "bound": [*(about.bound or ())],
        "headers": dict(about.headers or {}),
        "extra_key": about.extra_key,
        "nvrtc": _nvrtc(request.compiler),
    }
    return found | {name: value for name, value in optional.items() if value}


def _shown(text: str) -> str:
    """Return a text as Unicode: a path may have bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _digest(extra_key: bytes) -> str:
    return digest_fields("extra_key", [("", extra_key)])[:32] if extra_key else ""


def _nvrtc(identity: str) -> str:
    """Return the version of the compiler that has run: for the drop-in, the program's own."""
    from kcache.nvrtc import compiler

    return ".".join(map(str, compiler.version_of(identity) or ()))


def text_of(value: object) -> str:
    """Return a text of the metadata; empty if there is something else."""
    return value if isinstance(value, str) else ""


def texts_of(value: JSON) -> tuple[str, ...]:
    """Return several texts in the same way."""
    return tuple(map(text_of, value)) if isinstance(value, list) else ()


def number_of(value: object) -> float | None:
    """Return a number that can be a time, or None for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < _YEAR_9999 else None  # not a NaN either
