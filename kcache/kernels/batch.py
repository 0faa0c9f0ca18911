"""Batch: compiles many requests over all cores, each kernel once, and keeps their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

from kcache.engine.single_flight import Busy
from kcache.errors import ArgumentTypeError, CompileError, ConfigError
from kcache.nvrtc.workers.cores import usable_cores

if TYPE_CHECKING:
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.resolver import Resolver
    from kcache.nvrtc.request import Request

__all__ = ["Progress", "compile_all"]

#: Called with (number of finished requests, number of all requests).
Progress = Callable[[int, int], object]


def compile_all(
    resolver: Resolver,
    requests: Sequence[Request],
    *,
    jobs: int | None,
    progress: Progress | None,
) -> list[CompiledKernel | CompileError]:
    """Return the result of each request, in order; see `KernelCache.compile_many`."""
    count = _jobs(jobs)
    results: list[CompiledKernel | CompileError | None] = [None] * len(requests)
    same = _same(requests)
    done = 0

    def settle(indices: list[int], result: CompiledKernel | CompileError) -> None:
        nonlocal done
        for number, index in enumerate(indices):
            results[index] = (
                result if number == 0 else _once_more(resolver, requests[index], result)
            )
            done += 1
            if progress is not None:
                progress(done, len(requests))

    missing: list[list[int]] = []
    for indices in same:
        found = resolver.finder.get(requests[indices[0]], time.perf_counter())
        if found is None:
            missing.append(indices)
        else:
            settle(indices, found)
    if missing:
        firsts = [requests[indices[0]] for indices in missing]
        with resolver.holding_proofs():
            for number, result in _compiled(resolver, firsts, count):
                settle(missing[number], result)
    return [result for result in results if result is not None]


def _compiled(
    resolver: Resolver, requests: Sequence[Request], jobs: int | None
) -> Iterator[tuple[int, CompiledKernel | CompileError]]:
    """Yield (index, result) of each request, in the order in which they are done."""
    left = set(range(len(requests)))
    with suppress(RuntimeError):  # no thread can be started, or the interpreter is ending
        from kcache.kernels.job_threads import JobThreads

        workers = JobThreads(_threads(requests, jobs))
        try:
            futures: dict[Future[CompiledKernel | CompileError], int] = {}
            with suppress(RuntimeError):
                for number, request in enumerate(requests):
                    futures[workers.submit(partial(_attempt, resolver, request))] = number
            for future in as_completed(futures):
                with suppress(CancelledError):
                    result = future.result()
                    left.discard(futures[future])
                    yield futures[future], result
        finally:
            workers.close(cancel=True)  # nothing is left to do unless something was raised
    for number in sorted(left):
        yield number, _attempt(resolver, requests[number], None, wait=True)


def _threads(requests: Sequence[Request], jobs: int | None) -> int:
    return min(jobs or usable_cores(), len(requests))


def _same(requests: Sequence[Request]) -> list[list[int]]:
    """Group the indices of requests that are the same."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault((request.key, request.location, request.source_name), []).append(index)
    return list(groups.values())


@overload
def _attempt(
    resolver: Resolver, request: Request, busy: Busy | None
) -> CompiledKernel | CompileError | Busy: ...
@overload
def _attempt(
    resolver: Resolver, request: Request, busy: None, *, wait: Literal[True]
) -> CompiledKernel | CompileError: ...
def _attempt(
    resolver: Resolver, request: Request, busy: Busy | None, *, wait: bool = False
) -> CompiledKernel | CompileError | Busy:
    try:
        if wait:
            return resolver.get(request)
        answer = resolver.attempt(request, busy)
    except CompileError as error:
        return error
    return answer if isinstance(answer, Busy) else answer.kernel


def _once_more(
    resolver: Resolver, request: Request, result: CompiledKernel | CompileError
) -> CompiledKernel | CompileError:
    """Return the result for a request that repeats an earlier one, and count it."""
    found = None
    if not isinstance(result, CompileError):
        found = resolver.finder.get(request, time.perf_counter())
    if found is None:
        resolver.finder.counts.miss()
    return found or result


def _jobs(jobs: object) -> int | None:
    if jobs is None:
        return None
    if not isinstance(jobs, int) or isinstance(jobs, bool):
        raise ArgumentTypeError(f"jobs={jobs!r} is not allowed; allowed: an integer >= 1, or None")
    if jobs < 1:
        raise ConfigError(f"jobs={jobs!r} is not allowed; allowed: an integer >= 1, or None")
    return jobs
