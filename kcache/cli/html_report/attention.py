"""Attention: finds the counts that need attention, and says what to do about each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kcache.cli.html_report.snapshot import Snapshot
from kcache.nvrtc.inventory import DAMAGED, UNREADABLE
from kcache.util.units import format_size

__all__ = ["NOTE", "WARNING", "Remark", "remarks"]

#: A `WARNING` is about a problem; a `NOTE` may be about a normal state.
WARNING, NOTE = "warning", "note"


class Remark(NamedTuple):
    """One count that is not zero.

    Attributes:
        level: `WARNING` or `NOTE`.
        number: how often.
        what: what was counted, in a few words.
        do: what it means and what to do about it.
    """

    level: str
    number: int
    what: str
    do: str


def remarks(snapshot: Snapshot) -> list[Remark]:
    """Return the counts that need attention, warnings first."""
    found = [remark for remark in (*_entries(snapshot), *_counts(snapshot)) if remark.number]
    return sorted(found, key=lambda remark: remark.level != WARNING)


def _entries(snapshot: Snapshot) -> Iterator[Remark]:
    for kind, what, do in (
        (
            DAMAGED,
            "Damaged entries in the cache",
            "They are never used. Run kcache verify --repair; if more appear, check the disk.",
        ),
        (
            UNREADABLE,
            "Entries that can't be read",
            "Run kcache verify, which names them; check permissions and the disk.",
        ),
    ):
        share = snapshot.kinds.get(kind)
        yield Remark(WARNING, 0 if share is None else share.entries, what, do)


def _counts(snapshot: Snapshot) -> Iterator[Remark]:
    stats = snapshot.stats
    yield Remark(
        WARNING,
        stats.corrupt,
        "Damaged entries met",
        "Each was compiled again and replaced. Run kcache verify; if more appear, check the disk.",
    )
    yield Remark(
        WARNING,
        stats.errors,
        "Operations that failed",
        "The cache went on without them. Run a program with KCACHE_LOG=info to see why, and "
        "kcache doctor to see what is wrong.",
    )
    yield Remark(
        WARNING,
        stats.unlocked,
        "Requests without a lock",
        "Processes could compile the same kernel twice. Set KCACHE_DIR to a file system that has "
        "locks: a local one.",
    )
    yield Remark(
        WARNING,
        stats.rejected,
        "Entries not cached for lack of room",
        "Each alone exceeds the cap, or nothing could be evicted for it. Raise KCACHE_MAX_SIZE.",
    )
    yield Remark(
        NOTE,
        stats.evictions,
        "Entries evicted",
        f"{format_size(stats.bytes_evicted)}, to stay under the cap. If kernels that are still in "
        "use get compiled again, raise KCACHE_MAX_SIZE.",
    )
    yield Remark(
        NOTE,
        stats.uncacheable,
        "Compiles that must not be cached",
        "For example, the source or a header uses __TIME__. KCACHE_LOG=debug names the "
        "kernel and the reason.",
    )
    yield Remark(
        NOTE,
        stats.wait_timeouts,
        "Waits that timed out",
        "Another process was compiling the kernel for longer than KCACHE_WAIT, or was stopped; "
        "they compiled it themselves.",
    )
    yield Remark(
        NOTE,
        stats.stale,
        "Entries that no longer applied",
        "A header had changed, or another version of kcache had written them: nothing to do.",
    )
