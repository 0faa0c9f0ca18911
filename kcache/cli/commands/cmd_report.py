"""`kcache stats` shows the counts of a cache, and `kcache report` writes an HTML page about it.

The template `report.html` makes the page from a `Snapshot` alone. Making a snapshot changes nothing
in the cache, and does not count as a use of an entry.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kcache._version import __version__
from kcache.admin.info import (
    cache_lines,
    count_kinds,
    exposition,
    hit_sources,
    meanings,
    remote_lines,
    stats_lines,
)
from kcache.backend import Usage
from kcache.cli.options import (
    directory_option,
    flag,
    json_option,
    named_directory,
    open_existing,
    output_option,
)
from kcache.cli.terminal import (
    SHORT,
    columns,
    notify,
    progress,
    show,
    wants_json,
    write_output,
    write_stdout,
)
from kcache.engine.stats import Stats, StatsFile
from kcache.errors import BackendError
from kcache.kernels.remotes import remote_status
from kcache.nvrtc import library
from kcache.nvrtc.entries import DAMAGED, KERNEL, MANIFEST, UNREADABLE, Item, items
from kcache.util.units import counted, format_age, format_size, format_time, local_time, plain

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent
#: How many rows the tables of single entries, of targets and of kernels have at most.
_SINGLE, _ARCHS, _KERNELS = 10, 8, 12
#: The value and the note that are shown for a mean that has no samples yet.
_NONE = ("\N{EN DASH}", "none so far")


@click.command(short_help="Show where the cache is, how full it is and what it has done.")
@json_option("object")
@flag("--prometheus", help="Print the counts in Prometheus' text format, for a textfile collector.")
@flag("--zero", help="Show the counts, then set them to zero.")
@directory_option
def stats(*, prometheus: bool, zero: bool, directory: str | None) -> None:
    """Show where the cache is, how full it is, and what all processes have done with it.

    The counts cover the time since the cache was created, or since they were last set to zero.
    Kernels and manifests are counted separately: a manifest leads from a source with includes to
    its kernels. If there are more than 2,000 entries, the numbers of kernels and manifests are
    estimated from 2,000 entries. `kcache info` is another name of this command.
    """
    if wants_json() and prometheus:
        raise click.UsageError("--json and --prometheus can't be combined.")
    with open_existing(directory, "stats --zero" if zero else "") as cache:
        files, config = cache.opened.directory, cache.config
        file = None if files is None else StatsFile(files.stats)
        totals = Stats() if file is None else file.total()
        path = cache.opened.path or named_directory(directory)
        remotes, backend = remote_status(config), config.backend.value
        if prometheus:
            usage = Usage(cache.size_bytes, cache.entry_count)
            about = {"version": __version__, "directory": path, "backend": backend}
            write_stdout(exposition(totals, usage, config.max_size.value, about, remotes).encode())
        else:
            kinds = count_kinds(cache.engine)
            record = {
                "directory": path,
                "backend": backend,
                "backend_source": config.backend.source,
                "entries": cache.entry_count,
                "kernels": kinds.kernels,
                "manifests": kinds.manifests,
                "others": kinds.others,
                "entries_read": kinds.read,
                "size_bytes": cache.size_bytes,
                "max_size_bytes": int(config.max_size.value),
                "max_size_source": config.max_size.source,
                **totals.to_dict(),
                "remotes": remotes,
            }
            lines = cache_lines(cache.engine, directory=path, backend=backend, kinds=kinds)
            lines += [*stats_lines(totals), *remote_lines(remotes)]
            show(lambda: columns(lines), record)
    if zero:
        if file is not None:
            file.zero()
        notify("the counts were set to zero")


# -- report ----------------------------------------------------------------------------------------


@click.command(short_help="Write an HTML page about the cache.")
@output_option(".", default="kcache-report.html", show_default=True)
@directory_option
def report(*, output: str, directory: str | None) -> None:
    """Write one HTML page about the cache.

    The page shows the saved compile time, hits and misses, the size and the cap, what fills the
    cache, when its kernels were compiled, and what needs attention. It is one small file that loads
    nothing and runs no scripts. It contains the names of your kernels and the directory of the
    cache, so consider who may see it.
    """
    found: list[Item] = []
    with open_existing(directory) as cache:
        files = cache.opened.directory
        if files is None:
            raise BackendError(f"there is no cache in {named_directory(directory)}")
        with progress("Reading entries", cache.entry_count) as advance:
            for item in items(cache.engine.backend):
                found.append(item)
                advance()
        compiler = library.find()
        about = {
            "Directory": str(cache.directory),
            "Backend": cache.config.backend.value,
            "kcache": __version__,
            "Compiler": "none found" if compiler is None else os.path.basename(compiler.path),
            "Python": platform.python_version(),
            "System": f"{platform.system()} {platform.machine()}",
        }
        cap, size, totals = cache.engine.max_size, cache.size_bytes, StatsFile(files.stats).total()
    snapshot = Snapshot(time.time(), about, cap, size, totals, tuple(found))
    data = page(snapshot).encode()
    write_output(data, output)
    if output != "-":
        what = f"report of {counted(len(snapshot.items))}"
        notify(f"{what} -> {output} ({format_size(len(data))})")


# -- the snapshot ----------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """The state of a cache at one moment.

    Attributes:
        written: the moment, in seconds since the epoch.
        about: maps names to texts: the directory, the backend and versions.
        max_size: the cap in bytes.
        size: the stored bytes, as the backend counts them.
        stats: the counts of all processes.
        items: all entries.
    """

    written: float
    about: Mapping[str, str]
    max_size: int
    size: int
    stats: Stats
    items: tuple[Item, ...]


# -- the page --------------------------------------------------------------------------------------


def page(snapshot: Snapshot, zone: tzinfo | None = None) -> str:
    """Return the whole page, with times in the time zone `zone`, by default this machine's.

    A name from the cache can't become markup, and the page has a Content-Security-Policy that
    forbids it to load or run anything.
    """
    template = _templates().get_template("report.html")
    from markupsafe import Markup  # noqa: PLC0415  comes with Jinja2

    style = "\n" + (_FOLDER / "report.css").read_text("utf-8")
    kernels = [item for item in snapshot.items if item.kind == KERNEL]
    single = [item for item in snapshot.items if item.kind != MANIFEST]
    unit, spans = _spans(kernels, snapshot.written, zone)
    now = local_time(snapshot.written, zone)
    return template.render(
        snapshot=snapshot,
        stats=snapshot.stats,
        style=Markup(style),
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        tiles=_tiles(snapshot.stats, len(kernels), len(snapshot.items)),
        remarks=_remarks(snapshot),
        parts=_parts(snapshot.items),
        by_arch=_shares(kernels, lambda item: (item.arch, ()), _ARCHS),
        by_kernel=_shares(kernels, lambda item: (item.source_name, item.names), _KERNELS),
        unit=unit,
        spans=spans,
        largest=heapq.nlargest(_SINGLE, single, lambda item: item.size),
        coldest=heapq.nsmallest(_SINGLE, single, lambda item: item.used),
        now=f"{now.day} {now:%B %Y, %H:%M %Z}",
        short=SHORT,
    )


def _templates() -> jinja2.Environment:
    """Return the environment of the template, which escapes markup and unprintable characters."""
    import jinja2  # noqa: PLC0415  may be missing

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    filters: dict[str, Any] = {
        "size": format_size,
        "time": format_time,
        "age": format_age,
        "counted": counted,
        "number": "{:,}".format,
        "lengths": _lengths,
    }
    found.filters.update(filters)
    return found


def _tiles(stats: Stats, kernels: int, entries: int) -> list[tuple[str, str, str]]:
    """Return the name, the value and the note of each figure at the top of the page."""
    hit, compiled = stats.avg_cache_time_ms / 1e3, stats.avg_compile_time_ms / 1e3
    faster = f"{compiled / hit:,.0f} times faster than compiling" if hit and compiled else ""
    ran = counted(stats.compiles, "compile")
    hits = (format_time(hit), faster) if stats.hits else _NONE
    whole = f"{ran}, {format_time(stats.compile_seconds)} in all"
    made = (format_time(compiled), whole) if stats.compiles else _NONE
    return [
        ("Requests", f"{stats.requests:,}", counted(stats.misses, "miss")),
        ("Hits", f"{stats.hits:,}", hit_sources(stats)),
        ("A hit takes", hits[0], hits[1]),
        ("A compile takes", made[0], made[1]),
        ("Shared compiles", f"{stats.coalesced:,}", "requests that waited for another compile"),
        ("Kernels", f"{kernels:,}", f"{counted(entries)} in all"),
    ]


def _printable(value: object) -> object:
    return plain(value) if type(value) is str else value  # a macro's `Markup` stays as it is


# -- what needs attention --------------------------------------------------------------------------

#: Maps kinds of entries to words for their counts. The docstring of `Stats` has such words for its
#: fields.
_WHAT = {DAMAGED: "Damaged entries in the cache", UNREADABLE: "Entries that can't be read"}
#: The keys of `_DO` whose counts may be normal. The other keys count problems.
_NOTES = ("evictions", "uncacheable", "wait_timeouts", "stale")
#: Maps kinds of entries and fields of `Stats` to what their counts mean, and what to do. Problems
#: come first.
_DO = {
    DAMAGED: "They are never used. Run kcache verify --repair. If more appear, check the disk.",
    UNREADABLE: "Run kcache verify to see which ones, and check permissions and the disk.",
    "corrupt": "Each was compiled again. Run kcache verify. If more appear, check the disk.",
    "errors": "No request failed because of them. kcache doctor and KCACHE_LOG=info show why.",
    "unlocked": "Processes could compile the same kernel twice. Set KCACHE_DIR to a local disk.",
    "rejected": "They exceed the cap, or nothing could be evicted for them. Raise KCACHE_MAX_SIZE.",
    "remote_errors": "Kernels were compiled instead. kcache stats shows the remote and the reason.",
    "evictions": "{evicted} in all. If too many are compiled again, raise KCACHE_MAX_SIZE.",
    "uncacheable": "The source uses __TIME__, for example. KCACHE_LOG=debug shows the reason.",
    "wait_timeouts": "The other process compiled for longer than KCACHE_WAIT, or was stopped.",
    "stale": "A header had changed, or another version of kcache wrote them. Nothing to do.",
}


def _remarks(snapshot: Snapshot) -> list[tuple[str, str, int, str]]:
    """Return the level, meaning, number and remedy of each count that needs attention.

    Warnings come first.
    """
    counts = Counter(item.kind for item in snapshot.items) + Counter(snapshot.stats._asdict())
    evicted = format_size(snapshot.stats.bytes_evicted)
    what = {name: re.split("[;(]", meaning)[0].rstrip(". ") for name, meaning in meanings().items()}
    what |= _WHAT
    return [
        ("Note" if n in _NOTES else "Warning", what[n], counts[n], _DO[n].format(evicted=evicted))
        for n in filter(counts.get, _DO)
    ]


# -- parts, and over time --------------------------------------------------------------------------

#: How many targets the bar of the whole cache shows one by one; the other targets are one part.
_TARGETS = 4
#: How many columns the chart has at most. A column is an hour if the oldest kernel is younger than
#: `_YOUNG` seconds, else a day.
_COLUMNS, _YOUNG = 90, 2 * 86400
#: The shortest length of a bar whose value is not 0, in percent: 4 pixels on a phone.
_VISIBLE = 1.3


class Share(NamedTuple):
    """Several entries, and their part of the cache.

    Attributes:
        name: the target, the source, or the day or hour of the compile; empty if unknown.
        names: the name expressions of a kernel.
        entries: how many entries there are.
        size: the stored bytes of all these entries.
        compile_seconds: how long the compiles of all these entries took.
        merged: how many smaller shares this one combines, or 0.
    """

    name: str
    names: tuple[str, ...]
    entries: int
    size: int
    compile_seconds: float
    merged: int = 0


def _shares(
    items: Iterable[Item], by: Callable[[Item], tuple[str, tuple[str, ...]]], most: int
) -> list[Share]:
    """Return the shares of items with equal names, largest first; the smallest ones are combined.

    Args:
        items: the entries.
        by: returns the name and the name expressions of an item.
        most: how many shares are not combined with others.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    ranked = sorted(groups, key=lambda names: (-sum(item.size for item in groups[names]), names))
    found = [_share(*names, groups[names]) for names in ranked[:most]]
    others = [item for names in ranked[most:] for item in groups[names]]
    rest = _share("", (), others)._replace(merged=len(ranked) - most)
    return [*found, rest] if others else found


