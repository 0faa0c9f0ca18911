"""Survey: lists the shards of the `file` backend: all entries, the coldest, and what is wrong."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from stat import S_ISREG

from kcache.backend import EntryInfo, is_key
from kcache_backends._shards import ShardCount, ShardCounters, is_directory, is_temporary

#: Up to this many entries, `coldest` sorts all of them.
SAMPLE = 2048
#: If there are more, it sorts this many at a time...
PART = 256
#: ... and yields this share of them before it sorts the next part. A smaller share is closer to
#: exact LRU. A larger share needs fewer calls of stat per eviction (4 with this share).
SHARE = 0.25

#: A time of use that is more than this many nanoseconds in the future comes from a wrong clock. Its
#: entry is treated as the least recently used one.
FUTURE = 86_400_000_000_000

#: Without file locks, a temporary file counts as an orphan when it is this old, in seconds.
ORPHAN_AGE = 3600.0

#: (name, status) of a file
File = tuple[str, os.stat_result]


def listed(folder: str) -> tuple[list[EntryInfo], list[File]]:
    """Return the entries in the folder of a shard, and the other regular files there.

    A file that is deleted at the same time may be missing. Symbolic links are left out.
    """
    entries: list[EntryInfo] = []
    others: list[File] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder) if is_directory(folder) else ():
            with suppress(FileNotFoundError):
                status = os.stat(f"{folder}/{name}", follow_symlinks=False)
                if not S_ISREG(status.st_mode):
                    continue
                if is_key(name) and folder.endswith(name[:2]):
                    entries.append(EntryInfo(name, status.st_size, status.st_mtime_ns))
                else:
                    others.append((name, status))
    return entries, others


def coldest(
    counts: Callable[[], list[ShardCount | None]],
    entries_of: Callable[[int, ShardCount | None, bool], list[EntryInfo] | None],
    now: Callable[[], int],
) -> Iterator[EntryInfo]:
    """Yield every entry once, least recently used first.

    The order is exact if there are at most `SAMPLE` entries. Otherwise, this function lists the
    fullest shards until it has `PART` entries, yields the coldest ones, and continues with the next
    shards. If another process is changing a shard, and may be stopped, the entries of this shard
    come last.

    Args:
        counts: returns the records of all shards.
        entries_of: takes a shard, its record, and whether to wait if another process is changing
            the shard. Returns the entries, or None if it would have to wait but must not.
        now: returns the time in nanoseconds since the epoch.
    """
    offered: set[str] = set()
    wait, is_left = False, True
    while is_left:  # each round lists every shard
        before, is_left = len(offered), False
        shards = [(count, n) for n, count in enumerate(counts()) if count is None or count.entries]
        shards.sort(key=lambda shard: shard[0].entries if shard[0] else SAMPLE)
        is_small = sum(count.entries for count, _ in shards if count) - before <= SAMPLE
        # An entry that a wrong clock dated into the future would stay forever, so it comes first.
        future = now() + FUTURE
        while shards:
            part: list[EntryInfo] = []
            while shards and (is_small or len(part) < PART):
                count, shard = shards.pop()
                found = entries_of(shard, count, wait)
                is_left |= found is None
                part += [info for info in found or () if info.key not in offered]
            part.sort(key=lambda info: (info.used_ns < future, info.used_ns))
            most = len(part) if is_small else math.ceil(len(part) * SHARE)
            is_left |= most < len(part)
            for info in part[:most]:
                offered.add(info.key)
                yield info
        wait = len(offered) == before


# -- one shard -----------------------------------------------------------------------------------


def recount(
    folder: str, shard: int, counters: ShardCounters, *, most: int
) -> tuple[ShardCount, list[EntryInfo]]:
    """Correct the record of a locked shard; return the record and the entries.

    Temporary files without a writer are removed, and files of more than `most` bytes, which no put
    can have written.
    """
    found, others = listed(folder)
    entries = [info for info in found if info.size <= most]
    size = sum(info.size for info in entries)
    remove = [info.key for info in found if info.size > most]
    for name, status in others:
        if is_temporary(name):
            # On a file system without locks, another process may still be writing a young file.
            if counters.locks_work or time.time() - status.st_mtime > ORPHAN_AGE:
                remove.append(name)
            else:
                size += status.st_size
    for name in remove:
        with suppress(OSError):
            os.unlink(f"{folder}/{name}")
    count = ShardCount(size, len(entries))
    counters.write(shard, count)
    return count, entries


def problems(folder: str, count: ShardCount | None, *, repair: bool = False) -> Iterator[str]:
    """Yield a sentence for each fault of a shard, whose record is `count`, or None if damaged.

    With `repair`, files whose names are keys of other shards are removed. If a killed process has
    left the record marked and too high, neither this nor its temporary files are reported, because
    the shard's next writer repairs both.
    """
    entries, others = listed(folder)
    strays = [name for name, _ in others if not is_temporary(name)]
    orphans = len(others) - len(strays)
    for name in filter(is_key, strays if repair else ()):
        with suppress(OSError):
            os.unlink(f"{folder}/{name}")
    found = sum(info.size for info in entries), len(entries)
    shard = os.path.basename(folder)
    if count is None:
        yield f"shard {shard}: its counter is damaged"
    elif count.under_way and count.bytes >= found[0] and count.entries >= found[1]:
        orphans = 0
    elif count[:2] != found:
        yield (
            f"shard {shard}: its counter has (bytes, entries) = ({count.bytes}, {count.entries}), "
            f"but its files have {found}"
        )
    if orphans:
        yield f"shard {shard}: {_files(orphans, 'temporary ')} without a writer"
    if strays:
        yield f"shard {shard}: {_files(len(strays))} whose names are not keys of this shard"


def _files(count: int, kind: str = "") -> str:
    return f"{count} {kind}file{'s' if count != 1 else ''}"
