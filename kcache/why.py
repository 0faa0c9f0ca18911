"""Why: the reasons for which a request would be compiled, or that it is in the cache.

`explain` looks and changes nothing: no statistics, no use of an entry, no compiler. `causes`
decides, from what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kcache import journal
from kcache.about import About
from kcache.age import local_time
from kcache.backend import EntryInfo
from kcache.catalogue import DAMAGED, KERNEL, OTHER, Item, Opened, describe, look_into
from kcache.contrast import Cause, contrast, include_paths
from kcache.errors import BackendError, CorruptEntryError

if TYPE_CHECKING:
    from kcache.engine import CacheEngine
    from kcache.journal import Event
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import Difference, Variant
    from kcache.nvrtc.request import Request

__all__ = ["Cause", "Explanation", "Facts", "Near", "SetFacts", "Slot", "causes", "explain"]

#: Clauses of one kind that a sentence holds.
_TOLD = 2

_EVENTS = {
    journal.EVICTED: "it was evicted to stay under the cap",
    journal.TRIMMED: "it was evicted by a trim",
    journal.DELETED: "it was deleted",
    journal.CLEARED: "the cache was cleared",
    journal.MOVED: "the entries were moved to another backend",
    journal.REFUSED: "it was found damaged, or of another version, and not used",
    journal.REJECTED: "it was compiled, and not stored: there is no room for it",
    journal.UNCACHEABLE: "it was compiled, and must not be cached",
}
_DIFFERENCES = {
    "changed": ("header_changed", "the header {} changed"),
    "gone": ("header_gone", "the header {} is gone"),
    "appeared": ("header_appeared", "{} is there now, and was looked for in vain"),
    "vanished": ("header_vanished", "{} is gone, which a __has_include had found"),
    "added": ("header_appeared", "{} is new where a computed #include can lead"),
    "identity": ("header_identity", "two headers of equal content became one file, or two"),
    "root": ("include_path", "the include directories are others"),
}


class Slot(NamedTuple):
    """What is under a key.

    Attributes:
        key: 64 hexadecimal digits.
        kind: as in `kcache.catalogue`; empty if there is nothing.
        problem: why it is not served, empty if it is.
        about: what it says of its request, if it is a kernel's.
    """

    key: str
    kind: str = ""
    problem: str = ""
    about: About | None = None


class SetFacts(NamedTuple):
    """One header set of the request: what is not as it says, and the kernel that it leads to.

    Attributes:
        differences: kind and path of each, and the header that a new file hides, if any.
        kernel: the slot of the kernel.
        paths: whether the kernel is good for the same directories only.
    """

    differences: tuple[tuple[str, str, str], ...]
    kernel: Slot
    paths: bool = False


class Near(NamedTuple):
    """An entry that answers a request much like this one."""

    key: str
    about: About


class Facts(NamedTuple):
    """What was found out of a request and its cache.

    Attributes:
        about: the request.
        own: the slot of the request's key.
        self_contained: whether that slot holds the kernel, and no header can matter.
        set_aside: settings for which the cache is not looked into, as a clause each.
        uncacheable: why the outcome must not be cached, if the request tells.
        absent: whether there is no cache yet.
        unusable: why the cache can't be used, or empty.
        sets: the header sets that the request has had.
        events: what the journal says of these keys, and of all, oldest first.
        near: the entry that differs least.
        compared: whether such an entry was looked for.
    """

    about: About
    own: Slot
    self_contained: bool = True
    set_aside: tuple[tuple[str, str], ...] = ()
    uncacheable: str = ""
    absent: bool = False
    unusable: str = ""
    sets: tuple[SetFacts, ...] = ()
    events: tuple[Event, ...] = ()
    near: Near | None = None
    compared: bool = True


class Explanation(NamedTuple):
    """Why a request would be compiled, or that it would not.

    Attributes:
        hit: whether it would be answered from the cache.
        causes: why not, the first ones the surest; empty for a hit.
        key: the key of the request.
        near: the entry that the request was compared with, if there is one that is much like it.
    """

    hit: bool
    causes: tuple[Cause, ...]
    key: str
    near: Near | None = None

    @property
    def clauses(self) -> str:
        """The causes in one line; of many of a kind the first, and how many more."""
        told: list[str] = []
        for _, group in groupby(self.causes, key=lambda cause: cause.kind):
            alike = [cause.what for cause in group]
            if len(alike) > _TOLD:
                alike = [f"{alike[0]} (and {len(alike) - 1} more like it)"]
            told += alike
        return "; ".join(told)


# -- deciding --------------------------------------------------------------------------------------


def causes(facts: Facts) -> Explanation:
    """Return why a request is compiled, from what was found."""
    found = [Cause(kind, what) for kind, what in facts.set_aside]
    if facts.uncacheable:
        found.append(Cause("uncacheable", f"it must not be cached: {facts.uncacheable}"))
    elif facts.unusable:
        found.append(Cause("unusable", f"the cache can't be used: {facts.unusable}"))
    elif facts.absent:
        found.append(Cause("no_cache", "there is no cache yet"))
    else:
        found += _missing(facts)
    near = facts.near if found and not facts.uncacheable else None
    return Explanation(not found, tuple(found), facts.about.request or facts.own.key, near)


def _missing(facts: Facts) -> list[Cause]:
    """Return why a cache that is looked into does not have the request; nothing if it has it."""
    if facts.own.problem:
        return [_problem(facts.own)]
    if not facts.own.kind:
        return _nothing_there(facts)
    if facts.self_contained:
        return []
    good = _any_good(facts.sets)
    return _changed(facts) if good is None else _kernel_missing(facts, good)


def _problem(slot: Slot) -> Cause:
    kinds = {DAMAGED: "damaged", OTHER: "incompatible"}
    noun = "entry is " + {DAMAGED: "damaged", OTHER: "of another version or program"}.get(
        slot.kind, "there, and can't be read"
    )
    return Cause(kinds.get(slot.kind, "unreadable"), f"its {noun} ({slot.problem})")


def _nothing_there(facts: Facts) -> list[Cause]:
    own = _last(facts.events, facts.own.key)
    everything = _last(facts.events, "")
    if own is not None:
        return [_event(_decisive(facts.events, own, everything))]
    if not facts.compared:
        return [Cause("never", "nothing is cached under its key")]
    if facts.near is None:
        if everything is None:
            return [_never(facts.about)]
        return [_event(everything, f"nothing is cached for {facts.about.source_name}, and ")]
    differences = contrast(facts.near.about, facts.about)
    if differences:
        return differences
    if facts.near.about.source_hash is None:
        what = "what is cached under its name is of an older kcache, and does not tell its source"
        return [Cause("unknown", what)]
    if facts.near.about.request != facts.about.request:
        return [_written_differently(facts.near.about, facts.about)]
    return [_lost(facts.near)]


def _decisive(events: Sequence[Event], own: Event, everything: Event | None) -> Event:
    """Return which event explains the miss: after one of all entries nothing earlier does.

    The entry may have come back in between, which nothing tells. What can't be stored at all is
    another matter: it would not be there in any case.
    """
    if everything is None or own.what in (journal.REJECTED, journal.UNCACHEABLE):
        return own
    return max(own, everything, key=lambda event: [each is event for each in events].index(True))


def _never(about: About) -> Cause:
    what = f"as far as is remembered, nothing was ever cached here for {about.source_name}"
    return Cause("never", what)


def _written_differently(old: About, new: About) -> Cause:
    """Return that options of equal meaning are other words, which the key does not see through."""
    what = "the same options are written in another way"
    return Cause("option", what, " ".join(old.flags), " ".join(new.flags))


def _lost(near: Near) -> Cause:
    when = f", cached {_when(near.about.created)}," if near.about.created is not None else ""
    what = f"an equal request's entry{when} is there, and the list of its headers is not"
    return Cause("lost", what, at=near.about.created)


def _kernel_missing(facts: Facts, found: SetFacts) -> list[Cause]:
    """Return why the kernel is not used that the present headers lead to; nothing if it is."""
    if found.kernel.problem:
        return [_problem(found.kernel)]
    if found.kernel.kind:
        return []
    event = _last(facts.events, found.kernel.key)
    if event is not None:
        return [_event(event)]
    if found.paths:
        what = "its output names the directories of its headers, and it was compiled for others"
        return [Cause("directory", what)]
    return [Cause("lost", "the headers are as they were, and the kernel is no longer there")]


def _any_good(sets: Iterable[SetFacts]) -> SetFacts | None:
    """Return the header set that is as it says, or None."""
    return next((each for each in sets if not each.differences), None)


def _changed(facts: Facts) -> list[Cause]:
    """Return what is not as the header set says that differs least."""
    if not facts.sets:
        return [Cause("lost", "the list of its headers is empty")]
    nearest = min(facts.sets, key=lambda each: len(each.differences))
    found = [_difference(*each) for each in nearest.differences]
    old = nearest.kernel.about
    if old is not None:
        found += include_paths(old, facts.about)
    # Perhaps it was compiled since, and there is a reason why that helped nobody.
    last = _last(facts.events, facts.own.key)
    if last is not None and last.what in (journal.REJECTED, journal.UNCACHEABLE):
        since = 0.0 if old is None or old.created is None else old.created
        if last.at > since:
            found.append(_event(last))
    return found


def _difference(kind: str, path: str, instead: str) -> Cause:
    name, text = _DIFFERENCES[kind]
    what = text.format(path)
    if instead:
        what = f"{path} is new, and is found before {instead}"
    return Cause(name, what, before=instead, path=path)


def _last(events: Iterable[Event], key: str) -> Event | None:
    """Return the last event of a key, or, for an empty one, of all entries."""
    found = None
    for event in events:
        if event.concerns(key) if key else not event.key:
            found = event
    return found


def _event(event: Event, before: str = "") -> Cause:
    detail = f" ({event.detail})" if event.detail else ""
    what = f"{before}{_EVENTS[event.what]}{detail} {_when(event.at)}"
    return Cause(event.what, what, at=event.at)


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    return f"{local_time(seconds):on %Y-%m-%d at %H:%M:%S}"


# -- finding out -----------------------------------------------------------------------------------


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
        engine: of the cache; None where there is none.
        request: made in the working directory that it would be compiled in.
        set_aside: (`disabled` or `recache`, a clause) where a setting says not to look.
        unusable: why there is no engine, if that is more than that nothing was cached yet.
        compare: look for the entry that differs least, which takes reading all of them.
        digests: of files, as far as they are known.
        checked: key of the kernel, where the headers are not looked at again.
    """
    aside = tuple(set_aside)
    about = About.of(request)
    facts = Facts(about, Slot(request.key), request.self_contained, aside)
    facts = facts._replace(uncacheable=request.uncacheable() or "", absent=engine is None)
    if engine is None:
        return causes(facts._replace(unusable=unusable))
    try:
        gathering = _Gathering(engine, request, digests)
        if checked:
            facts = facts._replace(own=Slot(checked), self_contained=True)
        return causes(gathering.complete(facts, compare=compare))
    except (BackendError, OSError) as error:
        return causes(facts._replace(unusable=str(error)))


