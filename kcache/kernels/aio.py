"""AsyncFront: answers the requests of asyncio tasks, and never blocks an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

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

#: Event loop, key and location of a request.
_Call: TypeAlias = tuple[asyncio.AbstractEventLoop, str, str]
#: How many threads look for hits. They never wait for a compile.
_LOOKING = 2


class AsyncFront:
    """Answers requests of any number of event loops from threads of its own.

    Two threads look into the cache, and one for each core compiles, so that no hit waits for a
    compile. Tasks of one loop that ask for the same kernel at the same time wait for one future. A
    task that is cancelled stops waiting; the compile is finished for the others, and for the cache.

    Threads: safe to share. Fork: a child begins anew.
    """

    def __init__(self, resolver: Resolver, requests: Requests) -> None:
        self._resolver = resolver
        self._requests = requests
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Begin with no threads and no requests, also in a child process."""
        #: By event loop and request, with the time of its beginning; each loop has one thread.
        self._pending: dict[_Call, tuple[float, asyncio.Future[CompiledKernel]]] = {}
        self._looking = ThreadPoolExecutor(_LOOKING, "kcache-look")
        self._compiling = ThreadPoolExecutor(usable_cores(), "kcache")

    async def get(self, asked: CompileRequest) -> CompiledKernel:
        """Return the requested kernel.

        Raises:
            ConfigError: an argument is not allowed; CompileError: the compiler refused the source;
            CompilerNotFoundError: there is no compiler.
        """
        asked, asked_at = _frozen(asked), time.monotonic()
        request = await self._run(self._looking, partial(self._requests.of, asked))
        call = asyncio.get_running_loop(), request.key, request.location
        while True:
            kernel = await self._run(self._looking, partial(self._resolver.tiers.hit, request))
            if kernel is not None:
                return kernel
            began, pending = self._pending.get(call, (0.0, None))
            if pending is None or not self._resolver.tiers.reads:
                began = time.monotonic()
                pending = self._run(self._compiling, partial(self._resolver.get, request))
                self._forget_closed_loops()
                self._pending[call] = began, pending
                pending.add_done_callback(partial(self._forget, call))
                return await asyncio.shield(pending)
            await asyncio.wait([pending])
            # An older compile may have read a header before it was edited: look again.
            is_shared = request.self_contained or began >= asked_at
            if is_shared and not pending.cancelled():
                return self._shared(pending)

    def _shared(self, pending: asyncio.Future[CompiledKernel]) -> CompiledKernel:
        """Return another task's kernel, counted as a hit; raise a copy of its error."""
        tiers = self._resolver.tiers
        error = pending.exception()
        if isinstance(error, Exception):
            if isinstance(error, CompileError):
                tiers.miss()
            raise copied(error)
        tiers.engine.counters.add("coalesced")
        return tiers.adopted(pending.result())

    def _forget(self, call: _Call, pending: asyncio.Future[CompiledKernel]) -> None:
        if self._pending.get(call, (0.0, None))[1] is pending:
            del self._pending[call]
        if not pending.cancelled():
            pending.exception()  # each task that waits raises it

    def _forget_closed_loops(self) -> None:
        """Forget the requests of loops that were closed before the end, which nothing reports."""
        for call in tuple(self._pending):
            if call[0].is_closed():
                self._pending.pop(call, None)

    def close(self) -> None:
        """Let the threads end after the pending requests."""
        self._looking.shutdown(wait=False)
        self._compiling.shutdown(wait=False)

    @staticmethod
    def _run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(pool, work)
        except RuntimeError:  # closed in the meantime
            return loop.run_in_executor(None, work)


def _frozen(asked: CompileRequest) -> CompileRequest:
    """Return the request, safe from changes by the caller, for this thread's current GPU."""
    names, options, headers = asked.names, asked.options, asked.headers
    with suppress(ConfigError, AttributeError):  # `Requests` names what is wrong
        options = with_target(options)
    return asked._replace(
        names=tuple(names) if isinstance(names, list) else names,
        options=options,
        headers={**headers} if isinstance(headers, Mapping) else headers,
    )
