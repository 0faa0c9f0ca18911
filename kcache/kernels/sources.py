"""Sources: finds kernels in layers and remotes, which offer entries that nobody has checked."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kcache.entry import Entry, decode
from kcache.errors import CorruptEntryError
from kcache.kernels.find import VIEW_FACTOR, log_hit
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.find import Finder
    from kcache.nvrtc.request import Request
    from kcache.readonly.directory_tier import Tier

#: A kernel, and the header set that holds here; None if there are no headers, or they are unknown.
Found: TypeAlias = "tuple[CompiledKernel, StoredHeaderSet | None]"


class SourceKernels:
    """Finds kernels in a source. They stay in memory, and in the cache if their member says so.

    An entry of a source is checked like every entry, and headers are compared here, so a source can
    only offer kernels.

    Threads: safe to share. Fork: as the source.

    Args:
        finder: of the local cache.
        source: is asked.
        count: the count of the hits in it.
    """

    def __init__(self, finder: Finder, source: Tier, count: str) -> None:
        self._finder = finder
        self._source = source
        self._count = count

    def find(
        self, request: Request, started: float, here: Manifest | None, *, again: bool = False
    ) -> Found | None:
        """Return the kernel of a request, counted as a hit, or None.

        `here` is the manifest of the local cache. With `again`, damaged entries are not counted,
        because they were a moment ago.

        Raises:
            Exception: whatever the source raises.
        """
        if request.self_contained:
            return self._find_under(request, request.key, started, again=again)
        for manifest, keep in self._manifests(request.key, again=again):
            header_set = manifest.matching(request, self._finder.headers.digests)
            if header_set is None:
                continue
            key, paths = header_set.result_key(request.key), header_set.dependencies(request)
            found = self._find_under(request, key, started, paths, header_set, again=again)
            if found is not None:
                header_set.remember(request)
                both = _merged(here, manifest, header_set)
                both.checked[request.location] = header_set
                entry = both.to_entry()
                entry.view = both
                self._keep(request.key, entry, VIEW_FACTOR * entry.size, keep=keep)
                return found
        return None

    def close(self) -> None:
        """Close the source. Idempotent."""
        self._source.close()

    def _find_under(
        self,
        request: Request,
        key: str,
        started: float,
        dependencies: tuple[str, ...] = (),
        header_set: StoredHeaderSet | None = None,
        *,
        again: bool,
    ) -> Found | None:
        """Return the kernel under a key, counted as a hit, or None; raises as `find`."""
        finder = self._finder
        engine = finder.engine
        for entry, keep in self._entries(key, again=again):
            kernel = finder.kernel_in(request, entry, key, dependencies, again=again)
            if kernel is None:
                continue
            self._keep(key, entry, entry.size, keep=keep)
            saved = finder.counts.saved(key, kernel.compile_seconds)
            engine.counters.hit(saved, time.perf_counter() - started, False)
            engine.counters.add(self._count)
            if log.debugging():
                log_hit(entry, self._count.removesuffix("_hits"))
            return kernel, header_set
        return None

    def _manifests(self, key: str, *, again: bool) -> Iterator[tuple[Manifest, bool]]:
        for entry, keep in self._entries(key, again=again):
            try:
                manifest = Manifest.from_entry(entry)
            except CorruptEntryError as error:
                self._refuse(key, error, again=again)
            else:  # another machine's notes about its own files say nothing about files here
                sets = [StoredHeaderSet(header_set.raw) for header_set in manifest.header_sets]
                yield Manifest(sets), keep

    def _entries(self, key: str, *, again: bool) -> Iterator[tuple[Entry, bool]]:
        engine = self._finder.engine
        refuse = partial(self._refuse, again=again)
        for _, entry, keep in sound_entries(self._source, (key,), engine.producer, refuse):
            yield entry, keep

    def _keep(self, key: str, entry: Entry, size: int, *, keep: bool) -> None:
        """Keep an entry in the cache, or only in memory."""
        engine = self._finder.engine
        if not (keep and engine.put(key, entry)):
            engine.memory.put(key, entry, size)

    def _refuse(self, key: str, error: CorruptEntryError, *, again: bool) -> None:
        if not again:
            self._finder.engine.refuse(key, error)


def sound_entries(
    source: Tier,
    keys: Sequence[str],
    producer: str,
    refuse: Callable[[str, CorruptEntryError], object],
) -> Iterator[tuple[str, Entry, bool]]:
    """Yield the sound entries that a source offers under some keys, and whether to keep each.

    `refuse` is called for the others.

    Raises:
        Exception: whatever the source raises.
    """
    for key, envelope, keep, problem in source.offers(*keys):
        try:
            if problem is not None:
                raise problem
            entry = decode(envelope, key, producer=producer.encode())
        except CorruptEntryError as error:
            refuse(key, error)
        else:
            yield key, entry, keep


def _merged(here: Manifest | None, theirs: Manifest, holding: StoredHeaderSet) -> Manifest:
    """Return the header sets of both manifests, the one that holds first."""
    known = [] if here is None else list(here.header_sets)
    present = {header_set.identity for header_set in known}
    others = [v for v in theirs.header_sets if v.identity not in present and v is not holding]
    both = Manifest([*known, *others])
    both.add(holding)
    return both