def _parts(items: Sequence[Item]) -> list[Share]:
    """Return the shares that make up a cache: targets, manifests, and entries that are not used."""
    kernels = [item for item in items if item.kind == KERNEL]
    found = [
        share._replace(name="Other targets" if share.merged else share.name or "unknown")
        for share in _shares(kernels, lambda item: (item.arch, ()), _TARGETS)
    ]
    manifests = [item for item in items if item.kind == MANIFEST]
    others = [item for item in items if item.kind not in (KERNEL, MANIFEST)]
    rest = (("Manifests", manifests), ("Not in use", others))
    return [*found, *(_share(name, (), each) for name, each in rest if each)]


def _spans(items: Iterable[Item], now: float, zone: tzinfo | None) -> tuple[str, list[Share]]:
    """Return the unit `"day"` and a share for each day since the first compile.

    If the first compile was less than `_YOUNG` seconds ago, return `"hour"` and a share for each
    hour.

    Args:
        items: the kernels.
        now: the current time, in seconds since the epoch. Later compiles are left out.
        zone: the time zone in which days begin, by default this machine's.
    """
    made = [item for item in items if item.created is not None and item.created <= now]
    first = min((item.created or 0.0 for item in made), default=now)
    hourly = now - first < _YOUNG
    step = timedelta(hours=1) if hourly else timedelta(days=1)

    def start(seconds: float) -> datetime:
        moment = local_time(seconds, zone).replace(minute=0, second=0, microsecond=0, tzinfo=None)
        return moment if hourly else moment.replace(hour=0)

    groups: dict[datetime, list[Item]] = {}
    for item in made:
        groups.setdefault(start(item.created or 0.0), []).append(item)
    count = min(_COLUMNS, (start(now) - start(first)) // step + 1) if made else 0
    found: list[Share] = []
    for back in reversed(range(count)):
        moment = start(now) - back * step
        title = f"{moment:%A, %H:%M}" if hourly else f"{moment:%A}, {moment.day} {moment:%B %Y}"
        found.append(_share(title, (), groups.get(moment, [])))
    return "hour" if hourly else "day", found


def _lengths(values: Sequence[float], whole: float) -> list[float]:
    """Return the lengths of the parts of a bar, in percent of `whole`.

    The sum of the lengths is at most 100, and at least `_VISIBLE`, so that the bar can be seen. The
    parts keep their proportions.
    """
    total = sum(values)
    if not total:
        return [0.0 for _ in values]
    length = min(100.0, max(_VISIBLE, 100 * total / whole))
    return [length * value / total for value in values]


def _share(name: str, names: tuple[str, ...], items: Sequence[Item]) -> Share:
    seconds = sum(item.compile_seconds or 0.0 for item in items)
    return Share(name, names, len(items), sum(item.size for item in items), seconds)
