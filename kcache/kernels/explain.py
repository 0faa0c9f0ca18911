"""Explain: finds out why a request would be compiled, or that it is in the cache.

It changes no statistics, records no use of an entry, and runs no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kcache.backend import NoBackend
from kcache.errors import BackendError, CorruptEntryError, IncompatibleEntryError
from kcache.kernels.lookup import Lookup, Tiers
from kcache.kernels.request_diff import Cause, contrast, include_paths
from kcache.nvrtc.entries import KERNEL, look_into
from kcache.nvrtc.metadata import RequestSummary
from kcache.nvrtc.request import DEFAULT_NAMES
from kcache.nvrtc.search import RootedPath
from kcache.util.units import local_time

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.engine import CacheEngine
    from kcache.engine.journal import Event
    from kcache.nvrtc.manifest import DependencySet, Manifest
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.search import HeaderSearch

#: If a request has more causes of one kind than this, a sentence has the first one and counts the
#: others.
_MAX_ALIKE = 2

_SETTINGS = {
    "disable": ("disabled", "the cache is neither read nor written"),
    "recache": ("recache", "every kernel is compiled, and replaces the cached one"),
}
_EVENTS = {
    "evicted": "it was evicted to stay under the cap",
    "trimmed": "it was evicted by a trim",
    "deleted": "it was deleted",
    "cleared": "the cache was cleared",
    "moved": "the entries were moved to another backend",
    "refused": "it was found damaged or of another version, and was not used",
    "rejected": "it was compiled, but not stored, because the cache had no room for it",
    "uncacheable": "it was compiled, and must not be cached",
}
#: Events of an entry that was not stored. A later event of all entries does not concern the entry.
_NEVER_STORED = ("rejected", "uncacheable")
_DIFFERENCES = {
    "changed": ("header_changed", "the header {} changed"),
    "gone": ("header_gone", "the header {} is gone"),
    "appeared": ("header_appeared", "{} exists now, but did not when the compiler looked for it"),
    "vanished": ("header_vanished", "{} is gone, but existed when the compiler looked for it"),
    "identity": (
        "header_identity",
        "two headers with equal content became one file, or one file became two",
    ),
    "answer": ("header_changed", "the compiler would get another result when it looks up {}"),
    "variable": ("variable", "the environment variable {} has another value"),
    "place": ("directory", "the kernel depends on the directory {}"),
    "root": ("include_path", "the include directories differ"),
}


class Near(NamedTuple):
    """The entry of a similar request."""

    key: str
    about: RequestSummary


class Explanation(NamedTuple):
    """Why a request would be compiled, or that it would not.

    Attributes:
        hit: whether the request would be answered from the cache.
        causes: the causes of the miss, the most certain first; empty for a hit.
        key: the key of the request.
        near: the entry that the request was compared with; None if there was none to compare with.
        kernel: the key of the kernel, as in `kcache ls`; empty if the kernel depends on headers and
            no dependency set matches the present headers.
        manifest: the key of the manifest, which has the dependency sets of the request; empty if
            the source includes no headers.
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
        """The causes in one line; of many causes of one kind, the first and how many more."""
        clauses: list[str] = []
        for _, group in groupby(self.causes, key=lambda cause: cause.kind):
            alike = [cause.what for cause in group]
            if len(alike) > _MAX_ALIKE:
                alike = [f"{alike[0]} (and {len(alike) - 1} more like it)"]
            clauses += alike
        return "; ".join(clauses)


def explain(engine: CacheEngine, request: Request, config: Config) -> Explanation:
    """Return why a request would be compiled now. Nothing is changed or compiled.

    If nothing is cached under the request's key, all entries are read to find the most similar
    request.

    Args:
        engine: the engine of the cache.
        request: the request, made in the working directory in which it would be compiled.
        config: the settings, some of which bypass the cache.
    """
    found: list[Cause] = []
    for name, (kind, effect) in _SETTINGS.items():
        value, source = getattr(config, name)
        if value:
            what = f"{name if source == 'argument' else source} is set: {effect}"
            found.append(Cause(kind, what))
    try:
        return _Explainer(engine, request, config).explanation(found)
    except (BackendError, OSError) as error:
        found.append(_unusable(str(error)))
    return _explanation(request, found)


