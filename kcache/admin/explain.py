"""Explain: says why a request would be compiled, or that it is in the cache.

`explain` only reads: it changes no statistics, records no use of an entry, and runs no compiler.
From its facts, `causes` in `miss_causes` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kcache.admin.miss_causes import (
    Explanation,
    Facts,
    Near,
    SetFacts,
    Slot,
    any_good,
    aside,
    causes,
    set_aside,
)
from kcache.admin.request_diff import Cause, contrast
from kcache.backend import EntryInfo, NoBackend
from kcache.errors import BackendError, CorruptEntryError
from kcache.nvrtc.inventory import DEFAULT_NAMES, KERNEL, OTHER, Item, Opened, describe, look_into
from kcache.nvrtc.metadata import RequestSummary

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import Difference, StoredHeaderSet
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.search import HeaderSearch

__all__ = ["Cause", "Explanation", "Near", "aside", "explain", "set_aside"]


def explain(
    engine: CacheEngine | None,
    request: Request,
    *,
    set_aside: Iterable[tuple[str, str]] = (),
    unusable: str = "",
    compare: bool = True,
    digests: FileDigests | None = None,
    checked: str = "",
) -> Explanation:
    """Return why a request would be compiled now; changes nothing, and compiles nothing.

    Args:
        engine: of the cache; None if there is none.
        request: made in the working directory of the compile.
        set_aside: (`disabled` or `recache`, a clause) if a setting bypasses the cache.
        unusable: why there is no engine, unless nothing was cached yet.
        compare: look for the entry that differs least, which requires reading all of them.
        digests: of files, as far as they are known.
        checked: key of the kernel, if the headers are not checked again.
    """
    clauses = tuple(set_aside)
    about = RequestSummary.of(request)
    facts = Facts(about, Slot(request.key), request.self_contained, clauses)
    facts = facts._replace(uncacheable=request.uncacheable() or "", absent=engine is None)
    if engine is None:
        return causes(facts._replace(unusable=unusable))
    try:
        gathering = _Gathering(engine, request, digests)
        if checked:
            facts = facts._replace(own=Slot(checked), self_contained=True)
        facts = gathering.complete(facts, compare=compare)
        if isinstance(engine.backend, NoBackend) and not facts.own.kind:
            facts = facts._replace(unusable=engine.backend.reason)
        return causes(facts)
    except (BackendError, OSError) as error:
        return causes(facts._replace(unusable=str(error)))


class _Gathering:
    """Collects the facts about one request."""

    def __init__(self, engine: CacheEngine, request: Request, digests: FileDigests | None) -> None:
        from kcache.nvrtc.files import FileDigests

        self._engine = engine
        self._request = request
        self._digests = FileDigests() if digests is None else digests

    def complete(self, facts: Facts, *, compare: bool) -> Facts:
        """Return all facts that are needed to find the causes."""
        opened = self._in_memory(facts.own.key)
        if facts.self_contained and facts.own.key == self._request.key and opened is None:
            named = self._request.named_key
            if named and self._stored(facts.own.key) is None and self._open(named) is not None:
                facts = facts._replace(own=Slot(named))
        sets = () if facts.self_contained else tuple(self._sets(opened))
        if opened is None or not (facts.self_contained or any_good(sets)):
            # Another process may have stored a kernel for the headers as they are now.
            opened = self._stored(facts.own.key)
            sets = () if facts.self_contained else tuple(self._sets(opened))
        own = _slot(facts.own.key, opened)
        keys = (own.key, *(each.kernel.key for each in sets))
        events = self._engine.journal.events()
        told = tuple(e for e in events if not e.key or any(map(e.concerns, keys)))
        facts = facts._replace(own=own, sets=sets, events=told)
        if own.kind:
            kernels = (each.kernel for each in sorted(sets, key=lambda s: len(s.differences)))
            near = next((Near(k.key, k.about) for k in kernels if k.about is not None), None)
            return facts._replace(near=near)
        near = self._nearest(facts.about) if compare else None
        return facts._replace(near=near, compared=compare)

    def _open(self, key: str) -> Opened | None:
        return self._in_memory(key) or self._stored(key)

    def _in_memory(self, key: str) -> Opened | None:
        """Return the facts from this process's memory, which is checked first."""
        entry = self._engine.memory.peek(key)
        if entry is None:
            return None
        return Opened(describe(Item(key, 0, 0.0, OTHER), entry.metadata), entry)

    def _stored(self, key: str) -> Opened | None:
        return look_into(self._engine.backend, EntryInfo(key, 0, 0), self._engine.producer)

    def _sets(self, opened: Opened | None) -> Iterator[SetFacts]:
        """Yield the header sets of the manifest, if there is a sound one."""
        from kcache.nvrtc.manifest import Manifest

        if opened is None or opened.entry is None:
            return
        request = self._request
        try:
            header_sets = Manifest.from_entry(opened.entry).header_sets
            for header_set in header_sets:
                found = header_set.differences(request.search, self._digests, request.location)
                differences = tuple(self._told(header_set, each) for each in found)
                kernel_key = header_set.result_key(request.key)
                kernel = _slot(kernel_key, self._open(kernel_key))
                elsewhere = not header_set.good_at(request.location)
                yield SetFacts(differences, kernel, elsewhere)
        except CorruptEntryError:  # intact, but without a manifest: the same as empty
            return

    def _told(self, header_set: StoredHeaderSet, found: Difference) -> tuple[str, str, str]:
        instead = None
        if found.kind == "appeared":
            instead = _shadowed(header_set, found.path, self._request.search)
        return found.kind, found.path, instead or ""

    def _nearest(self, about: RequestSummary) -> Near | None:
        """Return the latest kernel whose request differs least; None if all differ much.

        It reads every entry.
        """
        best: tuple[int, float] | None = None
        near: Near | None = None
        backend, producer = self._engine.backend, self._engine.producer
        for info in backend.scan():
            opened = look_into(backend, info, producer)
            if opened is None or opened.entry is None or opened.item.kind != KERNEL:
                continue
            other = RequestSummary.read(opened.entry.metadata, info.key)
            if _alike(other, about, opened.item.names, self._request.kernels()):
                rank = (len(contrast(other, about)), -(other.created or 0.0))
                if best is None or rank < best:
                    best, near = rank, Near(info.key, other)
        return near


