"""Batch: compiles many requests on all cores, each kernel once, and keeps the requests' order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from kcache.errors import CompileError
from kcache.util.cpus import usable_cores
from kcache.util.forks import importing
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
    """Return the kernel or the error of each request, in order; see `KernelCache.compile_many`."""
    if jobs is not None:
        check_int("jobs", jobs, 1)
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, request in enumerate(requests):
        alike = request.key, request.location, request.source_name
        groups.setdefault(alike, []).append(index)
    tiers, results = resolver.tiers, dict[int, _Result]()
    for indices, result in _results(resolver, requests, groups.values(), jobs):
        for index in indices:
            found: CompiledKernel | None = None
            if index != indices[0]:  # it repeats an earlier request
                if not isinstance(result, CompileError):
                    found = tiers.hit(requests[index])
                if found is None:
                    tiers.miss()
            results[index] = found or result
            if progress is not None:
                progress(len(results), len(requests))
    return [results[index] for index in range(len(requests))]


def _results(
    resolver: Resolver, requests: Sequence[Request], groups: Iterable[list[int]], jobs: int | None
) -> Iterator[tuple[list[int], _Result]]:
    """Yield (indices of equal requests, their result) for each group in `groups`, hits first."""
    missing: list[list[int]] = []
    for indices in groups:
        found = resolver.tiers.hit(requests[indices[0]])
        if found is None:
            missing.append(indices)
        else:
            yield indices, found
    if not missing:
        return
    # Each process compiles in a different order, so that processes with the same requests divide
    # the compiles among themselves.
    missing.sort(key=lambda indices: hash((os.getpid(), requests[indices[0]].key)))
    futures: dict[Future[_Result], list[int]] = {}
    pool: ThreadPoolExecutor | None = None
    try:
        with suppress(RuntimeError):  # the interpreter is exiting, or no thread can be started
            with importing:
                from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  fails at exit

            pool = ThreadPoolExecutor(min(jobs or usable_cores(), len(missing)), "kcache")
            for indices in missing:
                futures[pool.submit(_result, resolver, requests[indices[0]])] = indices
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)  # an exception leaves pending futures
    for indices in missing[len(futures) :]:
        yield indices, _result(resolver, requests[indices[0]])


def _result(resolver: Resolver, request: Request) -> _Result:
    try:
        return resolver.get(request)
    except CompileError as error:
        return error