def _explanation(
    request: Request, found: list[Cause], near: Near | None = None, kernel: str = ""
) -> Explanation:
    kernel, manifest = (request.key, "") if request.self_contained else (kernel, request.key)
    return Explanation(not found, tuple(found), request.key, near, kernel, manifest)


def _unusable(reason: str) -> Cause:
    return Cause("unusable", f"the cache can't be used: {reason}")


class _Set(NamedTuple):
    """One dependency set of the request.

    Attributes:
        differences: the differences between the set and the present state. Each has a kind, a path,
            and the path of the header that a new file hides (otherwise an empty text).
        key: the key of the kernel that was compiled with this set.
        about: the request that the kernel was compiled for; None if the kernel is missing or
            damaged.
    """

    differences: tuple[tuple[str, str, str], ...]
    key: str
    about: RequestSummary | None


class _Explainer:
    """Looks up a request without changing anything, and finds the causes of a miss."""

    def __init__(self, engine: CacheEngine, request: Request, config: Config) -> None:
        self._engine = engine
        self._request = request
        self._about = RequestSummary.of(request)
        self._events = tuple(engine.journal.events())
        tiers = Tiers(engine, config, peek=True)
        self._digests = tiers.local.digests
        self._unreadable: BackendError | None = None
        self._found = Lookup(None)
        try:
            with closing(tiers):
                self._found = tiers.lookup(request)
        except BackendError as error:
            self._unreadable = error
        manifest = None if self._found.kernel is not None else self._found.manifest
        #: The set with the fewest differences is the first.
        self._sets = [] if manifest is None else [*self._compared(manifest)]
        self._sets.sort(key=lambda each: len(each.differences))

    def explanation(self, found: list[Cause]) -> Explanation:
        """Return the explanation; its first causes are those in `found`."""
        backend, lookup, near = self._engine.backend, self._found, None
        if lookup.kernel is not None:
            return _explanation(self._request, found, kernel=lookup.kernel.key)
        holding = next((each for each in self._sets if not each.differences), None)
        if self._unreadable is not None:
            what = f"its entry exists, but can't be read ({self._unreadable})"
            found.append(Cause("unreadable", what))
        elif lookup.damaged:
            found.append(_problem(lookup.damaged[0][1]))
        elif lookup.manifest is not None:
            found += self._why_changed() if holding is None else [self._why_no_kernel(holding)]
        elif isinstance(backend, NoBackend):
            none, reason = backend.kind == "no_cache", backend.reason
            found.append(Cause(backend.kind, reason) if none else _unusable(reason))
        else:
            near = self._nearest()
            found += self._why_nothing(near)
        near = near or next((Near(s.key, s.about) for s in self._sets if s.about is not None), None)
        return _explanation(self._request, found, near, "" if holding is None else holding.key)

    def _compared(self, manifest: Manifest) -> Iterator[_Set]:
        """Compare each dependency set of a manifest with the present files; yield the results."""
        request = self._request
        for dependency_set in manifest.dependency_sets:
            with suppress(CorruptEntryError):  # intact, but not a dependency set
                found = dependency_set.differences(request, self._digests, [])
                differences = tuple(
                    (kind, path, _shadowed(dependency_set, path, request.search, kind))
                    for kind, path in found
                )
                key = dependency_set.result_key(request.key)
                slot = self._engine.peek(key, [])[0]
                metadata = {} if slot is None else slot.value.metadata
                sound = metadata.get("kind") == KERNEL
                about = RequestSummary.read(metadata, key) if sound else None
                yield _Set(differences, key, about)

    def _nearest(self) -> Near | None:
        """Return the kernel of the most similar request, or None if no request is similar.

        If several are equally similar, it is the latest one. Only requests that seem to have the
        same source are compared. Every entry is read.
        """
        best: tuple[int, float] | None = None
        near: Near | None = None
        for info in self._engine.backend.scan():
            opened = look_into(self._engine.backend, info)
            if opened is None or opened.entry is None or opened.item.kind != KERNEL:
                continue
            other = RequestSummary.read(opened.entry.metadata, info.key)
            if not other.source_hash:  # an entry of a framework, which does not pass its sources
                continue
            if _alike(other, self._about, opened.item.names, self._request.kernels()):
                rank = len(contrast(other, self._about)), -(other.created or 0.0)
                if best is None or rank < best:
                    best, near = rank, Near(info.key, other)
        return near

    # -- finding causes ----------------------------------------------------------------------------

    def _why_nothing(self, near: Near | None) -> list[Cause]:
        """Return why there is no entry under the request's key."""
        events, about = self._events, self._about
        own, everything = _last(events, self._request.key), _last(events, "")
        if own is not None:
            # The last of the two events: the entry may have been stored again in between.
            last = next(event for event in reversed(events) if event in (own, everything))
            return [_event(own if own.what in _NEVER_STORED else last)]
        if near is not None:
            return contrast(near.about, about) or [_hardly_different(near.about, about)]
        if everything is not None:
            return [_event(everything, f"nothing is cached for {about.source_name}, and ")]
        return [Cause("never", "no similar kernel was ever in this cache")]

    def _why_no_kernel(self, found: _Set) -> Cause:
        """Return why the kernel for the present headers is missing."""
        event = _last(self._events, found.key)
        if event is not None:
            return _event(event)
        return Cause("lost", "the headers are unchanged, but the kernel is missing from the cache")

    def _why_changed(self) -> list[Cause]:
        """Return the causes that the dependency set with the fewest differences shows."""
        if not self._sets:
            return [Cause("lost", "the list of its headers is empty")]
        nearest = self._sets[0]
        found = [_difference(*each) for each in nearest.differences]
        old, since = nearest.about, 0.0
        if old is not None:
            found += include_paths(old, self._about)
            since = old.created or 0.0
        # The request may have been compiled since then, without its kernel being stored.
        last = _last(self._events, self._request.key)
        if last is not None and last.what in _NEVER_STORED and last.at > since:
            found.append(_event(last))
        return found


