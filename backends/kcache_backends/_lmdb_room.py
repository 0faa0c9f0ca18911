"""LMDB room: makes room if neither the database nor its disk has a free page."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import lmdb

from kcache.errors import FullError
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_environment import HARDLY, Environment
from kcache_backends._lmdb_errors import is_full

__all__ = ["free_some", "require_room"]

#: The stored bytes are divided by this; so many of them go...
_SHARE = 10
#: ... if there are at least this many entries. With fewer, one removed entry frees enough for the
#: next.
_LEAST = 64
#: The size of the first step, and the factor by which each step is larger than the one before. If
#: each of n entries has a page of its own, their removal takes up to 3n pages, and leaves n more
#: than before.
_FIRST, _GROWTH = 1, 1.3
#: A disk is no longer full once it has this many bytes free beside a tenth of the file.
ENOUGH = 1 << 20
#: The largest number of steps; 40 of them remove 100,000 entries.
_STEPS = 100


def free_some(environment: Environment) -> None:
    """Remove the coldest entries, a few at first, since LMDB copies what it changes.

    Removing a tenth at once would need hundreds of free pages. Each step leaves a few more.

    Raises:
        BackendError, lmdb.Error, OSError: the database can't be written.
    """
    goal, freed, step = None, 0, float(_FIRST)
    for _ in range(_STEPS):
        try:
            with environment.writing(HARDLY) as txn:
                size, entries = records.sums(txn) or (0, 0)
                if goal is None:
                    goal = size // _SHARE
                    if entries >= _LEAST:
                        environment.full_at = size - goal
                if entries < _LEAST or freed >= goal:
                    return
                gone = _remove_coldest(txn, int(step))
            with environment.writing(HARDLY) as txn:
                # The freed pages are usable after one more transaction.
                records.add_to_sums(txn, 0, 0)
        except (lmdb.Error, OSError) as error:
            if not is_full(error, environment.root) or step < _FIRST + 1:
                raise
            step /= 2
        else:
            freed += gone
            step = step * _GROWTH + 1


def require_room(environment: Environment, size: int) -> None:
    """Refuse to use the last free pages of a disk that was full; an eviction needs them.

    Args:
        environment: the database.
        size: the sum over all entries with the next one.

    Raises:
        FullError: there would be no more than those.
    """
    if size > environment.full_at > 0 and sys.platform != "win32":
        with suppress(OSError):
            disk = os.statvfs(environment.root)
            if disk.f_bavail * disk.f_frsize > environment.file_size() // _SHARE + ENOUGH:
                environment.full_at = 0  # other processes have made room
                return
        raise FullError(
            f"write {environment.root}: the disk is full, and the rest is reserved for evictions"
        )


def _remove_coldest(txn: lmdb.Transaction[bytes], count: int) -> int:
    freed = 0
    for _, raw, _, size in records.cold_rows(txn, b"", count):
        records.remove_info(txn, raw)
        txn.delete(b"v" + raw)
        records.add_to_sums(txn, -size, -1)
        freed += size
    return freed
