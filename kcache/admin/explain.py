"""Explain: says why a request would be compiled, or that it is in the cache.

It only reads: it changes no statistics, records no use of an entry, and runs no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kcache.admin.request_diff import Cause, contrast, include_paths
from kcache.backend import EntryInfo, NoBackend
from kcache.errors import BackendError, CorruptEntryError
from kcache.nvrtc.entries import (
    DAMAGED,
    KERNEL,
    OTHER,
    UNREADABLE,
    Item,
    Opened,
    describe,
    look_into,
)
from kcache.nvrtc.metadata import DEFAULT_NAMES, RequestSummary
from kcache.util.units import local_time

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.engine import CacheEngine
    from kcache.engine.journal import Event
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.search import HeaderSearch

#: How many clauses of one kind a sentence holds.
_TOLD = 2

_SETTINGS = {
    "disable": ("disabled", "the cache is neither read nor written"),
    "recache": ("recache", "everything is compiled, and replaces what is there"),
}
_EVENTS = {
    "evicted": "it was evicted to stay under the cap",
    "trimmed": "it was evicted by a trim",
    "deleted": "it was deleted",
    "cleared": "the cache was cleared",
    "moved": "the entries were moved to another backend",
    "refused": "it was found damaged, or of another version, and not used",
    "rejected": "it was compiled, and not stored: there is no room for it",
    "uncacheable": "it was compiled, and must not be cached",
}
#: Events after which an entry can't be there, whatever became of all entries.
_NEVER_STORED = ("rejected", "uncacheable")
_DIFFERENCES = {
    "changed": ("header_changed", "the header {} changed"),
    "gone": ("header_gone", "the header {} is gone"),
    "appeared": ("header_appeared", "{} is there now, and was not when the compiler looked for it"),
    "vanished": ("header_vanished", "{} is gone, and was there when the compiler looked for it"),
    "identity": ("header_identity", "two headers of equal content became one file, or two"),
    "answer": ("header_changed", "the compiler would find something else about {}"),
    "variable": ("variable", "the environment variable {} has another value"),
    "place": ("directory", "the kernel depends on the directory {}"),
    "root": ("include_path", "the include directories are others"),
}
#: Kinds of entries that are not served.
_PROBLEMS = {
    DAMAGED: ("damaged", "its entry is damaged"),
    OTHER: ("incompatible", "its entry is of another version or program"),
    UNREADABLE: ("unreadable", "its entry is there, and can't be read"),
}


class Near(NamedTuple):
    """An entry that answers a request much like this one."""

    key: str
    about: RequestSummary


class Explanation(NamedTuple):
    """Why a request would be compiled, or that it would not.

    Attributes:
        hit: whether it would be answered from the cache.
        causes: why not, the most certain first; empty for a hit.
        key: the key of the request.
        near: the entry that the request was compared with, if one is similar.
        kernel: the key of the kernel, under which `kcache ls` shows it; empty if the headers decide
            it, and no cached kernel fits them.
        manifest: the key of the manifest that leads to the kernel; empty for a source without
            headers.
    """

    hit: bool
    causes: tuple[Cause, ...]
    key: str
    near: Near | None = None
    kernel: str = ""
    manifest: str = ""

    def __str__(self) -> str:
        """Return the answer as a sentence."""
        return f"It would be compiled: {self.clauses}." if self.causes else "It is in the cache."

    @property
    def clauses(self) -> str:
        """The causes in one line; of many of one kind, the first and the number of others."""
        told: list[str] = []
        for _, group in groupby(self.causes, key=lambda cause: cause.kind):
            alike = [cause.what for cause in group]
            if len(alike) > _TOLD:
                alike = [f"{alike[0]} (and {len(alike) - 1} more like it)"]
            told += alike
        return "; ".join(told)


def explain(
    engine: CacheEngine,
    request: Request,
    config: Config,
    *,
    digests: FileDigests | None = None,
    checked: str = "",
) -> Explanation:
    """Return why a request would be compiled now; changes nothing, and compiles nothing.

    If nothing is cached under its key, it reads all entries, to find the one that differs least.

    Args:
        engine: of the cache.
        request: made in the working directory of the compile.
        config: the settings, of which some bypass the cache.
        digests: of files, as far as they are known.
        checked: key of the kernel, if the headers are not checked again.
    """
    found: list[Cause] = []
    for name, (kind, effect) in _SETTINGS.items():
        value, source = getattr(config, name)
        if value:
            what = f"{name if source == 'argument' else source} is set: {effect}"
            found.append(Cause(kind, what))
    try:
        return _Look(engine, request, digests, checked).explanation(found)
    except (BackendError, OSError) as error:
        found.append(_unusable(str(error)))
    kernel, manifest = (request.key, "") if request.self_contained else ("", request.key)
    return Explanation(False, tuple(found), request.key, None, kernel, manifest)


def _unusable(reason: str) -> Cause:
    return Cause("unusable", f"the cache can't be used: {reason}")


class _Set(NamedTuple):
    """One header set of the request.

    Attributes:
        differences: from now: kind and path of each, and the header that a new file hides, if any.
        key: of the kernel that it leads to.
        kernel: the kernel's entry, if there is one.
    """

    differences: tuple[tuple[str, str, str], ...]
    key: str
    kernel: Opened | None

    @property
    def about(self) -> RequestSummary | None:
        """The request that the kernel was compiled for, if it is sound."""
        if self.kernel is None or self.kernel.entry is None or self.kernel.item.kind != KERNEL:
            return None
        return RequestSummary.read(self.kernel.entry.metadata, self.key)


class _Look:
    """Looks what a cache has for one request, and finds the causes of a miss."""

    def __init__(
        self, engine: CacheEngine, request: Request, digests: FileDigests | None, checked: str
    ) -> None:
        from kcache.nvrtc.files import FileDigests

        self._engine = engine
        self._request = request
        self._digests = FileDigests() if digests is None else digests
        self._about = RequestSummary.of(request)
        self._events = tuple(engine.journal.events())
        self._alone = bool(checked) or request.self_contained
        self._key = checked or request.key
        self._opened = self._in_memory(self._key)
        self._sets = tuple(self._header_sets())
        if self._opened is None or not (self._alone or self._good()):
            # Another process may have stored a kernel for the headers as they are now.
            self._opened = self._stored(self._key)
            self._sets = tuple(self._header_sets())

    def explanation(self, found: list[Cause]) -> Explanation:
        """Return the explanation, with the causes that were found before."""
        backend, opened, near = self._engine.backend, self._opened, None
        if opened is not None:
            found += self._why_unused(opened)
            sets = sorted(self._sets, key=lambda each: len(each.differences))
            near = next((Near(s.key, s.about) for s in sets if s.about is not None), None)
        elif isinstance(backend, NoBackend):
            none = backend.kind == "no_cache"
            found.append(Cause(backend.kind, backend.reason) if none else _unusable(backend.reason))
        else:
            near = self._nearest()
            found += self._why_nothing(near)
        key, good = self._request.key, self._good()
        kernel, manifest = (self._key, "") if self._alone else ("", self._key)
        if good is not None:
            kernel = good.key
        hit = not found
        return Explanation(hit, tuple(found), key, None if hit else near, kernel, manifest)

    # -- looking -----------------------------------------------------------------------------------

    def _open(self, key: str) -> Opened | None:
        return self._in_memory(key) or self._stored(key)

    def _in_memory(self, key: str) -> Opened | None:
        """Return the facts from this process's memory, which is checked first."""
        entry = self._engine.memory.peek(key)
        if entry is None:
            return None
        return Opened(describe(Item(key, 0, 0.0, OTHER), entry.metadata), entry)

    def _stored(self, key: str) -> Opened | None:
        return look_into(self._engine.backend, EntryInfo(key, 0, 0))

    def _header_sets(self) -> Iterator[_Set]:
        """Yield the header sets of the manifest, if there is a sound one."""
        from kcache.nvrtc.manifest import Manifest

        if self._alone or self._opened is None or self._opened.entry is None:
            return
        request = self._request
        try:
            for header_set in Manifest.from_entry(self._opened.entry).header_sets:
                found = header_set.differences(request, self._digests, [])
                differences = tuple(
                    (kind, path, _shadowed(header_set, path, request.search, kind))
                    for kind, path in found
                )
                key = header_set.result_key(request.key)
                yield _Set(differences, key, self._open(key))
        except CorruptEntryError:  # intact, but without a manifest: the same as empty
            return

    def _good(self) -> _Set | None:
        """Return the header set that holds, or None."""
        return next((each for each in self._sets if not each.differences), None)

    def _nearest(self) -> Near | None:
        """Return the latest kernel whose request differs least; None if all differ much.

        It reads every entry.
        """
        best: tuple[int, float] | None = None
        near: Near | None = None
        for info in self._engine.backend.scan():
            opened = look_into(self._engine.backend, info)
            if opened is None or opened.entry is None or opened.item.kind != KERNEL:
                continue
            other = RequestSummary.read(opened.entry.metadata, info.key)
            if not other.source_hash:  # of a framework, which does not pass its sources
                continue
            if _alike(other, self._about, opened.item.names, self._request.kernels()):
                rank = len(contrast(other, self._about)), -(other.created or 0.0)
                if best is None or rank < best:
                    best, near = rank, Near(info.key, other)
        return near

    # -- finding causes ----------------------------------------------------------------------------

    def _why_unused(self, opened: Opened) -> list[Cause]:
        """Return why the entry is not used; nothing if it is a hit."""
        good = self._good()
        if opened.item.problem or opened.entry is None:
            return [_problem(opened)]
        if self._alone:
            return []
        return self._why_changed() if good is None else self._why_no_kernel(good)

    def _why_nothing(self, near: Near | None) -> list[Cause]:
        """Return why there is no entry."""
        events, about = self._events, self._about
        own, everything = _last(events, self._key), _last(events, "")
        if own is not None:
            # Not what came before an event of all entries: the entry may have come back in between.
            last = next(event for event in reversed(events) if event in (own, everything))
            return [_event(own if own.what in _NEVER_STORED else last)]
        if near is not None:
            return contrast(near.about, about) or [_hardly_different(near.about, about)]
        if everything is not None:
            return [_event(everything, f"nothing is cached for {about.source_name}, and ")]
        return [Cause("never", "this cache remembers no such kernel")]

    def _why_no_kernel(self, found: _Set) -> list[Cause]:
        """Return why the kernel for the present headers is not used; nothing if it is."""
        if found.kernel is not None:
            sound = found.kernel.entry is not None and not found.kernel.item.problem
            return [] if sound else [_problem(found.kernel)]
        event = _last(self._events, found.key)
        if event is not None:
            return [_event(event)]
        return [Cause("lost", "the headers are as they were, and the kernel is no longer there")]

    def _why_changed(self) -> list[Cause]:
        """Return the differences of the header set that differs least."""
        if not self._sets:
            return [Cause("lost", "the list of its headers is empty")]
        nearest = min(self._sets, key=lambda each: len(each.differences))
        found = [_difference(*each) for each in nearest.differences]
        old, since = nearest.about, 0.0
        if old is not None:
            found += include_paths(old, self._about)
            since = old.created or 0.0
        # Perhaps it was compiled since then, but the cache could not store the result.
        last = _last(self._events, self._key)
        if last is not None and last.what in _NEVER_STORED and last.at > since:
            found.append(_event(last))
        return found


