"""AsyncFront: answers the requests of asyncio tasks, and never blocks an event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from kcache.engine.single_flight import copied
from kcache.errors import CompileError
from kcache.nvrtc.workers.cores import usable_cores

if TYPE_CHECKING:
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.request_factory import Requests
    from kcache.kernels.resolver import Resolver
    from kcache.kernels.sources import Found
    from kcache.nvrtc.request import CompileRequest, Request

__all__ = ["AsyncFront"]

T = TypeVar("T")

#: How many threads look for hits. They never wait for a compile.
_LOOKING = 2


class _Pending:
    """One request under way in one event loop.

    Attributes:
        task: finds the answer.
        waiting: how many tasks wait for it.
        request: made by the thread that looks.
    """

    __slots__ = ("request", "task", "waiting")

    def __init__(self) -> None:
        self.task: asyncio.Task[Found]
        self.waiting = 0
        self.request: Request | None = None


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
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        #: By event loop and arguments; each loop has one thread.
        self._pending: dict[Hashable, _Pending] = {}
        self._looking = ThreadPoolExecutor(_LOOKING, "kcache-look")
        self._compiling = ThreadPoolExecutor(usable_cores(), "kcache")

    async def get(self, asked: CompileRequest) -> CompiledKernel:
        """Return the requested kernel.

        Raises:
            ConfigError: an argument is not allowed; CompileError: the compiler refused the source;
            CompilerNotFoundError: there is no compiler.
        """
        asked, arguments = _frozen(asked)
        if not self._resolver.finder.reads:
            arguments = object()  # all tasks want a compile
        if self._process != os.getpid():
            self._begin_anew()
        loop = asyncio.get_running_loop()
        call = loop, arguments
        older = self._pending.get(call)
        before = None if older is None else await self._older_answer(older)
        pending = self._pending.get(call)
        joins = pending is not None
        if pending is None:
            pending = self._pending[call] = _Pending()
            pending.task = loop.create_task(self._answer(asked, pending, before))
            pending.task.add_done_callback(lambda _: self._forget(call, pending))
        error = await self._error_of(pending)
        if joins:
            self._count_joined(pending, error)
        if error is not None:
            raise error
        if before is not None and not before[0].cached:
            self._resolver.finder.engine.counters.add("coalesced")
        return pending.task.result()[0]

    async def _older_answer(self, older: _Pending) -> Found | None:
        """Wait for a request that was under way before this one; return its answer.

        It may be older than this question, as a header may have been edited in between. So those
        who wait for it look again, one for all of them.

        Raises:
            Exception: its error, if that can't be too old.
        """
        error = await self._error_of(older)
        if error is None:
            return older.task.result()
        if older.request is None or older.request.self_contained:
            self._count_joined(older, error)
            raise error
        return None

    def close(self) -> None:
        """Let the threads end after the pending requests."""
        self._looking.shutdown(wait=False)
        self._compiling.shutdown(wait=False)

    def _forget(self, call: Hashable, pending: _Pending) -> None:
        if self._pending.get(call) is pending:
            del self._pending[call]

    def _count_joined(self, pending: _Pending, error: Exception | None) -> None:
        """Count a request that shares the answer of another one."""
        counts = self._resolver.finder.counts
        if error is None and pending.task.result()[0].cached:
            counts.adopted(pending.task.result()[0])
        elif error is None or isinstance(error, CompileError):
            counts.miss()

    async def _error_of(self, pending: _Pending) -> Exception | None:
        """Wait for a request under way; return a copy of its error, or None.

        If the last task that waits for it is cancelled, it is abandoned.
        """
        pending.waiting += 1
        try:
            await asyncio.wait([pending.task])
        except asyncio.CancelledError:
            if pending.waiting == 1:
                pending.task.cancel()
            raise
        finally:
            pending.waiting -= 1
        error = pending.task.exception()
        return copied(error) if isinstance(error, Exception) else None

    async def _answer(self, asked: CompileRequest, pending: _Pending, older: Found | None) -> Found:
        """Look, and compile if necessary. `older` is what those have waited for who ask again."""

        def look() -> Found | None:
            started = time.perf_counter()
            request = pending.request = self._requests.of(asked)
            kernel = self._resolver.finder.get(request, started)
            if kernel is not None:
                return kernel, None
            if older is None:
                return None
            return self._resolver.adopt(request, (older, request.source_name))

        def compile_() -> Found:
            assert pending.request is not None
            return self._resolver.answer(pending.request)

        found = await _run(self._looking, look)
        return await _run(self._compiling, compile_) if found is None else found


def _run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    try:
        return loop.run_in_executor(pool, work)
    except RuntimeError:  # closed in the meantime
        return loop.run_in_executor(None, work)


def _frozen(asked: CompileRequest) -> tuple[CompileRequest, Hashable]:
    """Return the request, safe from changes by the caller, and a value that equal requests share.

    The working directory is not a part of it: both use the one at the time of the look.
    """
    try:
        names = tuple(asked.names) if isinstance(asked.names, list) else asked.names
        headers = tuple(asked.headers.items()) if asked.headers else ()
        call = (asked.source, names, asked.options, headers, asked.extra_key, asked.source_name)
        hash(call)
    except (AttributeError, TypeError):  # wrong types; the code that makes the request names them
        return asked, object()
    if names is not asked.names or headers:
        asked = asked._replace(names=names, headers=dict(headers))
    return asked, call