def _problem(error: CorruptEntryError) -> Cause:
    if isinstance(error, IncompatibleEntryError):
        what = f"its entry was written by another version or another program ({error})"
        return Cause("incompatible", what)
    return Cause("damaged", f"its entry is damaged ({error})")


def _difference(kind: str, path: str, instead: str) -> Cause:
    name, text = _DIFFERENCES[kind]
    what = f"{path} is new, and is found before {instead}" if instead else text.format(path)
    return Cause(name, what, before=instead, path=path)


def _hardly_different(old: RequestSummary, new: RequestSummary) -> Cause:
    """Return why the entry of `old` doesn't answer `new`, if `contrast` finds no difference."""
    was, now = old.source_name, new.source_name
    if was != now:
        what = f"the source's name changed from {was} to {now}, and the output may contain the name"
        return Cause("source_name", what, was, now)
    if old.request != new.request:
        what = "the same options are written in another way"
        return Cause("option", what, " ".join(old.flags), " ".join(new.flags))
    when = "" if old.created is None else f", cached {_when(old.created)},"
    what = f"the entry of an equal request{when} exists, but the list of its headers does not"
    return Cause("lost", what, at=old.created)


def _last(events: Sequence[Event], key: str) -> Event | None:
    """Return the last event about the entry under `key`; if `key` is empty, about all entries."""
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
    """Return whether two requests seem to have the same source, perhaps edited or renamed.

    Equal source names are enough, unless the name is a default name, which any source may have.
    Then the two requests must also have a kernel of the same name.
    """
    if other.source_hash == about.source_hash:
        return True
    if other.source_name != about.source_name:
        return False
    if about.source_name not in DEFAULT_NAMES:
        return True
    mangled = tuple(f"_Z{len(name)}{name}" for name in asked)
    return any(name in asked or name.startswith(mangled) for name in there)


def _shadowed(dependency_set: DependencySet, path: str, search: HeaderSearch, kind: str) -> str:
    """Return the path of the set's header that a new file at `path` hides, or an empty text."""
    if kind != "appeared":
        return ""
    answers = dependency_set.answers()
    absent = [(root, name) for root, names in answers.absent for name in names]
    sought = [name for root, name in absent if search.path(RootedPath(root, name)) == path]
    read = [RootedPath(root, name) for root, names in answers.files for name in names]
    hidden = [each for each in read if each.path in sought]
    if not hidden:  # the compiler may have looked for the name in the including file's folder
        hidden = [p for p in read if any(name.endswith(f"/{p.path}") for name in sought)]
    return search.path(hidden[0]) if hidden else ""