def _problem(opened: Opened) -> Cause:
    kind, what = _PROBLEMS.get(opened.item.kind, _PROBLEMS[UNREADABLE])
    return Cause(kind, f"{what} ({opened.item.problem or 'unknown'})")


def _difference(kind: str, path: str, instead: str) -> Cause:
    name, text = _DIFFERENCES[kind]
    what = f"{path} is new, and is found before {instead}" if instead else text.format(path)
    return Cause(name, what, before=instead, path=path)


def _hardly_different(old: RequestSummary, new: RequestSummary) -> Cause:
    """Return why a request is not answered by an entry that `contrast` finds equal."""
    was, now = old.source_name, new.source_name
    if was != now:
        what = f"the source is called {now}, was compiled as {was}, and its output may show that"
        return Cause("source_name", what, was, now)
    if old.request != new.request:
        what = "the same options are written in another way"
        return Cause("option", what, " ".join(old.flags), " ".join(new.flags))
    when = "" if old.created is None else f", cached {_when(old.created)},"
    what = f"an equal request's entry{when} is there, and the list of its headers is not"
    return Cause("lost", what, at=old.created)


def _last(events: Sequence[Event], key: str) -> Event | None:
    """Return the last event of a key; for an empty key, of all entries."""
    fitting = (e for e in reversed(events) if (e.concerns(key) if key else not e.key))
    return next(fitting, None)


