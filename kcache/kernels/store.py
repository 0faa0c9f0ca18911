"""Store: puts a compiled kernel into the cache, and then its manifest.

If two processes store header sets of one request at the same time, one of the two may be lost, and
is compiled again. The kernel is stored before the manifest, so that no manifest names a kernel that
was never stored, whenever the process is killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.entry import Entry
from kcache.errors import ConfigError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.kernels.find import Holding
from kcache.nvrtc import is_called
from kcache.nvrtc.manifest import BAD, GOOD, Manifest
from kcache.nvrtc.metadata import metadata_of
from kcache.nvrtc.relocation import shows_name

if TYPE_CHECKING:
    from kcache.kernels.find import Finder
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.frontend import Verdict
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["store", "store_verdict"]


def store(
    finder: Finder,
    request: Request,
    compiled: Compiled,
    header_set: StoredHeaderSet | None,
    *,
    manifest: Manifest | None,
) -> tuple[CompiledKernel, Entry, bool]:
    """Store a compiled kernel; return it, its entry, and whether it will be found.

    Args:
        finder: of the cache.
        request: the request.
        compiled: what the compiler returned.
        header_set: the header set of its compile, None for a self-contained request.
        manifest: of the request, as it is stored.
    """
    holding = None if header_set is None else Holding.of(header_set, request)
    key = request.key
    if holding is not None:
        key = holding.key
    elif request.named_key and (shows_name(request, compiled) or _is_taken(finder, request)):
        key = request.named_key
    kernel = CompiledKernel.of(compiled, key, () if holding is None else holding.dependencies)
    finder.counts.saved(key, 0.0)
    engine, headers = finder.engine, finder.headers
    entry, stored = kernel.to_entry(metadata_of(request, key)), False
    rejected = engine.stats().rejected
    try:
        # The kernel comes first: a manifest must not promise a kernel that is not there.
        stored = engine.put(key, entry)
        if stored and holding is not None:
            header_set = holding.header_set
            header_set.remember(request.search, request.location)
            merged = Manifest(list(manifest.header_sets) if manifest is not None else [])
            merged.add(header_set)
            stored = headers.put(request, merged, holding)
    except (ConfigError, OSError) as error:
        engine.report("store", error)
    if not stored and key != request.key and engine.stats().rejected > rejected:
        engine.note("rejected", request.key)  # the next request asks for it by this key
    return kernel, entry, stored


def _is_taken(finder: Finder, request: Request) -> bool:
    """Tell whether the key has a kernel that is not good for this name of the source."""
    entry, _ = finder.engine.fetch(request.key, again=True)
    return entry is not None and not is_called(entry, request.source_name)


def store_verdict(
    finder: Finder,
    request: Request,
    header_set: StoredHeaderSet | None,
    manifest: Manifest | None,
    verdict: Verdict,
) -> bool:
    """Note whether a kernel is good in other places, and tell it.

    That is in the manifest, or in the kernel itself if there are no headers. The caller holds the
    key's lock.
    """
    good = verdict.good
    try:
        if header_set is None:
            entry, _ = finder.engine.fetch(request.key, again=True)
            if entry is not None:  # else it was evicted a moment ago
                about = {**entry.metadata, "proof": GOOD if good else BAD}
                finder.engine.put(request.key, Entry(entry.payload, about))
            return good
        merged = Manifest(list(manifest.header_sets) if manifest is not None else [])
        judged = merged.judge(header_set, verdict.header_set)
        good = judged is verdict.header_set
        judged.remember(request.search, request.location)
        finder.headers.put(request, merged)
    except (ConfigError, OSError) as error:
        finder.engine.report("store", error)
    return good
