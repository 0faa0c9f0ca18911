"""AsyncFront: answers the requests of asyncio tasks without blocking an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kcache.engine.single_flight import copied
from kcache.errors import CompileError, ConfigError
from kcache.kernels.request_factory import with_target
from kcache.util.cpus import usable_cores
from kcache.util.forks import after_fork

if TYPE_CHECKING:
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.request_factory import Requests
    from kcache.kernels.resolver import Resolver
    from kcache.nvrtc.request import CompileRequest

T = TypeVar("T")

#: Number of threads that look up kernels in the cache. They never wait for a compile.
_LOOKING = 2


class AsyncFront:
    """Answers requests of any number of event loops in its own threads.

    Two threads look up kernels in the cache, and one thread for each core compiles, so that no hit
    waits for a compile. Tasks that request the same kernel at the same time wait for one future, so
    that no thread is blocked by another thread's compile. A cancelled task stops waiting, but the
    compile still finishes, for the other tasks and for the cache.

    Threads: may be called from several threads at the same time. Fork: a forked child starts
    without threads and without pending requests.
    """

    def __init__(self, resolver: Resolver, requests: Requests) -> None:
        self._resolver = resolver
        self._requests = requests
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Begin without threads and pending requests, at first and in a forked child."""
        #: By key and location of the request: when the compile began, and its future.
        self._pending: dict[tuple[str, str], tuple[float, Future[CompiledKernel]]] = {}
        self._looking = ThreadPoolExecutor(_LOOKING, "kcache-look")
        self._compiling = ThreadPoolExecutor(usable_cores(), "kcache")

    async def get(self, asked: CompileRequest) -> CompiledKernel:
        """Return the requested kernel.

        Raises:
            ConfigError: an argument is not allowed.
            CompileError: the compiler rejected the source.
            CompilerNotFoundError: NVRTC is not installed.
        """
        asked, asked_at = _frozen(asked), time.monotonic()
        look, tiers = partial(self._submit, self._looking), self._resolver.tiers
        request = await asyncio.wrap_future(look(partial(self._requests.of, asked)))
        call = request.key, request.location
        while True:
            kernel = await asyncio.wrap_future(look(partial(tiers.hit, request)))
            if kernel is not None:
                return kernel
            began, pending = self._pending.get(call, (0.0, None))
            if pending is None or not tiers.reads:
                began = time.monotonic()
                pending = self._submit(self._compiling, partial(self._resolver.get, request))
                self._pending[call] = began, pending
                pending.add_done_callback(lambda _: self._pending.pop(call, None))
                return await asyncio.shield(asyncio.wrap_future(pending))
            with suppress(Exception):
                await asyncio.shield(asyncio.wrap_future(pending))
            # A compile that began before this call may have read a header that was edited since.
            if request.self_contained or began >= asked_at:
                return self._shared(pending)

    def _shared(self, pending: Future[CompiledKernel]) -> CompiledKernel:
        """Return the result of a finished compile for another task, counted as a hit.

        If that compile failed, raise a copy of its error.
        """
        tiers, error = self._resolver.tiers, pending.exception()
        if isinstance(error, Exception):
            if isinstance(error, CompileError):
                tiers.miss()
            raise copied(error)
        tiers.engine.counters.add("coalesced")
        return tiers.adopted(pending.result())

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        try:
            return pool.submit(work)
        except RuntimeError:
            self._requests.require_open()  # the cache was closed in the meantime
            raise

    def close(self) -> None:
        """Let the threads end after the pending requests, without waiting for them."""
        self._looking.shutdown(wait=False)
        self._compiling.shutdown(wait=False)


def _frozen(asked: CompileRequest) -> CompileRequest:
    """Return a copy of `asked` that the caller can't change.

    If `asked` names no architecture, the copy names that of this thread's current GPU, because the
    thread that handles the request may have another current GPU.
    """
    names, options, headers = asked.names, asked.options, asked.headers
    with suppress(ConfigError, AttributeError):  # `Requests` raises a clearer error
        options = with_target(options)
    return asked._replace(
        names=tuple(names) if isinstance(names, list) else names,
        options=options,
        headers={**headers} if isinstance(headers, Mapping) else headers,
    )
