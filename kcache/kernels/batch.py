"""Batch: compiles many requests over all cores, each kernel once, and keeps their order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from kcache.errors import CompileError
from kcache.util.cpus import usable_cores
from kcache.util.units import check_int

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.resolver import Resolver
    from kcache.nvrtc.request import Request

#: Called with (number of finished requests, number of all requests).
Progress = Callable[[int, int], object]
_Result: TypeAlias = "CompiledKernel | CompileError"


def compile_all(
    resolver: Resolver, requests: Sequence[Request], *, jobs: int | None, progress: Progress | None
) -> list[CompiledKernel | CompileError]:
    """Return the result of each request, in order; see `KernelCache.compile_many`."""
    if jobs is not None:
        check_int("jobs", jobs, 1)
    tiers = resolver.tiers
    results: dict[int, _Result] = {}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, request in enumerate(requests):
        alike = request.key, request.location, request.source_name
        groups.setdefault(alike, []).append(index)

    def settle(indices: list[int], result: _Result) -> None:
        for index in indices:
            results[index] = result
            if index != indices[0]:  # it repeats an earlier request
                found = None if isinstance(result, CompileError) else tiers.hit(requests[index])
                if found is None:
                    tiers.miss()
                results[index] = found or result
            if progress is not None:
                progress(len(results), len(requests))

    missing: list[list[int]] = []
    for indices in groups.values():
        found = tiers.hit(requests[indices[0]])
        if found is None:
            missing.append(indices)
        else:
            settle(indices, found)
    # Each process compiles in a different order, so that processes with equal requests share them.
    missing.sort(key=lambda indices: hash((os.getpid(), requests[indices[0]].key)))
    if missing:
        firsts = [requests[indices[0]] for indices in missing]
        for number, result in _compiled(resolver, firsts, jobs):
            settle(missing[number], result)
    return [results[index] for index in range(len(requests))]


def _compiled(
    resolver: Resolver, requests: Sequence[Request], jobs: int | None
) -> Iterator[tuple[int, _Result]]:
    """Yield (index, result) of each request, in the order in which they are done."""
    futures: dict[Future[_Result], int] = {}
    pool: ThreadPoolExecutor | None = None
    try:
        with suppress(RuntimeError):  # the interpreter is exiting, or no thread can be started
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  fails then

            pool = ThreadPoolExecutor(min(jobs or usable_cores(), len(requests)), "kcache")
            for number, request in enumerate(requests):
                futures[pool.submit(_result, resolver, request)] = number
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)  # after an exception, some are left
    for number in range(len(futures), len(requests)):
        yield number, _result(resolver, requests[number])


def _result(resolver: Resolver, request: Request) -> _Result:
    try:
        return resolver.get(request)
    except CompileError as error:
        return error