class _Gathering:
    """Finds out what there is to know of one request."""

    def __init__(self, engine: CacheEngine, request: Request, digests: FileDigests | None) -> None:
        from kcache.nvrtc.files import FileDigests

        self._engine = engine
        self._request = request
        self._digests = FileDigests() if digests is None else digests

    def complete(self, facts: Facts, *, compare: bool) -> Facts:
        """Return the facts with all that is needed to tell the causes."""
        opened = self._in_memory(facts.own.key)
        sets = () if facts.self_contained else tuple(self._sets(opened))
        if opened is None or not (facts.self_contained or _any_good(sets)):
            # Another process may have stored what the headers say now.
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
        """Return what this process has in memory, which is looked at first."""
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
            variants = Manifest.from_entry(opened.entry).variants
            for variant in variants:
                found = variant.differences(request.search, self._digests, request.location)
                differences = tuple(self._told(variant, each) for each in found)
                key = variant.result_key(request.key, request.search)
                kernel = _slot(key, self._open(key))
                yield SetFacts(differences, kernel, variant.sections().paths)
        except CorruptEntryError:  # intact, and no manifest: as good as empty
            return

    def _told(self, variant: Variant, found: Difference) -> tuple[str, str, str]:
        instead = None
        if found.kind == "appeared":
            instead = variant.shadowed(found.path, self._request.search)
        return found.kind, found.path, instead or ""

    def _nearest(self, about: About) -> Near | None:
        """Return the kernel whose request differs least, the latest of those; None if all do much.

        Reads every entry.
        """
        best: tuple[int, float] | None = None
        near: Near | None = None
        backend, producer = self._engine.backend, self._engine.producer
        for info in backend.scan():
            opened = look_into(backend, info, producer)
            if opened is None or opened.entry is None or opened.item.kind != KERNEL:
                continue
            other = About.read(opened.entry.metadata, info.key)
            if _alike(other, about):
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
    return Slot(key, item.kind, problem, About.read(entry.metadata, key))


def _alike(other: About, about: About) -> bool:
    """Tell whether two requests are about one source, which may have been edited or renamed."""
    from kcache.nvrtc.request import DEFAULT_NAME

    if other.source_hash is not None and other.source_hash == about.source_hash:
        return True
    if other.source_name != about.source_name:
        return False
    # A name that everybody's source has says nothing by itself.
    return about.source_name != DEFAULT_NAME or other.names == about.names