def _event(event: Event, before: str = "") -> Cause:
    detail = f" ({event.detail})" if event.detail else ""
    what = f"{before}{_EVENTS[event.what]}{detail} {_when(event.at)}"
    return Cause(event.what, what, at=event.at)


def _when(seconds: float) -> str:
    return f"{local_time(seconds):on %Y-%m-%d at %H:%M:%S}"


def _alike(
    other: RequestSummary, about: RequestSummary, there: Sequence[str], asked: Sequence[str]
) -> bool:
    """Tell whether two requests have the same source, which may have been edited or renamed.

    A default name that every source has says nothing. Then they have a kernel of the same name.
    """
    if other.source_hash == about.source_hash:
        return True
    if other.source_name != about.source_name:
        return False
    if about.source_name not in DEFAULT_NAMES:
        return True
    mangled = tuple(f"_Z{len(name)}{name}" for name in asked)
    return any(name in asked or name.startswith(mangled) for name in there)


def _shadowed(header_set: StoredHeaderSet, path: str, search: HeaderSearch, kind: str) -> str:
    """Return the header of the set that a file which appeared at `path` hides, or nothing."""
    from kcache.nvrtc.search import RootedPath

    if kind != "appeared":
        return ""
    sections = header_set.sections()
    absent = [RootedPath(root, name) for root, names in sections.absent for name in names]
    known = (each for each in absent if each.root < len(search.roots))
    sought = [each.path for each in known if search.path(each) == path]
    read = [RootedPath(root, name) for root, names in sections.files for name in names]
    hidden = [each for each in read if each.path in sought]
    if not hidden:  # if the compiler looked beside the including file, the name is the longer one
        hidden = [p for p in read if any(name.endswith(f"/{p.path}") for name in sought)]
    return search.path(hidden[0]) if hidden else ""
