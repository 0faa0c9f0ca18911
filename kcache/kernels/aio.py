"""AsyncFront: answers the requests of asyncio tasks, and never blocks an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    from kcache.nvrtc.request import CompileRequest, Request

T = TypeVar("T")

#: How many threads look for hits. They never wait for a compile.
_LOOKING = 2


class _Pending:
    """A request that one task of an event loop has compiled, and others wait for.

    Attributes:
        answer: of the compile.
        began: when it was asked for.
        waiting: how many tasks wait for it.
    """

    __slots__ = ("answer", "began", "waiting")

    def __init__(self, answer: asyncio.Future[CompiledKernel]) -> None:
        self.answer = answer
        self.began = time.monotonic()
        self.waiting = 0

    async def end(self) -> None:
        """Wait for the answer or error. If the last task that waits is cancelled, abandon it."""
        self.waiting += 1
        try:
            await asyncio.wait([self.answer])
        except asyncio.CancelledError:
            if self.waiting == 1:
                self.answer.cancel()
            raise
        finally:
            self.waiting -= 1


class AsyncFront:
    """Answers requests of any number of event loops from threads of its own.

    Two threads look into the cache, and one for each core compiles, so that no hit waits for a
    compile. Tasks of one loop that ask for the same kernel at the same time cause one compile. A
    task that is cancelled stops waiting; a compile that has begun goes on for the others, and for
    the cache.

    Threads: safe to share. Fork: a child begins anew.
    """

    def __init__(self, resolver: Resolver, requests: Requests) -> None:
        self._resolver = resolver
        self._requests = requests
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Begin with no threads and no requests, also in a child process."""
        #: By event loop and request; each loop has one thread.
        self._pending: dict[Hashable, _Pending] = {}
        self._looking = ThreadPoolExecutor(_LOOKING, "kcache-look")
        self._compiling = ThreadPoolExecutor(usable_cores(), "kcache")

    async def get(self, asked: CompileRequest) -> CompiledKernel:
        """Return the requested kernel.

        Raises:
            ConfigError: an argument is not allowed; CompileError: the compiler refused the source;
            CompilerNotFoundError: there is no compiler.
        """
        asked, asked_at = _frozen(asked), time.monotonic()
        request, kernel = await _run(self._looking, partial(self._look, asked))
        while kernel is None:
            call: Hashable = object()  # every task wants a compile
            if self._resolver.finder.reads:
                place = request.location, request.source_name
                call = asyncio.get_running_loop(), request.key, place
            pending = self._pending.get(call)
            joins = pending is not None and not pending.answer.done()
            if pending is None or not joins:
                compile_ = partial(self._resolver.get, request)
                pending = self._pending[call] = _Pending(_run(self._compiling, compile_))
                pending.answer.add_done_callback(partial(self._forget, call))
            await pending.end()
            # The answer to an older question may be older than an edit of a header.
            if not joins:
                return pending.answer.result()
            if request.self_contained or pending.began >= asked_at:
                return self._shared(pending.answer)
            kernel = await _run(self._looking, partial(self._find, request))
        return kernel

    def _look(self, asked: CompileRequest) -> tuple[Request, CompiledKernel | None]:
        request = self._requests.of(asked)
        return request, self._find(request)

    def _find(self, request: Request) -> CompiledKernel | None:
        return self._resolver.finder.get(request, time.perf_counter())

    def _shared(self, answer: asyncio.Future[CompiledKernel]) -> CompiledKernel:
        """Return another task's kernel, counted as a hit; raise a copy of its error."""
        finder = self._resolver.finder
        error = answer.exception()
        if isinstance(error, Exception):
            if isinstance(error, CompileError):
                finder.counts.miss()
            raise copied(error)
        finder.counts.adopted(answer.result())
        finder.engine.counters.add("coalesced")
        return answer.result()._replace(cached=True)

    def _forget(self, call: Hashable, answer: asyncio.Future[CompiledKernel]) -> None:
        pending = self._pending.get(call)
        if pending is not None and pending.answer is answer:
            del self._pending[call]

    def close(self) -> None:
        """Let the threads end after the pending requests."""
        self._looking.shutdown(wait=False)
        self._compiling.shutdown(wait=False)


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
