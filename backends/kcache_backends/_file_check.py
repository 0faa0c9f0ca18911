"""File check: finds what is wrong with a directory of the file backend, and mends it if asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

from kcache.backend import is_key
from kcache_backends._files import is_temporary, listing
from kcache_backends._shards import ShardCount, read_counts

__all__ = ["Changing", "check_shard", "recorded_in"]

Changing = Callable[[], AbstractContextManager[tuple[ShardCount | None, Callable[[], object]]]]


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


def recorded_in(path: str) -> list[ShardCount | None]:
    """Return the records of the counters' file; none if there is no such file."""
    return read_counts(path) if os.path.exists(path) else []
