"""Inventory: describes the entries of a backend, without recording a use of them.

Everything here reads through `Backend.scan` and `Backend.get`, one payload at a time, and changes
nothing. Entries that vanish meanwhile are left out; damaged ones are described as such.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kcache.backend import Backend, EntryInfo
from kcache.entry import Entry, decode
from kcache.errors import BackendError, CorruptEntryError, IncompatibleEntryError
from kcache.nvrtc import names_and_log
from kcache.nvrtc.artifact import text_of_log
from kcache.nvrtc.options import parse_options
from kcache.nvrtc.request import DEFAULT_NAME, Request, digest_fields, hash_source
from kcache.nvrtc.search import HeaderSearch

if TYPE_CHECKING:
    from kcache.entry import JSON

#: Kinds of entries. `OTHER` is an undamaged entry of another version or program, or of a kind that
#: is unknown here. `UNREADABLE` is an entry that the medium does not return.
KERNEL, MANIFEST, OTHER = "kernel", "manifest", "other"
DAMAGED, UNREADABLE = "damaged", "unreadable"

#: The names of sources that the caller did not name: kcache's own, and NVRTC's.
DEFAULT_NAMES = (DEFAULT_NAME, "default_program", "")
#: How the option that names the target begins.
_TARGET = ("--gpu-architecture", "-arch")
#: Exceptions that reading a foreign entry may raise.
_FORGED = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError)


class Item(NamedTuple):
    """What is known of one entry.

    Attributes:
        key: 64 hexadecimal digits.
        size: stored bytes.
        used: last recorded use, seconds since the epoch.
        kind: one of `KERNEL`, `MANIFEST`, `OTHER`, `DAMAGED` and `UNREADABLE`.
        problem: why the entry is not served, empty if it is.
        source_name: of a kernel's source, empty if unknown; likewise the rest.
        names: of its kernels: name expressions, or the names in the module.
        arch: its target.
        created: seconds since the epoch, or None.
        compile_seconds: time of its compile, or None.
        flags: options of its compile without the target.
        compiler: the compiler of it.
    """

    key: str
    size: int
    used: float
    kind: str
    problem: str = ""
    source_name: str = ""
    names: tuple[str, ...] = ()
    arch: str = ""
    created: float | None = None
    compile_seconds: float | None = None
    flags: tuple[str, ...] = ()
    compiler: str = ""

    @property
    def title(self) -> str:
        """See `title_of`."""
        return title_of(self.source_name, self.names)


class Opened(NamedTuple):
    """An item, and the entry itself if it is sound."""

    item: Item
    entry: Entry | None


def title_of(source_name: str, names: Sequence[str]) -> str:
    """Return a source and its kernels; of a source that was not named, the kernels alone."""
    listed = ", ".join(names)
    if not listed or source_name not in DEFAULT_NAMES:
        return ": ".join(filter(None, (source_name, listed)))
    return listed if len(names) == 1 else f"{len(names)} kernels: {listed}"


def look_into(backend: Backend, info: EntryInfo, producer: str) -> Opened | None:
    """Read and check one entry, a manifest down to its header sets; None if it is gone."""
    try:
        blob = backend.get(info.key)
    except BackendError as error:
        kind = DAMAGED if isinstance(error, CorruptEntryError) else UNREADABLE
        return Opened(_item(info)._replace(kind=kind, problem=str(error)), None)
    return None if blob is None else look_at(blob, info, producer)


def look_at(blob: bytes, info: EntryInfo, producer: str) -> Opened:
    """Check an entry that was read, in the same way."""
    item = _item(info)
    try:
        entry = decode(blob, info.key, producer=producer.encode())
        described = describe(item, entry.metadata)
        if described.kind == MANIFEST:
            from kcache.nvrtc.manifest import Manifest

            for header_set in Manifest.from_entry(entry).header_sets:
                header_set.sections()
        elif described.kind == KERNEL:
            names_and_log(entry)
    except IncompatibleEntryError as error:
        return Opened(item._replace(problem=str(error)), None)
    except CorruptEntryError as error:
        return Opened(item._replace(kind=DAMAGED, problem=str(error)), None)
    except _FORGED as error:  # a valid checksum over data that no version of kcache wrote
        problem = f"{type(error).__name__}: {error}"
        return Opened(item._replace(kind=DAMAGED, problem=problem), None)
    return Opened(described, entry)


def _item(info: EntryInfo) -> Item:
    return Item(info.key, info.size, info.used_ns / 1e9, OTHER)


def items(backend: Backend, producer: str) -> Iterator[Item]:
    """Yield a description of every entry, in any order.

    Raises:
        BackendError: the entries can't be listed.
    """
    for info in backend.scan():
        opened = look_into(backend, info, producer)
        if opened is not None:
            yield opened.item


def describe(item: Item, metadata: Mapping[str, JSON]) -> Item:
    """Return `item`, completed from an entry's metadata, which may have any content."""
    kind = metadata.get("kind")
    if kind == MANIFEST:
        return item._replace(kind=MANIFEST)
    return item._replace(
        kind=KERNEL if kind == KERNEL else OTHER,
        source_name=text_of(metadata.get("source_name")),
        names=texts_of(metadata.get("functions")),
        arch=text_of(metadata.get("arch")),
        created=number_of(metadata.get("created")),
        compile_seconds=number_of(metadata.get("compile_seconds")),
        flags=_flags(metadata.get("flags")),
        compiler=sys.intern(text_of(metadata.get("compiler"))),
    )


