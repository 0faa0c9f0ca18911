"""ColdSample: finds the least recently used of many files, by looking at a few of them.

It lists the shards that hold most until it has `SAMPLE` entries. It sorts them by mtime, offers the
coldest quarter, and then takes the next sample. The next iteration begins with the entries that are
left over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from kcache.backend import EntryInfo

#: How many entries a sample has...
SAMPLE = 2048
#: ... and the share of them that is offered before the next sample is taken, unless the sample
#: holds all entries. A smaller share is closer to exact LRU. A larger share needs fewer stats per
#: eviction (4 here).
SHARE = 0.25

#: A use that is further in the future than this, in nanoseconds, is a clock's error. It does not
#: count as a use.
FUTURE = 86_400_000_000_000

#: (mtime in nanoseconds, key)
Used = tuple[int, str]


class ColdSample:
    """Offers the entries of a directory of shards, coldest first.

    Exact where there are at most `SAMPLE` entries. Threads: each iteration has entries of its own.

    Args:
        path: where the file of a key is.
        fullest: (entries, shard) of every shard, most entries first.
        look: the entries of a shard, all of them or a sample.
        is_locked: whether somebody changes a shard now.
        now: the time, in nanoseconds.
    """

    def __init__(
        self,
        path: Callable[[str], str],
        fullest: Callable[[], list[tuple[int, int]]],
        look: Callable[[int], list[Used]],
        is_locked: Callable[[int], bool],
        now: Callable[[], int],
    ) -> None:
        self._path = path
        self._fullest = fullest
        self._look = look
        self._is_locked = is_locked
        self._now = now
        #: Entries that the last iteration did not offer, the coldest last, and how many of them it
        #: may still offer.
        self._pool: list[Used] = []
        self._left = 0
        #: Entries that it offered and that nobody deleted. They are still the coldest.
        self._offered: dict[str, int] = {}

    def deleted(self, key: str) -> None:
        """Do not offer `key` again."""
        self._offered.pop(key, None)

    def entries(self) -> Iterator[EntryInfo]:
        """Yield every entry, each at most once.

        The mtime is read again before an entry is offered. If any process has used the entry since
        the sample was taken, it is offered after all others. So are the entries of a shard that
        somebody changes, who may have been stopped.
        """
        offered: set[str] = set()
        pool, left = self._take()
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
        finally:
            self._pool, self._left = pool, left

    def _info(self, key: str) -> EntryInfo | None:
        try:
            status = os.stat(self._path(key), follow_symlinks=False)
        except OSError:
            return None
        return EntryInfo(key, status.st_size, status.st_mtime_ns)

    def _take(self) -> tuple[list[Used], int]:
        """Take the entries that the last iteration left over; no two iterations share them."""
        pool, left = self._pool, self._left
        pool += sorted(((used, key) for key, used in self._offered.items()), reverse=True)
        left += len(self._offered)
        self._pool, self._left, self._offered = [], 0, {}
        return pool, left

    def _sample(self, visited: set[int], *, patient: bool) -> tuple[list[Used], int, bool]:
        """Return a sample of the fullest unvisited shards, coldest last, and how many to offer.

        A patient one passes by shards that somebody changes; the last value tells if there are any.
        """
        sample: list[Used] = []
        passed_by = False
        share = 1.0  # these are all entries: their order is exact, and all of them may go
        for entries, shard in self._fullest():
            if shard in visited or not entries:
                continue
            if sample and len(sample) + min(entries, SAMPLE) > SAMPLE:
                share = SHARE
                break
            visited.add(shard)
            if patient and self._is_locked(shard):
                passed_by = True
            else:
                sample += self._look(shard)
        # An entry that a wrong clock dated into the future would stay for ever. It goes first.
        future = self._now() + FUTURE
        sample.sort(key=lambda used: (used[0] < future, *used), reverse=True)
        return sample, max(1, int(len(sample) * share)), passed_by
