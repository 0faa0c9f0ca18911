"""Metadata: what a kernel's entry records about its request and its compile.

Readers accept any content: an entry may come from another version or another program.
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

#: How the option that names the target begins.
_TARGET = ("--gpu-architecture", "-arch")
#: A later time, in seconds since the epoch, is not a time.
_YEAR_9999 = 253e9


def flags_of(value: JSON) -> tuple[str, ...]:
    """Return the options of a compile without the target."""
    flags = filter(None, texts_of(value))
    # Interned, because thousands of entries have the same options.
    return tuple(sys.intern(flag) for flag in flags if not flag.startswith(_TARGET))


def stored_log(metadata: Mapping[str, JSON]) -> str:
    """Return the log of a kernel's compile, with the directories that the options name."""
    paths = parse_options(texts_of(metadata.get("flags"))).include_paths
    search = HeaderSearch(text_of(metadata.get("source_name")), paths, directory="/")
    return text_of_log(log_at(search, text_of(metadata.get("log")).encode("latin-1", "replace")))


class RequestSummary(NamedTuple):
    """The parts of a request, or of an entry's request, to compare; None or empty if unknown.

    Attributes:
        source_name: name of the source; `names`, `arch`, `flags` and `compiler` as they were
            requested.
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
    source_hash: str
    headers: Mapping[str, str]
    extra_key: str
    bound: tuple[str, ...]
    request: str
    nvrtc: str = ""
    created: float | None = None

    @classmethod
    def of(cls, request: Request) -> RequestSummary:
        """Return the summary of a request."""
        return cls.read(metadata_of(request, request.key), request.key)._replace(created=None)

    @classmethod
    def read(cls, metadata: Mapping[str, JSON], key: str) -> RequestSummary:
        """Return the summary in the metadata, of any content, of the kernel under `key`."""
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
    """Return the metadata of a request whose kernel was just compiled and gets the key `key`.

    `version` is that of the compiler that has run; under the drop-in, that is the program's own.
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
    """Return a text as Unicode: a path may have bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def text_of(value: object) -> str:
    """Return a value of the metadata if it is text; else an empty text."""
    return value if isinstance(value, str) else ""


def texts_of(value: JSON) -> tuple[str, ...]:
    """Return a list of texts in the metadata as a tuple; empty for anything else."""
    return tuple(map(text_of, value)) if isinstance(value, list) else ()


def number_of(value: object) -> float | None:
    """Return a number that can be a time, or None for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < _YEAR_9999 else None  # not a NaN either