def matching(backend: Backend, prefixes: Iterable[str]) -> dict[str, list[EntryInfo]]:
    """Return the entries whose keys begin with each prefix, sorted by key.

    Raises:
        BackendError: the entries can't be listed.
    """
    found: dict[str, list[EntryInfo]] = {prefix: [] for prefix in prefixes}
    for info in backend.scan():
        for prefix, infos in found.items():
            if info.key.startswith(prefix):
                infos.append(info)
    return {prefix: sorted(infos) for prefix, infos in found.items()}


def unique_length(keys: Iterable[str], *, least: int = 8) -> int:
    """Return how many digits are enough to tell these keys apart."""
    pairs = pairwise(sorted(keys))
    alike = (len(os.path.commonprefix(pair)) for pair in pairs)  # noqa: RUF071  digits, no paths
    return max(least, 1 + max(alike, default=0))


def coldest_first(backend: Backend) -> list[EntryInfo]:
    """Return all present entries in the exact order of use, least recently used first.

    Raises:
        BackendError: the entries can't be listed.
    """
    return sorted(backend.scan(), key=attrgetter("used_ns", "key"))


def would_evict(backend: Backend, goal: int | None, *, since_ns: float = 0) -> tuple[int, int]:
    """Return how many entries and bytes a trim would evict, evicting nothing.

    Args:
        backend: whose entries.
        goal: bytes that may stay; None for all that are not too old.
        since_ns: entries that were last used before, nanoseconds since the epoch, are evicted in
            any case.

    Raises:
        BackendError: the entries can't be listed.
    """
    left = backend.usage().bytes
    count = freed = 0
    for info in coldest_first(backend):
        if info.used_ns >= since_ns and (goal is None or left - freed <= goal):
            break
        count += 1
        freed += info.size
    return count, freed


def _flags(value: JSON) -> tuple[str, ...]:
    flags = filter(None, texts_of(value))
    # Thousands of entries share most of them.
    return tuple(sys.intern(flag) for flag in flags if not flag.startswith(_TARGET))


def stored_log(metadata: Mapping[str, JSON]) -> str:
    """Return the log of a kernel's compile, with the paths of the compile."""
    from kcache.nvrtc.places import log_at

    paths = parse_options(texts_of(metadata.get("flags"))).include_paths
    search = HeaderSearch(text_of(metadata.get("source_name")), paths, directory="/")
    return text_of_log(log_at(search, text_of(metadata.get("log")).encode("latin-1", "replace")))


# -- metadata ------------------------------------------------------------------------------------

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
        """Return the summary in the metadata of the kernel under `key`, which may be wrong."""
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
    """Return the metadata about the request for the entry under `key`, just compiled.

    `version` is that of the compiler that has run: for the drop-in, the program's own.
    """
    extra_key = digest_fields("extra_key", [("", request.extra_key)])[:32]
    found: dict[str, JSON] = {
        "source_name": _shown(request.source_name),
        "names": [*request.names],
        "arch": request.options.target,
        "flags": [*map(_shown, request.options.flags())],
        "compiler": request.compiler,
        "created": time.time(),
        "source_hash": hash_source(request.source),
    }
    optional: dict[str, JSON] = {
        "request": "" if request.key == key else request.key,
        "bound": [*map(_shown, request.bound)],
        "headers": {name: hash_source(text) for name, text in request.headers.items()},
        "extra_key": extra_key if request.extra_key else "",
        "nvrtc": ".".join(map(str, version)),
    }
    return found | {name: value for name, value in optional.items() if value}


def _shown(text: str) -> str:
    """Return a text as Unicode: a path may have bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


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
