"""Metadata: what a kernel's entry records about its request and its compile.

The functions that read metadata accept any content, because an entry may have been written by
another version or another program.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc import text_of_log
from kcache.nvrtc.options import parse_options
from kcache.nvrtc.places import log_at
from kcache.nvrtc.request import Request, digest_fields, hash_source
from kcache.nvrtc.search import HeaderSearch

if TYPE_CHECKING:
    from kcache.entry import JSON

#: The beginnings of an option that names the target.
_TARGET = ("--gpu-architecture", "-arch")
#: The year 9999, in seconds since the epoch. A larger number is not treated as a time.
_YEAR_9999 = 253e9


def flags_of(value: JSON) -> tuple[str, ...]:
    """Return the options of a compile, from the metadata's `flags`, without the target."""
    flags = filter(None, texts_of(value))
    # Interned, because thousands of entries have the same options.
    return tuple(sys.intern(flag) for flag in flags if not flag.startswith(_TARGET))


def stored_log(metadata: Mapping[str, JSON]) -> str:
    """Return the log of a kernel's compile as text.

    In the log, the directories have the spelling that they had in that compile.
    """
    paths = parse_options(texts_of(metadata.get("flags"))).include_paths
    search = HeaderSearch(text_of(metadata.get("source_name")), paths, directory="/")
    return text_of_log(log_at(search, text_of(metadata.get("log")).encode("latin-1", "replace")))


class RequestSummary(NamedTuple):
    """The parts of a request that can be compared with those of another request.

    The request is either a new one or the one whose kernel an entry contains. Parts that are
    unknown are empty or None.

    Attributes:
        source_name: the name of the source.
        names: the name expressions.
        arch: the target architecture.
        flags: the options, as flags for the compiler.
        compiler: the identity of the compiler.
        source_hash: the digest of the source text.
        headers: the in-memory headers, include name -> digest of the text.
        extra_key: the digest of the bytes that the caller added to the key; empty if there are
            none.
        bound: the directories and variables in the key; see `Request.bound`.
        request: the key of the request.
        nvrtc: the version of the compiler, such as `"13.0"`.
        created: when the kernel was compiled, in seconds since the epoch.
    """

    source_name: str
    names: tuple[str, ...]
    arch: str
    flags: tuple[str, ...]
    compiler: str
    source_hash: str
    headers: Mapping[str, str]
    extra_key: str
    bound: tuple[str, ...]
    request: str
    nvrtc: str = ""
    created: float | None = None

    @classmethod
    def of(cls, request: Request) -> RequestSummary:
        """Return the summary of `request`."""
        return cls.read(metadata_of(request, request.key), request.key)._replace(created=None)

    @classmethod
    def read(cls, metadata: Mapping[str, JSON], key: str) -> RequestSummary:
        """Return the summary of the request whose kernel is stored under `key` with `metadata`.

        The metadata may have any content: a value of a wrong type is treated as unknown.
        """
        headers = metadata.get("headers")
        headers = headers if isinstance(headers, dict) else {}
        return cls(
            text_of(metadata.get("source_name")),
            texts_of(metadata.get("names")),
            text_of(metadata.get("arch")),
            texts_of(metadata.get("flags")),
            text_of(metadata.get("compiler")),
            text_of(metadata.get("source_hash")),
            {str(name): text_of(value) for name, value in headers.items()},
            text_of(metadata.get("extra_key")),
            texts_of(metadata.get("bound")),
            text_of(metadata.get("request")) or key,
            text_of(metadata.get("nvrtc")),
            number_of(metadata.get("created")),
        )


def metadata_of(request: Request, key: str, version: tuple[int, ...] = ()) -> dict[str, JSON]:
    """Return the metadata for a kernel that was just compiled and is stored under `key`.

    `version` is the version of the compiler that has compiled it; under the drop-in, this is the
    NVRTC of the program. An empty `version` is left out.
    """
    extra_key = digest_fields("extra_key", [("", request.extra_key)])[:32]
    found: dict[str, JSON] = {
        "source_name": shown_text(request.source_name),
        "names": [*request.names],
        "arch": request.options.target,
        "flags": [*map(shown_text, request.options.flags())],
        "compiler": shown_text(request.compiler),
        "created": time.time(),
        "source_hash": hash_source(request.source),
    }
    optional: dict[str, JSON] = {
        "request": "" if request.key == key else request.key,
        "bound": [*map(shown_text, request.bound)],
        "headers": {name: hash_source(text) for name, text in request.headers.items()},
        "extra_key": extra_key if request.extra_key else "",
        "nvrtc": ".".join(map(str, version)),
    }
    return found | {name: value for name, value in optional.items() if value}


def shown_text(text: str) -> str:
    """Return `text`, such as a path, with escapes in place of bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def text_of(value: object) -> str:
    """Return `value`, from the metadata, if it is text, or an empty text if it is anything else."""
    return value if isinstance(value, str) else ""


def texts_of(value: JSON) -> tuple[str, ...]:
    """Return `value`, from the metadata, as a tuple if it is a list, or else an empty tuple.

    An element that is not text becomes an empty text.
    """
    return tuple(map(text_of, value)) if isinstance(value, list) else ()


def number_of(value: object) -> float | None:
    """Return `value` if it is a number of seconds that can be a time, or else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < _YEAR_9999 else None  # not a NaN either
