"""Page: fills the template `page.html` from a `Snapshot` alone."""

from __future__ import annotations

import base64
import hashlib
import heapq
from collections.abc import Iterable
from datetime import tzinfo
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kcache.admin.info import hit_sources
from kcache.cli.entries import SHORT
from kcache.cli.html_report.snapshot import Snapshot, lengths, parts, remarks, shares, spans
from kcache.engine.stats import Stats
from kcache.errors import ConfigError
from kcache.nvrtc.inventory import KERNEL, MANIFEST
from kcache.util.distribution import how_to_install
from kcache.util.units import counted, format_age, format_size, format_time, local_time, plain

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent
#: How many rows the tables of single entries, targets and kernels have.
_SINGLE, _ARCHS, _KERNELS = 10, 8, 12
#: A longer name is cut in the middle. So the page stays small, and both ends tell names apart.
_LONGEST = 120
#: A mean of nothing.
_NONE = ("\N{EN DASH}", "none so far")


def page(snapshot: Snapshot, zone: tzinfo | None = None) -> str:
    """Return the whole page; `zone` is that of its times, by default this machine's.

    No name that comes from a cache can become markup, and the page's own policy forbids it to load
    or run anything.

    Raises:
        ConfigError: Jinja2 is not installed.
    """
    template = _templates().get_template("page.html")
    from markupsafe import Markup  # comes with Jinja2

    style = "\n" + (_FOLDER / "style.css").read_text("utf-8")
    kernels = [item for item in snapshot.items if item.kind == KERNEL]
    single = [item for item in snapshot.items if item.kind != MANIFEST]
    unit, columns = spans(kernels, snapshot.written, zone)
    return template.render(
        snapshot=snapshot,
        stats=snapshot.stats,
        style=Markup(style),
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        tiles=_tiles(snapshot.stats, len(kernels), len(snapshot.items)),
        remarks=remarks(snapshot),
        parts=parts(snapshot.items),
        by_arch=shares(kernels, lambda item: (item.arch, ()), _ARCHS),
        by_kernel=shares(kernels, lambda item: (item.source_name, item.names), _KERNELS),
        unit=unit,
        spans=columns,
        largest=heapq.nlargest(_SINGLE, single, lambda item: item.size),
        coldest=heapq.nsmallest(_SINGLE, single, lambda item: item.used),
        now=local_time(snapshot.written, zone),
        short=SHORT,
    )


@cache
def _templates() -> jinja2.Environment:
    """Return the environment of the template: it escapes every text and unprintable character."""
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(f"the report needs Jinja2: {how_to_install('cli')}") from error
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    found.filters |= {
        "size": format_size,
        "time": format_time,
        "age": format_age,
        "counted": counted,
        "cut": _cut,
        "date": lambda moment: f"{moment.day} {moment:%B %Y, %H:%M %Z}",
        "number": "{:,}".format,
        "lengths": lengths,
    }
    return found


def _tiles(stats: Stats, kernels: int, entries: int) -> list[tuple[str, str, str]]:
    """Return name, value and more of each figure at the top."""
    hit, compiled = stats.avg_cache_time_ms / 1e3, stats.avg_compile_time_ms / 1e3
    faster = f"{compiled / hit:,.0f} times faster than compiling" if hit and compiled else ""
    ran = counted(stats.compiles, "compile")
    whole = (format_time(compiled), f"{ran}, {format_time(stats.compile_seconds)} in all")
    return [
        ("Requests", f"{stats.requests:,}", counted(stats.misses, "miss")),
        ("Hits", f"{stats.hits:,}", hit_sources(stats)),
        ("A hit takes", *((format_time(hit), faster) if stats.hits else _NONE)),
        ("A compile takes", *(whole if stats.compiles else _NONE)),
        ("Shared compiles", f"{stats.coalesced:,}", "requests that waited for another's compile"),
        ("Kernels", f"{kernels:,}", f"{counted(entries)} in all"),
    ]


def _printable(value: object) -> object:
    return plain(value) if type(value) is str else value  # not the markup of a macro


def _cut(text: str | Iterable[str]) -> str:
    """Return a name, or names with commas; what is long loses its middle."""
    whole = text if isinstance(text, str) else ", ".join(text)
    return (
        whole if len(whole) <= _LONGEST else f"{whole[: _LONGEST // 2]}…{whole[-_LONGEST // 2 :]}"
    )
