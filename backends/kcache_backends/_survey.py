"""Survey: what is in the shards of the file backend: all entries, the coldest, and what is wrong.

`ColdSample` finds the least recently used of many files by looking at a few of them. It lists the
shards that hold most until it has `SAMPLE` entries. It sorts them by mtime, offers the
coldest quarter, and then takes the next sample. The next iteration begins with the entries that are
left over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from kcache.backend import EntryInfo, is_key
from kcache_backends._shards import ShardCount, ShardCounters, is_temporary, listing, names_in

#: How many entries a sample has...
SAMPLE = 2048
#: ... and the share of them that is offered before the next sample is taken, unless the sample
#: holds all entries. A smaller share is closer to exact LRU. A larger share needs fewer stats per
#: eviction (4 here).
SHARE = 0.25

#: A use that is further in the future than this, in nanoseconds, is a clock's error. It does not
#: count as a use.
FUTURE = 86_400_000_000_000

#: Without file locks, a temporary file counts as an orphan when it is this old, in seconds.
ORPHAN_AGE = 3600.0

#: (mtime in nanoseconds, key)
Used = tuple[int, str]


class ColdSample:
    """Offers the entries of a directory of shards, coldest first.

    Exact where there are at most `SAMPLE` entries. Threads: each iteration has entries of its own.

    Args:
        root: the directory.
        counters: opens its counters.
        entries_of: the entries of a shard, all of them or a sample.
        now: the time, in nanoseconds.
    """

    def __init__(
        self,
        root: str,
        counters: Callable[[], ShardCounters],
        entries_of: Callable[[int], list[Used]],
        now: Callable[[], int],
    ) -> None:
        self._root = root
        self._counters = counters
        self._entries_of = entries_of
        self._now = now
        #: Entries that the last iteration did not offer, the coldest last, and how many of them it
        #: may still offer.
        self._pool: list[Used] = []
        self._left = 0
        #: Entries that were offered and not deleted since then.
        self._offered: dict[str, int] = {}

    def deleted(self, key: str) -> None:
        """Do not offer `key` again."""
        self._offered.pop(key, None)

    def entries(self) -> Iterator[EntryInfo]:
        """Yield every entry, each at most once.

        The mtime is read again before an entry is offered. If any process has used the entry since
        the sample was taken, it is offered after all others. So are the entries of a shard that
        is being changed, perhaps by a stopped process.
        """
        offered: set[str] = set()
        pool, left = self._pool, self._left
        self._pool, self._left = [], 0  # no two iterations share them
        patient = True
        try:
            while True:  # each round samples every shard
                offered_before = len(offered)
                visited: set[int] = set()
                held_back = False
                while True:
                    while pool and left > 0:
                        used, key = pool.pop()
                        info = None if key in offered else self._info(key)
                        if info is None:
                            continue
                        if patient and (info.used_ns != used or self._is_locked(int(key[:2], 16))):
                            held_back = True
                            continue
                        left -= 1
                        offered.add(key)
                        self._offered[key] = used
                        yield info
                    held_back |= bool(pool)
                    pool, left, passed_by = self._sample(visited, patient=patient)
                    held_back |= passed_by
                    if not pool:
                        break
                if not held_back:
                    self._offered = {}
                    return
                # All entries are in constant use, or being changed, so some of them have to go.
                patient = len(offered) > offered_before
        finally:  # those that were offered and are still there are the coldest
            back = [(used, key) for key, used in reversed(self._offered.items())]
            self._pool, self._left, self._offered = pool + back, left + len(back), {}

    def _is_locked(self, shard: int) -> bool:
        with self._counters() as counters:
            return counters.is_locked(shard)

    def _info(self, key: str) -> EntryInfo | None:
        try:
            status = os.stat(f"{self._root}/{key[:2]}/{key}", follow_symlinks=False)
        except OSError:
            return None
        return EntryInfo(key, status.st_size, status.st_mtime_ns)

    def _sample(self, visited: set[int], *, patient: bool) -> tuple[list[Used], int, bool]:
        """Return a sample of the fullest unvisited shards, coldest last, and how many to offer.

        A patient one skips shards that are being changed; the last value is whether it did.
        """
        sample: list[Used] = []
        passed_by = False
        share = 1.0  # these are all entries: their order is exact, and all of them may go
        with self._counters() as counters:
            fullest = counters.fullest()
        for entries, shard in fullest:
            if shard in visited or not entries:
                continue
            if sample and len(sample) + min(entries, SAMPLE) > SAMPLE:
                share = SHARE
                break
            visited.add(shard)
            if patient and self._is_locked(shard):
                passed_by = True
            else:
                sample += self._entries_of(shard)
        # An entry that a wrong clock dated into the future would stay forever. It goes first.
        future = self._now() + FUTURE
        sample.sort(key=lambda used: (used[0] < future, *used), reverse=True)
        return sample, max(1, int(len(sample) * share)), passed_by


# -- one shard -----------------------------------------------------------------------------------


def recount(
    folder: str, shard: int, counters: ShardCounters, *, most: int
) -> tuple[ShardCount, list[Used]]:
    """List a locked shard: correct its record and return it with (mtime, key) of each entry.

    It removes orphans, and files of more than `most` bytes, which no put can have written.
    """
    size = 0
    found: list[Used] = []
    for name, status in listing(folder):
        if is_key(name) and status.st_size <= most:
            size += status.st_size
            found.append((status.st_mtime_ns, name))
        elif is_key(name) or _is_orphan(name, status, counters):
            with suppress(OSError):
                os.unlink(f"{folder}/{name}")
        elif is_temporary(name):
            size += status.st_size
    old = counters.read(shard)
    generation = 0 if old is None else (old.generation | 1) + 1
    count = ShardCount(size, len(found), generation & ~1)
    counters.write(shard, count)
    return count, found


def _is_orphan(name: str, status: os.stat_result, counters: ShardCounters) -> bool:
    """Return whether a temporary file has no writer: the shard is locked, or the file is old."""
    if is_temporary(name) is None:
        return False
    return counters.locks_work or time.time() - status.st_mtime > ORPHAN_AGE


def random_entries(folder: str, count: int) -> list[Used]:
    """Return (mtime, key) of `count` entries of a shard, chosen at random."""
    import random  # noqa: PLC0415  1 ms

    names = [name for name in names_in(folder) if is_key(name)]
    found: list[Used] = []
    for name in random.sample(names, min(count, len(names))):
        with suppress(OSError):
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)
            found.append((status.st_mtime_ns, name))
    return found


def problems(directory: str, count: ShardCount | None, *, repair: bool = False) -> Iterator[str]:
    """Yield what is wrong with a shard. `count` is its record; None if the record is damaged.

    With repair, entries of other shards are removed. The traces of a killed process are not
    reported: a record that is marked as being changed and is too high, and temporary files. The
    shard's next writer mends both.
    """
    size = entries = strays = orphans = 0
    for name, status in listing(directory):
        if is_temporary(name):
            orphans += 1
        elif is_key(name) and name.startswith(os.path.basename(directory)):
            size += status.st_size
            entries += 1
        else:
            strays += 1
            if repair and is_key(name):
                with suppress(OSError):
                    os.unlink(os.path.join(directory, name))
    shard = os.path.basename(directory)
    if count is None:
        yield f"shard {shard}: its counter is damaged"
    elif count.under_way and count.bytes >= size and count.entries >= entries:
        orphans = 0
    elif (count.bytes, count.entries) != (size, entries):
        yield (
            f"shard {shard}: its counter has (bytes, entries) = ({count.bytes}, {count.entries}), "
            f"and the files ({size}, {entries})"
        )
    if orphans:
        yield f"shard {shard}: {_files(orphans, 'temporary ')} without a writer"
    if strays:
        yield f"shard {shard}: {_files(strays)} of other names than its entries"


def _files(count: int, kind: str = "") -> str:
    return f"{count} {kind}file{'s' if count != 1 else ''}"