def _slot(key: str, opened: Opened | None) -> Slot:
    if opened is None:
        return Slot(key)
    item, entry = opened
    problem = item.problem or ("" if entry is not None else "unknown")
    if entry is None or item.kind != KERNEL:
        return Slot(key, item.kind, problem)
    return Slot(key, item.kind, problem, RequestSummary.read(entry.metadata, key))


def _alike(
    other: RequestSummary, about: RequestSummary, there: Sequence[str], asked: Sequence[str]
) -> bool:
    """Tell whether two requests have the same source, which may have been edited or renamed.

    A default name that every source has says nothing. Then they have a kernel of the same name.
    """
    if other.source_hash is not None and other.source_hash == about.source_hash:
        return True
    if other.source_name != about.source_name:
        return False
    if about.source_name not in DEFAULT_NAMES:
        return True
    mangled = tuple(f"_Z{len(name)}{name}" for name in asked)
    return any(name in asked or name.startswith(mangled) for name in there)


def _shadowed(header_set: StoredHeaderSet, path: str, search: HeaderSearch) -> str | None:
    """Return the header of the set that a file at the absent `path` would hide."""
    from kcache.nvrtc.search import RootedPath

    sections = header_set.sections()
    absent = (RootedPath(root, name) for root, names in sections.absent for name in names)
    sought = [each.path for each in absent if search.has(each) and search.path(each) == path]
    read = [RootedPath(root, name) for root, names in sections.files for name in names]
    hidden = [each for each in read if each.path in sought]
    if not hidden:  # if the compiler looked beside the including file, the name is the longer one
        hidden = [p for p in read if any(name.endswith(f"/{p.path}") for name in sought)]
    return search.path(hidden[0]) if hidden else None
