"""Miss causes: decides why a request is compiled, from the facts about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kcache.admin.request_diff import Cause, contrast, include_paths
from kcache.nvrtc.inventory import DAMAGED, OTHER
from kcache.nvrtc.metadata import RequestSummary
from kcache.util.units import local_time

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.journal import Event

__all__ = [
    "Explanation",
    "Facts",
    "Near",
    "SetFacts",
    "Slot",
    "any_good",
    "aside",
    "causes",
    "set_aside",
]

#: How many clauses of one kind a sentence holds.
_TOLD = 2

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
_DIFFERENCES = {
    "changed": ("header_changed", "the header {} changed"),
    "gone": ("header_gone", "the header {} is gone"),
    "appeared": ("header_appeared", "{} is there now, and was not when the compiler looked for it"),
    "vanished": ("header_vanished", "{} is gone, and was there when the compiler looked for it"),
    "identity": ("header_identity", "two headers of equal content became one file, or two"),
    "answer": ("header_changed", "the compiler would find something else about {}"),
    "variable": ("variable", "the environment variable {} has another value"),
    "called": ("source_name", "the source was called {}, and its output may show that"),
    "root": ("include_path", "the include directories are others"),
}


def set_aside(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that bypass the cache, with a clause about each."""
    for setting, name in ((config.disable, "disable"), (config.recache, "recache")):
        if setting.value:
            given = name if setting.source == "argument" else setting.source
            yield aside(name, f"{given} is set")


def aside(setting: str, given: str) -> tuple[str, str]:
    """Return the cause of a miss by `disable` or `recache`, with a clause about it."""
    if setting == "disable":
        return "disabled", f"{given}: the cache is neither read nor written"
    return "recache", f"{given}: everything is compiled, and replaces what is there"


class Slot(NamedTuple):
    """The entry under a key.

    Attributes:
        key: 64 hexadecimal digits.
        kind: as in `kcache.nvrtc.inventory`; empty if there is nothing.
        problem: why it is not served, empty if it is.
        about: its summary of the request, if it is a kernel.
    """

    key: str
    kind: str = ""
    problem: str = ""
    about: RequestSummary | None = None


class SetFacts(NamedTuple):
    """One header set of the request: its differences from now, and the kernel that it leads to.

    Attributes:
        differences: kind and path of each, and the header that a new file hides, if any.
        kernel: the slot of the kernel.
        elsewhere: whether the kernel was compiled in another directory, and no proof has shown that
            it is good for this one, too.
    """

    differences: tuple[tuple[str, str, str], ...]
    kernel: Slot
    elsewhere: bool = False


class Near(NamedTuple):
    """An entry that answers a request much like this one."""

    key: str
    about: RequestSummary


class Facts(NamedTuple):
    """The facts about a request and its cache.

    Attributes:
        about: the request.
        own: the slot of the request's key.
        self_contained: whether that slot holds the kernel, and no header can matter.
        set_aside: settings that bypass the cache, as a clause each.
        uncacheable: why the outcome must not be cached, if the request tells.
        absent: whether there is no cache yet.
        unusable: why the cache can't be used, or empty.
        sets: the header sets that the request has had.
        events: the journal's events of these keys, and of all entries, oldest first.
        near: the entry that differs least.
        compared: whether such an entry was looked for.
    """

    about: RequestSummary
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


def causes(facts: Facts) -> Explanation:
    """Return why a request is compiled, from the facts."""
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
    key, own = facts.about.request or facts.own.key, facts.own.key
    if facts.self_contained:
        return Explanation(not found, tuple(found), key, near, own)
    good = any_good(facts.sets)
    kernel = "" if good is None or good.elsewhere else good.kernel.key
    return Explanation(not found, tuple(found), key, near, kernel, own)


def _missing(facts: Facts) -> list[Cause]:
    """Return why a cache that is read does not have the request; nothing if it has it."""
    if facts.own.problem:
        return [_problem(facts.own)]
    if not facts.own.kind:
        return _nothing_there(facts)
    if facts.self_contained:
        return []
    good = any_good(facts.sets)
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
            return [Cause("never", "this cache remembers no such kernel")]
        return [_event(everything, f"nothing is cached for {facts.about.source_name}, and ")]
    differences = contrast(facts.near.about, facts.about)
    if differences:
        return differences
    old, new = facts.near.about, facts.about
    if old.source_name != new.source_name:
        return [_named(old, new)]
    if facts.near.about.source_hash is None:
        what = "what is cached under its name is of an older kcache, and does not tell its source"
        return [Cause("unknown", what)]
    if facts.near.about.request != facts.about.request:
        return [_written_differently(facts.near.about, facts.about)]
    return [_lost(facts.near)]


def _decisive(events: Sequence[Event], own: Event, everything: Event | None) -> Event:
    """Return the event that explains the miss; none from before an event of all entries does.

    The entry may have come back in between, which the journal does not tell. An entry that can't be
    stored at all would be missing in any case.
    """
    if everything is None or own.what in ("rejected", "uncacheable"):
        return own
    return max(own, everything, key=lambda event: [each is event for each in events].index(True))


def _written_differently(old: RequestSummary, new: RequestSummary) -> Cause:
    """Return that options have the same meaning in other words, which give another key."""
    what = "the same options are written in another way"
    return Cause("option", what, " ".join(old.flags), " ".join(new.flags))


def _named(old: RequestSummary, new: RequestSummary) -> Cause:
    """Return that only the name differs, which the outcome shows or may depend on."""
    now, was = new.source_name, old.source_name
    what = f"the source is called {now}, was compiled as {was}, and its output may show that"
    return Cause("source_name", what, was, now)


def _lost(near: Near) -> Cause:
    when = f", cached {_when(near.about.created)}," if near.about.created is not None else ""
    what = f"an equal request's entry{when} is there, and the list of its headers is not"
    return Cause("lost", what, at=near.about.created)


def _kernel_missing(facts: Facts, found: SetFacts) -> list[Cause]:
    """Return why the kernel for the present headers is not used; nothing if it is."""
    if found.elsewhere:
        what = "its output may name the directories of its headers, and was compiled for others"
        return [Cause("directory", what)]
    if found.kernel.problem:
        return [_problem(found.kernel)]
    if found.kernel.kind:
        return []
    event = _last(facts.events, found.kernel.key)
    if event is not None:
        return [_event(event)]
    return [Cause("lost", "the headers are as they were, and the kernel is no longer there")]


def any_good(sets: Iterable[SetFacts]) -> SetFacts | None:
    """Return the header set that holds, or None."""
    good = [each for each in sets if not each.differences]
    return min(good, key=lambda each: each.elsewhere, default=None)


def _changed(facts: Facts) -> list[Cause]:
    """Return the differences of the header set that differs least."""
    if not facts.sets:
        return [Cause("lost", "the list of its headers is empty")]
    nearest = min(facts.sets, key=lambda each: len(each.differences))
    found = [_difference(*each) for each in nearest.differences]
    old = nearest.kernel.about
    if old is not None:
        found += include_paths(old, facts.about)
    # Perhaps it was compiled since then, but the cache could not store the result.
    last = _last(facts.events, facts.own.key)
    if last is not None and last.what in ("rejected", "uncacheable"):
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
    """Return the last event of a key; for an empty key, of all entries."""
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
