"""LayeredFinder: finds kernels in the cache, then in read-only layers below it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kcache.kernels.find import Finder
from kcache.kernels.sources import SourceKernels
from kcache.remote.layer import Layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kcache.engine.engine import CacheEngine
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.nvrtc.request import Request
    from kcache.remote.layer import Layer

__all__ = ["LayeredFinder"]


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
        self._layers = Layers(layers, partial(engine.report, "layer"))
        self._below = SourceKernels(self, self._layers, "layer_hits")

    def get(self, request: Request, started: float) -> CompiledKernel | None:
        """Return the result of `find` if the cache is to be read, otherwise None."""
        return self.find(request, started) if self.reads else None

    def find(
        self, request: Request, started: float, *, again: bool = False
    ) -> CompiledKernel | None:
        """Return the kernel from the cache or a layer, counted as a hit, or None, not counted."""
        if not request.self_contained:
            kernel = super().find(request, started, again=again)
            found = None if kernel is not None else self._below.find(request, started, again=again)
            return kernel if found is None else found.kernel
        # The plain key comes first everywhere. A named key takes a digest and a look into every
        # layer, and few outcomes have one.
        for key in _keys(request):
            kernel = self._load(key, (), started, again=again)
            if kernel is not None:
                return kernel
            found = self._below.find_under((key,), started, again=again)
            if found is not None:
                return found.kernel
        return None

    def close(self) -> None:
        """Close the layers. Idempotent."""
        self._layers.close()


def _keys(request: Request) -> Iterator[str]:
    yield request.key
    if request.named_key:
        yield request.named_key
