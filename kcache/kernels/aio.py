"""AsyncFront: answers the requests of asyncio tasks, and never blocks an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kcache.engine.single_flight import Busy, copied
from kcache.kernels.job_threads import JobThreads, usable_cores
from kcache.kernels.resolver import Answer

if TYPE_CHECKING:
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.request_factory import Requests
    from kcache.kernels.resolver import Resolver
    from kcache.nvrtc.request import CompileRequest, Request

__all__ = ["AsyncFront"]

#: How many threads look for hits. They never wait for a compile.
_LOOKING = 2

#: The future that one task waits for. Each task has its own, so that cancelling one task cancels no
#: other.
Waiter: TypeAlias = "asyncio.Future[CompiledKernel]"


class _Pending:
    """One request under way, and the tasks that joined it.

    Its result may be older than the question of a task that joined later, because a header may have
    been edited in between. So a second, later look answers the tasks that joined, one look for all
    of them.

    Attributes:
        asked: the request as it was asked for.
        first: the future of the task that began it.
        joined: the futures of those that joined.
        request: made of `asked` by the thread that looks.
    """

    __slots__ = ("asked", "first", "joined", "request")

    def __init__(self, asked: CompileRequest, first: Waiter) -> None:
        self.asked = asked
        self.first = first
        self.joined: list[Waiter] = []
        self.request: Request | None = None

    def waiting(self) -> list[Waiter]:
        """Return the tasks that joined and were not cancelled."""
        return [waiter for waiter in self.joined if not waiter.done()]


class AsyncFront:
    """Answers requests of any number of event loops from threads of its own.

    Two threads look into the cache, and one for each core compiles, so that no hit waits for a
    compile. Tasks that ask for the same kernel at the same time cause one compile. A task that is
    cancelled stops waiting; a compile that has begun goes on for the others, and for the cache.

    Threads: safe to share. Fork: a child begins anew.
    """

    def __init__(self, resolver: Resolver, requests: Requests) -> None:
        self._resolver = resolver
        self._requests = requests
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._pending: dict[Hashable, _Pending] = {}
        self._guard = threading.Lock()
        self._looking = ThreadPoolExecutor(_LOOKING, thread_name_prefix="kcache-look")
        self._compiling = JobThreads(usable_cores())

    async def get(self, asked: CompileRequest) -> CompiledKernel:
        """Return the requested kernel.

        Raises:
            ConfigError: an argument is not allowed; CompileError: the compiler refused the source;
            CompilerNotFoundError: there is no compiler.
        """
        asked, call = _frozen(asked)
        if not self._resolver.finder.reads:
            call = object()  # all tasks want a compile
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if self._process != os.getpid():
            self._begin_anew()
        mine = _Pending(asked, waiter)
        with self._guard:
            pending = self._pending.setdefault(call, mine)
            if pending is not mine:
                pending.joined.append(waiter)
        if pending is mine:
            self._submit(mine, call).add_done_callback(partial(self._land, call, mine))
        return await waiter

    def close(self) -> None:
        """Let the threads end after the pending requests."""
        self._looking.shutdown(wait=False)
        self._compiling.close()

    def _land(self, call: Hashable, pending: _Pending, done: Future[Answer]) -> None:
        """Give the first task the outcome, and look again for those that joined it."""
        with self._guard:
            if self._pending.get(call) is pending:
                del self._pending[call]
        _settle([pending.first], done)
        joined = pending.waiting()
        if not joined:
            return
        error = done.exception()
        request = pending.request
        if error is not None and (request is None or request.self_contained):
            self._resolver.finder.counts.joined(None, 1 + len(joined), waited=True)
            _settle(joined, done)
            return
        first = None if error is not None else done.result()
        again = self._submit(pending, None, first)
        again.add_done_callback(partial(self._land_again, pending, first))

    def _land_again(self, pending: _Pending, first: Answer | None, done: Future[Answer]) -> None:
        joined = pending.waiting()
        kernel = None if done.exception() is not None else done.result().kernel
        waited = first is None or not first.kernel.cached
        self._resolver.finder.counts.joined(kernel, len(joined), waited=waited)
        _settle(joined, done)

    def _submit(
        self, pending: _Pending, call: Hashable, first: Answer | None = None
    ) -> Future[Answer]:
        """Look, and compile if necessary; return the future, which nobody can cancel.

        `first` is the outcome that the joined tasks waited for, if this look is for them.
        """
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()

        def find() -> None:
            _run(lambda: self._find(pending, first), future, otherwise=compile_)

        def compile_(request: Request) -> None:
            def attempt(busy: Busy | None) -> Answer | Busy:
                if busy is None and not self._wanted(pending, call):
                    raise CancelledError
                return self._resolver.attempt(request, busy)

            try:
                compiled = self._compiling.submit(attempt)
            except RuntimeError:  # closed in the meantime, or no thread can be started
                _run(lambda: Answer(self._resolver.get(request)), future)
            else:
                compiled.add_done_callback(lambda done: _run(done.result, future))

        try:
            self._looking.submit(find)
        except RuntimeError:  # for the same reasons
            find()
        return future

    def _find(self, pending: _Pending, first: Answer | None) -> Answer | Request:
        """Return the cached kernel, or one made of the first answer, or otherwise the request."""
        started = time.perf_counter()
        request = pending.request = self._requests.of(pending.asked)
        kernel = self._resolver.finder.get(request, started)
        if kernel is not None:
            return Answer(kernel)
        adopted = None if first is None else self._resolver.adopt(request, first)
        return request if adopted is None else adopted

    def _wanted(self, pending: _Pending, call: Hashable) -> bool:
        """Tell whether a task still waits; if not, nobody can join any more."""
        with self._guard:
            if pending.waiting() or not pending.first.done():
                return True
            if self._pending.get(call) is pending:
                del self._pending[call]
            return False


def _frozen(asked: CompileRequest) -> tuple[CompileRequest, Hashable]:
    """Return the request, safe from changes by the caller, and a value that equal requests share.

    The working directory is not a part of it: both use the one at the time of the look.
    """
    try:
        names = asked.names if isinstance(asked.names, str) else tuple(asked.names)
        headers = tuple(asked.headers.items()) if asked.headers else ()
        call = (asked.source, names, asked.options, headers, asked.extra_key, asked.source_name)
        hash(call)
    except (AttributeError, TypeError):  # wrong types; the code that makes the request names them
        return asked, object()
    if names is not asked.names or headers:
        asked = asked.replace(names=names, headers=dict(headers))
    return asked, call


def _run(
    work: Callable[[], Answer | Request],
    future: Future[Answer],
    *,
    otherwise: Callable[[Request], object] | None = None,
) -> None:
    """Settle a future with the outcome of `work`; pass an outcome without answer to `otherwise`."""
    try:
        found = work()
        if isinstance(found, Answer):
            future.set_result(found)
        elif otherwise is not None:
            otherwise(found)
    except BaseException as error:  # the task that waits for the future gets this exception
        future.set_exception(error)


def _settle(waiters: Iterable[Waiter], done: Future[Answer]) -> None:
    """Give the tasks the outcome, each loop in its own thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, of_loop in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed, and its tasks are gone
            loop.call_soon_threadsafe(_settle_here, of_loop, done)


def _settle_here(waiters: Iterable[Waiter], done: Future[Answer]) -> None:
    error = done.exception()
    for waiter in waiters:
        if waiter.done():  # cancelled
            continue
        if error is None:
            waiter.set_result(done.result().kernel)
        else:
            waiter.set_exception(copied(error) if isinstance(error, Exception) else error)
