"""Examine: finds out what is really in a shard of the file backend, and what is wrong there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

from kcache.backend import is_key
from kcache_backends._coldest import Used
from kcache_backends._files import is_temporary, listing, names_in
from kcache_backends._shards import ShardCount, ShardCounters

#: Without file locks, a temporary file counts as an orphan when it is this old, in seconds.
ORPHAN_AGE = 3600.0

Changing = Callable[[], AbstractContextManager[tuple[ShardCount | None, Callable[[], object]]]]


def examine(
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
    """Tell whether nobody writes a temporary file: the shard is locked, or the file is old."""
    if is_temporary(name) is None:
        return False
    return counters.locks_work or time.time() - status.st_mtime > ORPHAN_AGE


def glance(folder: str, count: int) -> list[Used]:
    """Return (mtime, key) of `count` entries of a shard, chosen at random."""
    import random  # its import takes a fresh process 3 ms, and few need it

    names = [name for name in names_in(folder) if is_key(name)]
    found: list[Used] = []
    for name in random.sample(names, min(count, len(names))):
        with suppress(OSError):
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)
            found.append((status.st_mtime_ns, name))
    return found


def check_shard(directory: str, changing: Changing, *, repair: bool) -> Iterator[str]:
    """Yield what is wrong with the shard in `directory`.

    `changing` locks it. It yields the record, None if that is damaged, and a function that counts
    the shard again and removes orphans. The traces of a killed process are no fault: a record that
    is marked and too high, and a temporary file. The shard's next writer mends both.
    """
    size = entries = strays = orphans = 0
    with changing() as (count, recount):
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
        if repair:
            recount()
    shard = os.path.basename(directory)
    if count is None:
        yield f"shard {shard}: its counter is damaged"
    elif count.under_way and count.bytes >= size and count.entries >= entries:
        orphans = 0
    elif (count.bytes, count.entries) != (size, entries):
        yield (
            f"shard {shard}: its counter says {count.bytes} bytes in {count.entries} entries, "
            f"there are {size} in {entries}"
        )
    if orphans:
        yield f"shard {shard}: {orphans} temporary files that nobody is writing"
    if strays:
        yield f"shard {shard}: {strays} files that are no entries of it"
