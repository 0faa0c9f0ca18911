"""Store: puts a compiled kernel into the cache, and then its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.engine.journal import REJECTED
from kcache.errors import ConfigError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.kernels.find import Checked
from kcache.nvrtc.manifest import Manifest
from kcache.nvrtc.metadata import metadata_of
from kcache.nvrtc.relocation import shows_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.entry import Entry
    from kcache.kernels.find import Finder
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["KernelWriter"]


class KernelWriter:
    """Stores kernels and the manifests that lead to them.

    Threads: safe to share. Processes: if two store header sets of one request at the same time, one
    of the two may be lost, and is compiled again. Crash: the kernel is stored before the manifest,
    so that no manifest names a kernel that was never stored.

    Args:
        finder: of the cache that is written to.
    """

    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    def store(
        self,
        request: Request,
        compiled: Compiled,
        header_set: StoredHeaderSet | None,
        upload: Callable[[str, Entry], object] | None = None,
    ) -> tuple[CompiledKernel, bool]:
        """Store a compiled kernel; return it, and whether it will be found.

        `header_set` is the header set of its compile, None for a self-contained request. `upload`
        is called with the kernel's key and entry, whether it can be stored here or not.
        """
        key = request.key
        dependencies: tuple[str, ...] = ()
        if header_set is not None:
            key = header_set.result_key(request.key)
            dependencies = header_set.dependencies(request.search, request.location)
        elif request.named_key and shows_name(request, compiled):
            key = request.named_key
        kernel = CompiledKernel.of(compiled, key, dependencies)
        self._finder.counts.saved(key, 0.0)
        engine = self._finder.engine
        stored = False
        rejected = engine.stats().rejected
        try:
            # The kernel comes first: a manifest must not promise a kernel that is not there.
            entry = kernel.to_entry(metadata_of(request, key))
            stored = engine.put(key, entry)
            if upload is not None:
                upload(key, entry)
            if stored and header_set is not None:
                stored = self._store_manifest(request, header_set)
        except (ConfigError, OSError) as error:
            engine.report("store", error)
        if not stored and key != request.key and engine.stats().rejected > rejected:
            engine.journal.note(REJECTED, request.key)  # the next request asks for it by this key
        return kernel, stored

    def store_verdict(
        self, request: Request, header_set: StoredHeaderSet, *, good: bool
    ) -> StoredHeaderSet:
        """Note in the manifest whether a kernel is good in other locations; return its header set.

        The caller holds the key's lock.
        """
        headers = self._finder.headers
        self._finder.engine.memory.delete(request.key)
        manifest, _ = headers.manifest(request, again=True)
        merged = Manifest(list(manifest.header_sets) if manifest is not None else [])
        judged = merged.judge(header_set, good=good)
        judged.remember(request.search, headers.digests, request.location)
        try:
            headers.put(request, merged)
        except (ConfigError, OSError) as error:
            self._finder.engine.report("store", error)
        return judged

    def _store_manifest(self, request: Request, header_set: StoredHeaderSet) -> bool:
        """Put a header set first in the request's manifest; tell whether it will be found."""
        headers = self._finder.headers
        header_set.remember(request.search, headers.digests, request.location)
        # Read from the backend, so that it includes header sets of other processes.
        self._finder.engine.memory.delete(request.key)
        manifest, _ = headers.manifest(request, again=True)
        merged = Manifest(list(manifest.header_sets) if manifest is not None else [])
        merged.add(header_set)
        stored = headers.put(request, merged)
        paths = header_set.dependencies(request.search, request.location)
        headers.note(request, Checked(header_set.result_key(request.key), paths))
        return stored
