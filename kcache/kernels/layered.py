"""LayeredFinder: finds kernels in the cache, then in read-only layers below it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kcache.entry import open_envelope
from kcache.errors import BackendError, CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.kernels.find import Checked, Finder
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcache.engine.engine import CacheEngine
    from kcache.entry import Entry
    from kcache.nvrtc.manifest import Manifest
    from kcache.nvrtc.request import Request
    from kcache.remote.layer import Layer

__all__ = ["LayeredFinder"]

#: How many manifests of layers each process remembers.
_MAX_MANIFESTS = 4096
#: The exceptions that reading a layer may raise. kcache then treats the layer as empty.
_SURVIVED = (BackendError, OSError, MemoryError)


class LayeredFinder(Finder):
    """A finder that asks layers for what the cache does not have. Such a hit writes nothing.

    From then on, the memory tier holds the kernel. A miss in all layers is not remembered, because
    a layer may be filled while programs use it.

    Threads: safe to share. Fork: a child may go on using it.

    Args:
        engine, check_once, reads, writes: as for `Finder`.
        layers: in the order in which they are asked.
    """

    def __init__(
        self,
        engine: CacheEngine,
        *,
        check_once: bool,
        reads: bool,
        writes: bool,
        layers: Sequence[Layer],
    ) -> None:
        super().__init__(engine, check_once=check_once, reads=reads, writes=writes)
        self._layers = layers
        self._manifests: dict[tuple[int, str], Manifest] = {}

    def get(self, request: Request, started: float) -> CompiledKernel | None:
        """Return the result of `find` if the cache is to be read, otherwise None."""
        return self.find(request, started) if self.reads else None

    def find(
        self, request: Request, started: float, *, again: bool = False
    ) -> CompiledKernel | None:
        """Return the kernel from the cache or a layer, counted as a hit, or None, not counted."""
        if request.self_contained:
            # Every tier is asked for the plain key first. A named key takes a digest and a look
            # into every tier, and few outcomes have one.
            kernel = self._find_under(request.key, started, again=again)
            if kernel is None and (named := request.named_key):
                kernel = self._find_under(named, started, again=again)
            return kernel
        kernel = super().find(request, started, again=again)
        if kernel is not None:
            return kernel
        for number, layer in enumerate(self._layers):
            try:
                kernel = self._find_in(number, layer, request, started)
            except _SURVIVED as error:
                self._survive(request.key, error, again=again)
            if kernel is not None:
                return kernel
        return None

    def _find_under(self, key: str, started: float, *, again: bool) -> CompiledKernel | None:
        """Return the kernel that the cache or a layer has under `key`, counted, or None."""
        kernel = self._load(key, (), started, again=again)
        if kernel is not None:
            return kernel
        for layer in self._layers:
            try:
                kernel = self._from_layer(layer, key, (), started)
            except _SURVIVED as error:
                self._survive(key, error, again=again)
            if kernel is not None:
                return kernel
        return None

    def _survive(self, key: str, error: Exception, *, again: bool) -> None:
        """Count and log the failure of a layer."""
        if not isinstance(error, CorruptEntryError):
            self.engine.report("layer", error)
        elif not again:
            self.engine.refuse(key, error)

    def _find_in(
        self, number: int, layer: Layer, request: Request, started: float
    ) -> CompiledKernel | None:
        """Return the kernel of the header set in a layer that holds now, or None."""
        manifest = self._manifest(number, layer, request.key)
        if manifest is None:
            return None
        digests = self.headers.digests
        header_set = manifest.matching(request.search, digests, request.location)
        if header_set is None and self._manifests.pop((number, request.key), None) is not None:
            # It may be a different one by now.
            manifest = self._manifest(number, layer, request.key)
            if manifest is not None:
                header_set = manifest.matching(request.search, digests, request.location)
        if header_set is None:
            return None
        paths = header_set.dependencies(request.search, request.location)
        key = header_set.result_key(request.key)
        kernel = self._from_layer(layer, key, paths, started)
        if kernel is not None:
            self.headers.note(request, Checked(key, paths))
            if layer.keep and manifest is not None:
                self.headers.put(request, manifest)
        return kernel

    def _manifest(self, number: int, layer: Layer, key: str) -> Manifest | None:
        """Return a layer's manifest of a request, or None; raises as `Layer.get`, or decoding."""
        from kcache.nvrtc.manifest import Manifest

        found = self._manifests.get((number, key))
        if found is None:
            blob = layer.get(key)
            if blob is None:
                return None
            found = Manifest.from_entry(self._opened(blob, key))
            if len(self._manifests) >= _MAX_MANIFESTS:
                self._manifests.clear()
            self._manifests[number, key] = found
        return found

    def _from_layer(
        self, layer: Layer, key: str, dependencies: tuple[str, ...], started: float
    ) -> CompiledKernel | None:
        """Return the kernel under `key`, counted as a hit, or None."""
        engine = self.engine
        entry = engine.memory.get(key)
        from_memory = entry is not None
        if entry is None:
            blob = layer.get(key)
            if blob is None:
                return None
            entry = self._opened(blob, key)
            if engine.memory.max_size:
                entry.payload  # noqa: B018  lets go of the envelope
                engine.memory.put(key, entry, len(blob))
        kernel: CompiledKernel | None = getattr(entry, "view", None)
        if kernel is None or kernel.dependencies is not dependencies:
            kernel = CompiledKernel.from_entry(entry, key, dependencies)
            entry.view = kernel
        saved = self.counts.saved(key, entry.cost)
        engine.counters.hit(saved, time.perf_counter() - started, from_memory)
        if not from_memory:
            engine.counters.add("layer_hits")
            if layer.keep:
                engine.put(key, entry)
        return kernel

    def _opened(self, blob: bytes, key: str) -> Entry:
        return open_envelope(blob, key, self.engine.producer.encode())

    def close(self) -> None:
        """Close the layers. Idempotent."""
        for layer in self._layers:
            try:
                layer.close()
            except (BackendError, OSError) as error:
                log.debug("closing %s failed: %s", layer, error)
