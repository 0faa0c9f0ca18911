"""Sections: makes the parts of the page from a `Snapshot` alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import tzinfo

from kcache.cli.html_report import charts
from kcache.cli.html_report.attention import WARNING, remarks
from kcache.cli.html_report.markup import Node, document, el
from kcache.cli.html_report.over_time import over_time
from kcache.cli.html_report.pieces import NONE, TIMES, card, cut, date, number_of, table
from kcache.cli.html_report.snapshot import Share, Snapshot
from kcache.cli.keys import SHORT
from kcache.engine.stats import Stats
from kcache.nvrtc.inventory import DAMAGED, KERNEL, MANIFEST, UNREADABLE, Item
from kcache.util.units import format_age, format_size, format_time

__all__ = ["page"]

#: How many colours the meter has for its parts.
_COLOURS = 5


def page(snapshot: Snapshot, zone: tzinfo | None = None) -> str:
    """Return the whole page; `zone` is that of its times, by default this machine's."""
    parts = [_head(snapshot, zone), _figures(snapshot), _room(snapshot)]
    parts += over_time(snapshot, zone)
    attention = _attention(snapshot)
    if snapshot.entries:
        parts.append(_archs(snapshot, alone=attention is None))
    if attention is not None:
        parts.append(attention)
    if snapshot.entries:
        parts += [_kernels(snapshot), *_singles(snapshot)]
    return document("kcache report", el("main", *parts, _about(snapshot, zone)))


# -- the head --------------------------------------------------------------------------------------


def _head(snapshot: Snapshot, zone: tzinfo | None) -> Node:
    stats = snapshot.stats
    if stats.hits:
        big, small = format_time(stats.saved_seconds), "of compiling saved"
        said = (
            f"{stats.hits:,} of {number_of(stats.requests, 'request')} came from the cache, in "
            f"{format_time(stats.avg_cache_time_ms / 1e3)} on average."
        )
    else:
        big, small = "Nothing saved yet", ""
        said = (
            "No request has been answered from the cache so far. The next run of the same kernels "
            "will be."
            if snapshot.entries
            else "The cache is empty. Once programs have used it, this page tells what it saved."
        )
    rate = f"{int(100 * stats.hit_rate)}%"  # not rounded up to 100 while there are misses
    return el(
        "header",
        el(
            "div",
            el("p", f"kcache report · {date(snapshot.written, zone)}", class_="eyebrow"),
            el("h1", el("strong", big), f" {small}" if small else None),
            el("p", said, class_="lead"),
        ),
        el(
            "figure",
            charts.ring(f"Hit rate: {rate}", stats.hit_rate, rate if stats.requests else NONE),
            el("figcaption", "hit rate"),
        ),
    )


def _figures(snapshot: Snapshot) -> Node:
    stats = snapshot.stats
    kernels = snapshot.kinds.get(KERNEL, Share(KERNEL)).entries
    elsewhere = stats.layer_hits + stats.remote_hits
    disk = stats.hits - stats.memory_hits - elsewhere
    tiles = [
        ("Requests", f"{stats.requests:,}", f"{number_of(stats.misses, 'miss', 'misses')}"),
        ("Hits", f"{stats.hits:,}", f"{stats.memory_hits:,} from memory, {disk:,} from disk"),
        ("A hit takes", _mean(stats.hits, stats.avg_cache_time_ms), _speed(stats)),
        (
            "A compile takes",
            _mean(stats.compiles, stats.avg_compile_time_ms),
            f"{number_of(stats.compiles, 'compile')}, {format_time(stats.compile_seconds)} in all"
            if stats.compiles
            else "none so far",
        ),
        ("Shared compiles", f"{stats.coalesced:,}", "requests waited instead of compiling, too"),
        ("Kernels", f"{kernels:,}", f"{number_of(snapshot.entries, 'entry', 'entries')} in all"),
    ]
    if elsewhere or stats.remote_misses or stats.remote_errors:
        told = f"{stats.remote_hits:,} from remotes, {stats.layer_hits:,} from layers"
        missed = f"remotes: {number_of(stats.remote_misses, 'miss', 'misses')}"
        tiles.append(("Hits elsewhere", f"{elsewhere:,}", f"{told}; {missed}"))
    rows = (
        el("div", el("dt", name), el("dd", value, class_="value"), el("dd", more, class_="more"))
        for name, value, more in tiles
    )
    return el("dl", *rows, class_="tiles")


def _mean(count: int, milliseconds: float) -> str:
    return format_time(milliseconds / 1e3) if count else NONE


def _speed(stats: Stats) -> str:
    """Return how much faster a hit is than a compile."""
    if not stats.avg_cache_time_ms or not stats.avg_compile_time_ms:
        return "on average" if stats.hits else "none so far"
    return (
        f"{stats.avg_compile_time_ms / stats.avg_cache_time_ms:,.0f}{TIMES} faster than compiling"
    )


# -- the contents ----------------------------------------------------------------------------------


def _room(snapshot: Snapshot) -> Node:
    share = snapshot.size / snapshot.max_size
    said = f"{format_size(snapshot.size)} of {format_size(snapshot.max_size)} ({share:.1%})"
    parts = _parts(snapshot)
    shown = [(f"m{n}", f"{name}: {format_size(size)}", size) for n, (name, size, _) in parts]
    bar = charts.meter(
        f"Size against cap: {said}. " + "; ".join(title for _, title, _ in shown),
        [(colour, title, size / snapshot.max_size) for colour, title, size in shown],
    )
    legend = (
        el(
            "li",
            charts.swatch(f"m{n}"),
            el("span", name, class_="name"),
            el(
                "span",
                f"{format_size(size)} · {number_of(count, 'entry', 'entries')}",
                class_="more",
            ),
        )
        for n, (name, size, count) in parts
    )
    free = max(0, snapshot.max_size - snapshot.size)
    rest = el(
        "li",
        charts.swatch("rest"),
        el("span", "Free", class_="name"),
        el("span", format_size(free), class_="more"),
    )
    key = el("p", said, class_="key")
    return card("Size against cap", key, bar, el("ul", *legend, rest), wide=True)


def _parts(snapshot: Snapshot) -> list[tuple[int, tuple[str, int, int]]]:
    """Return colour and (name, bytes, entries) of each part: targets first, then the others."""
    archs = [(_arch(share), share.size, share.entries) for share in snapshot.archs]
    first, rest = archs[: _COLOURS - 1], archs[_COLOURS - 1 :]
    if rest:
        first.append(("Other targets", sum(r[1] for r in rest), sum(r[2] for r in rest)))
    parts = list(enumerate(first, 1))
    manifests = snapshot.kinds.get(MANIFEST)
    if manifests is not None:
        parts.append((_COLOURS + 1, ("Manifests", manifests.size, manifests.entries)))
    others = [share for kind, share in snapshot.kinds.items() if kind not in (KERNEL, MANIFEST)]
    if others:
        size, count = sum(s.size for s in others), sum(s.entries for s in others)
        parts.append((_COLOURS + 2, ("Not in use", size, count)))
    return parts


def _archs(snapshot: Snapshot, *, alone: bool) -> Node:
    caption = "Kernels by the architecture that they were compiled for, largest share first"
    head = "By architecture", "Architecture"
    return _shares(head, caption, snapshot.archs, "a1", wide=alone)


def _kernels(snapshot: Snapshot) -> Node:
    caption = "Kernels by source and name expressions, largest share first"
    head = "By kernel", "Kernel"
    return _shares(head, caption, snapshot.kernels, "a2", wide=True)


def _singles(snapshot: Snapshot) -> tuple[Node, Node]:
    cold = "The entries that were used longest ago, and are evicted first"
    return (
        _single("Largest entries", "The entries that take most room", snapshot, snapshot.largest),
        _single("Coldest entries", cold, snapshot, snapshot.coldest),
    )


def _shares(
    titles: tuple[str, str], caption: str, shares: Sequence[Share], colour: str, *, wide: bool
) -> Node:
    """Return a table of shares with a bar each; `titles` are those of the card and the names."""
    title, what = titles
    if not shares:
        return card(title, el("p", "There are no kernels.", class_="empty"), wide=wide)
    largest = max(share.size for share in shares)
    rows = [
        (
            el("th", *_name(share), _track(share, largest, colour), scope="row"),
            el("td", f"{share.entries:,}"),
            el("td", format_size(share.size)),
            el("td", format_time(share.compile_seconds), class_="spare"),
        )
        for share in shares
    ]
    head = ((what, ""), ("Entries", ""), ("Size", ""), ("Compiled in", "spare"))
    return card(title, table(caption, head, rows), wide=wide)


def _track(share: Share, largest: int, colour: str) -> Node:
    return charts.track("m5" if share.merged else colour, share.size / max(1, largest))


def _name(share: Share) -> tuple[Node, ...]:
    if share.merged:
        return (el("span", f"{share.merged:,} others", class_="name"),)
    names = el("code", cut(", ".join(share.names))) if share.names else None
    label = el("span", cut(share.name) or "unknown", class_="name")
    return (label,) if names is None else (label, names)


def _arch(share: Share) -> str:
    return "Other targets" if share.merged else cut(share.name) or "unknown"


def _single(title: str, caption: str, snapshot: Snapshot, items: Iterable[Item]) -> Node:
    """Return a table of single entries."""
    rows = [
        (
            el(
                "th",
                el("span", _item_name(item), class_="name"),
                el("span", f" {cut(item.arch)}", class_="arch") if item.arch else None,
                el("code", cut(", ".join(item.names))) if item.names else None,
                el("code", item.key[:SHORT]),
                scope="row",
            ),
            el("td", format_size(item.size)),
            el("td", f"{format_age(snapshot.written - item.used)} ago"),
        )
        for item in items
    ]
    if not rows:
        return card(title, el("p", "There are no entries.", class_="empty"))
    head = (("Kernel, target and key", ""), ("Size", ""), ("Last use", ""))
    return card(title, table(caption, head, rows))


def _item_name(item: Item) -> str:
    if item.kind in (DAMAGED, UNREADABLE):
        return f"({item.kind})"
    return cut(item.source_name) or f"({item.kind})"


# -- attention, and the end ------------------------------------------------------------------------


def _attention(snapshot: Snapshot) -> Node | None:
    """Return the card of counts that need attention; None if there are none."""
    found = remarks(snapshot)
    if not found:
        return None
    wide = not snapshot.entries  # no other section stands beside it
    rows = (
        el(
            "li",
            el("span", "Warning" if remark.level == WARNING else "Note", class_="badge"),
            el("b", f"{remark.what}: {remark.number:,}"),
            el("p", remark.do),
            class_=remark.level,
        )
        for remark in found
    )
    return card("Worth a look", el("ul", *rows, class_="remarks"), wide=wide)


def _about(snapshot: Snapshot, zone: tzinfo | None) -> Node:
    facts = {**snapshot.about, "Written": date(snapshot.written, zone)}
    rows = (el("div", el("dt", name), el("dd", value)) for name, value in facts.items())
    note = "Counts are of all processes; a running one adds its own every few seconds."
    return el("footer", el("dl", *rows), el("p", note))
