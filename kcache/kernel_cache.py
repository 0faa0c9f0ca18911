"""KernelCache: the public entry point, which connects the parts of a cache."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kcache.backend import Backend
from kcache.engine.opening import engine_of, open_configured, warn_of_other_backend
from kcache.errors import CompileError, KcacheError
from kcache.kernels.lookup import Tiers
from kcache.kernels.request_factory import Requests
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.request import CompileRequest
from kcache.util.forks import importing
from kcache.util.hints import unexpected_argument
from kcache.util.units import format_size

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Never, Self

    from kcache.engine.stats import Stats
    from kcache.kernels.aio import AsyncFront
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.explain import Explanation
    from kcache.kernels.resolver import Resolver
    from kcache.nvrtc.request import Caller, Request

#: The share of the memory tier's size that is used to remember requests, so that a repeated request
#: is not hashed again.
_REQUEST_SHARE = 0.25


class KernelCache:
    """A cache of CUDA kernels, each compiled once and shared by every process of a user.

    kcache looks for a kernel in memory, then in the backend. If it is in neither, NVRTC compiles it
    once, and all threads and processes that request the same kernel wait for that compile. A cached
    kernel is returned only if the source, the options, the compiler and every header that the
    compile has read are unchanged. An error of the backend never makes a request fail.

    Threads: several threads may use a cache at the same time, but signal handlers may not.
    Processes: any number may share a directory. Crash: a process may be killed at any instant; its
    workers then exit, and nothing has to be repaired. Fork: a forked child may use the cache, and
    starts its own workers.

    Args:
        directory: the directory of the cache; by default the value of `KCACHE_DIR`, or else a
            directory in the user's cache directory.
        backend: the name of a backend, or a `Backend`; `"file"` by default.
        max_size: the cap, in bytes or as text such as `"512MB"`; 1 GiB by default. The stored bytes
            never exceed the cap; with the backends `file` and `zstd`, each concurrent writer may
            exceed it by one entry.
        memory_size: the size of the memory tier; 64 MiB by default, 0 switches the tier off.
        read_only: whether to use the stored entries but write nothing.
        disable: whether to compile at every request, and neither read nor write the cache.
        recache: whether to compile at every request, and replace the stored entries.
        header_check: `"always"` (the default) to check the headers at every request, or `"once"` to
            check the headers of each request once per process.
        relocation: `"on"` (the default) to use a kernel whose outputs contain no path also in other
            checkouts, containers and machines that have the same headers; or `"off"` to use each
            kernel only in the directories where it was compiled.
        wait: how many seconds to wait while another thread or process compiles the same kernel; 300
            by default, 0 to never wait. After a timeout, one of the waiting threads compiles the
            kernel, and the others wait for this compile, again up to `wait` seconds.
        workers: how many compiles may run at the same time; by default one for each usable core.
            Compiles run in worker processes, which all caches of this process share. With 0, this
            process compiles by itself, and the results are not cached.
        compile_timeout: how many seconds a compile may take until it fails with a CompileError; by
            default there is no limit.
        on_miss: `"compile"` (the default), or `"error"` to raise a MissError with the reason.
        remote: addresses of other caches, which are searched in this order for a kernel that this
            cache does not have: layers (`"file:///opt/kernels"`) and remotes (`"https://"`,
            `"redis://"`, `"s3://"`, ...). By default the value of `KCACHE_REMOTE`; `()` for none.

    An argument overrides the environment, and the environment overrides what is saved in the
    directory (`kcache config --set`). If a value in the environment or the directory is not
    allowed, kcache logs one warning and ignores the value. If `KCACHE_DIR` can't be used, this
    process caches in memory alone.

    Raises:
        ConfigError: an argument has a value that is not allowed, or `directory` is unsafe.
        UnknownBackendError: the argument `backend` names a backend that is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        backend: str | Backend | None = None,
        max_size: int | str | None = None,
        memory_size: int | str | None = None,
        read_only: bool | None = None,
        disable: bool | None = None,
        recache: bool | None = None,
        header_check: str | None = None,
        relocation: str | None = None,
        wait: float | None = None,
        workers: int | None = None,
        compile_timeout: float | None = None,
        on_miss: str | None = None,
        remote: str | Sequence[str] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unexpected_argument(KernelCache.__init__, unknown, CompileOptions)
        given = backend if isinstance(backend, Backend) else None
        settings = {
            "directory": directory,
            "backend": None if given is not None else backend,
            "max_size": max_size,
            "memory_size": memory_size,
            "read_only": read_only,
            "disable": disable,
            "recache": recache,
            "header_check": header_check,
            "relocation": relocation,
            "wait": wait,
            "workers": workers,
            "compile_timeout": compile_timeout,
            "on_miss": on_miss,
            "remote": remote,
        }
        opened = self.opened = open_configured(settings, given)
        self.config = config = opened.config
        share = int(config.memory_size.value * _REQUEST_SHARE)
        self._requests = Requests(
            share,
            record_to=config.record.value,
            relocatable=config.relocation.value == "on",
        )
        self._async: AsyncFront | None = None
        self.engine = engine_of(opened, config.memory_size.value - share, producer=PRODUCER)
        self._tiers = Tiers(self.engine, config)
        self._resolver: Resolver | None = None

    def get_or_compile(
        self,
        source: str | os.PathLike[str],
        names: str | Sequence[str] = (),
        options: CompileOptions | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        extra_key: bytes = b"",
        source_name: str = "kernel.cu",
        **unknown: Never,
    ) -> CompiledKernel:
        """Return the compiled kernel. If it is not in the cache, compile it and cache it.

        Args:
            source: CUDA C++ source text, or the path (`pathlib.Path`) of a file that contains the
                text. The path is then the name of the source, unless `source_name` is given.
            names: one or several name expressions, such as `"axpy<float>"`. They instantiate
                templates, and `CompiledKernel.lowered_names` maps each to its mangled name.
            options: the options of the compile; see `CompileOptions`.
            headers: maps the names of in-memory headers, as `#include` has them, to their texts.
            extra_key: bytes that become part of the key. Use this for anything that the result
                depends on but that kcache can't detect.
            source_name: the name of the source in the compiler's messages. `#include "..."` looks
                for headers in the directory of this name, by default in the working directory.

        Raises:
            ConfigError: an argument is not allowed; no architecture is given, and there is no GPU;
                or the cache was closed.
            CompileError: the compiler rejected the source, crashed, or exceeded `compile_timeout`.
                The attribute `log` has the compiler's whole log.
            MissError: the kernel is not cached, and `on_miss` is `"error"`.
            CompilerNotFoundError: NVRTC is not installed, or can't be used here.
            KcacheError: this process has no file descriptors left.
            OSError: the file of the source can't be read.
        """
        if unknown:
            raise unexpected_argument(self.get_or_compile, unknown, CompileOptions)
        started = time.perf_counter()
        try:
            request = self._requests.make(
                source, names, options, headers, extra_key=extra_key, source_name=source_name
            )
            return self._tiers.hit(request, started) or self._on_miss().get(request)
        except CompileError as error:
            error.__traceback__ = None  # kcache's frames are noise to the caller
            raise
        except OSError as error:  # imports need descriptors, too
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise KcacheError(f"this process has no file descriptors left: {error}") from error
            raise

    def _get_or_compile_for(self, around: Caller, call: CompileRequest) -> CompiledKernel:
        """Return the kernel that a program requests by the drop-in; `around` describes it."""
        started = time.perf_counter()
        return self._answer(self._requests.of(call, around), started)

    def _answer(self, request: Request, started: float) -> CompiledKernel:
        return self._tiers.hit(request, started) or self._on_miss().get(request)

    def _rehearse_for(self, around: Caller, call: CompileRequest) -> None:
        """Look up a kernel that is not cached, to warm up the code of a hit; count nothing."""
        self._tiers.lookup(self._requests.of(call, around, record=False))

    async def aget_or_compile(
        self,
        source: str | os.PathLike[str],
        names: str | Sequence[str] = (),
        options: CompileOptions | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        extra_key: bytes = b"",
        source_name: str = "kernel.cu",
        **unknown: Never,
    ) -> CompiledKernel:
        """Return the compiled kernel like `get_or_compile`, without blocking the event loop.

        The arguments and errors are the same. Tasks that request the same kernel at the same time
        share one compile. A cancelled task stops waiting, but the compile continues, and its kernel
        is stored unless the cache is closed before the compile ends.
        """
        if unknown:
            raise unexpected_argument(self.aget_or_compile, unknown, CompileOptions)
        front = self._async
        if front is None:
            with importing:
                from kcache.kernels.aio import AsyncFront  # noqa: PLC0415  34 ms

            front = self._async = AsyncFront(self._on_miss(), self._requests)
        asked = CompileRequest(source, names, options, headers, extra_key, source_name)
        try:
            return await front.get(asked)
        except CompileError as error:
            error.__traceback__ = None  # as above
            raise

    def compile_many(
        self,
        requests: Iterable[
            CompileRequest | str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any]
        ],
        *,
        jobs: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[CompiledKernel | CompileError]:
        """Return a list with a kernel, or the error of its compile, for each request, in order.

        `jobs` threads compile the kernels that are not in the cache. Equal requests are compiled
        once. Processes with the same requests share the work: each compiles in a different order.

        Args:
            requests: each is a `CompileRequest`, source text, a path, or the fields of a
                `CompileRequest` as a tuple or a mapping.
            jobs: how many compiles run at the same time, at least 1; by default one for each usable
                core.
            progress: called in this thread with the numbers of finished requests and all requests.

        Raises:
            ConfigError: a request has an argument that is not allowed; the message names the
                request. Nothing was compiled.
            CompilerNotFoundError: NVRTC is not installed, or can't be used here.
        """
        made = self._requests.of_all(requests)
        return self._on_miss().get_all(made, jobs=jobs, progress=progress)

    def lookup(
        self,
        source: str | os.PathLike[str],
        names: str | Sequence[str] = (),
        options: CompileOptions | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        extra_key: bytes = b"",
        source_name: str = "kernel.cu",
        **unknown: Never,
    ) -> CompiledKernel | None:
        """Return the compiled kernel if it is in the cache, otherwise None. Nothing is compiled.

        The arguments and errors are those of `get_or_compile`. The call counts as a hit or a miss.
        """
        if unknown:
            raise unexpected_argument(self.lookup, unknown, CompileOptions)
        started = time.perf_counter()
        request = self._requests.make(
            source, names, options, headers, extra_key=extra_key, source_name=source_name
        )
        kernel = None
        if not self.config.disable.value:
            kernel = self._tiers.hit(request, started, found=self._tiers.lookup(request))
        if kernel is None and self.config.remotes:
            remotes = self._on_miss().remotes
            if remotes is not None and remotes.client.worth_asking:
                found = remotes.lookup(request)
                kernel = found and self._tiers.hit(request, started, found=found)
        if kernel is None:
            warn_of_other_backend(self.opened)
            self.engine.counters.add("misses")
        return kernel

    def why(
        self,
        source: str | os.PathLike[str],
        names: str | Sequence[str] = (),
        options: CompileOptions | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        extra_key: bytes = b"",
        source_name: str = "kernel.cu",
        **unknown: Never,
    ) -> Explanation:
        """Return why `get_or_compile` would compile this request now, or that it would hit.

        The arguments and errors are the same. The call compiles nothing, changes nothing, and is
        neither counted nor recorded. It may read the metadata of every entry.
        """
        if unknown:
            raise unexpected_argument(self.why, unknown, CompileOptions)
        with importing:
            from kcache.kernels.explain import explain  # noqa: PLC0415  6 ms

        asked = CompileRequest(source, names, options, headers, extra_key, source_name)
        request = self._requests.of(asked, record=False)
        return explain(self.engine, request, self.config)

    def record(self, path: str | os.PathLike[str]) -> AbstractContextManager[object]:
        """Return a context manager that records every request in its `with` block.

        `kcache warm` can compile these requests later. The first request for each kernel appends
        one line to the file at `path`, even if it is a hit. Several processes may record to the
        same file. If the file can't be written, kcache logs one warning. With `KCACHE_RECORD`,
        requests are recorded from the start, without this method.
        """
        return closing(self._requests.record(path))

    @property
    def directory(self) -> Path | None:
        """The directory of the cache, or None if the cache has no directory."""
        if self.opened.path is None:
            return None
        with importing:
            from pathlib import Path  # noqa: PLC0415  4 ms

        return Path(self.opened.path)

    @property
    def size_bytes(self) -> int:
        """How many bytes all processes have stored; 0 if the backend can't be read."""
        return self.engine.size_bytes

    @property
    def size_mb(self) -> float:
        """How many megabytes (1,000,000 bytes) all processes have stored; see `size_bytes`."""
        return self.engine.size_bytes / 1e6

    @property
    def entry_count(self) -> int:
        """The number of stored entries: kernels, and one manifest per source with includes."""
        return self.engine.entry_count

    def stats(self) -> Stats:
        """Return the counts of this KernelCache alone; see `total_stats` for all processes."""
        return self.engine.stats()

    def total_stats(self) -> Stats:
        """Return the counts of all processes; if they can't be read, those of this KernelCache."""
        return self.engine.total_stats()

    def print_info(self, file: TextIO | None = None) -> None:
        """Print the directory, size and counts of the cache to `file`, by default to stdout."""
        with importing:
            from kcache.admin.info import format_info  # noqa: PLC0415  20 ms

        where = self.opened.path or "(none)"
        text = format_info(self.engine, directory=where, backend=self.opened.name)
        print(text, file=sys.stdout if file is None else file)

    def clear(self) -> int:
        """Delete all entries; return how many were deleted from the backend."""
        self.clear_memory()
        return self.engine.clear()

    def clear_memory(self) -> None:
        """Clear the memory tier of this KernelCache. The entries in the backend are kept."""
        self._requests.require_open()
        self._requests.forget()
        self.engine.memory.clear()

    def trim(
        self, max_size: int | str | None = None, *, older_than: float | str | None = None
    ) -> int:
        """Evict the least recently used entries to free space; return how many bytes were freed.

        With `older_than`, in seconds or as text such as `"30d"`, all entries whose last use is
        longer ago are evicted. With `max_size`, entries are evicted until at most this size is
        stored. Without arguments, this size is 90 % of the cap.

        Raises:
            ConfigError: an argument is not a size or an age, or the cache was closed.
        """
        self._requests.require_open()
        return self.engine.trim(max_size, older_than=older_than)

    def close(self) -> None:
        """Write the statistics and close the backend. Calling this again does nothing.

        After that, requests, `clear` and `trim` raise a ConfigError. A running compile is finished,
        but its kernel is not stored.
        """
        self._requests.closed = True
        if self._async is not None:
            self._async.close()
        if self._resolver is not None:
            self._resolver.close()
        self._tiers.close()
        self.engine.close()

    def __reduce__(self) -> NoReturn:
        """Raise a TypeError, because each process must open the cache itself."""
        raise TypeError(
            "a KernelCache can't be pickled; open the same directory in the other process: "
            f"kcache.KernelCache({self.opened.path!r})"
        )

    def __repr__(self) -> str:
        """Return text with the directory and the size of the cache; never raise an exception."""
        try:
            usage = self.engine.backend.usage()
            entries, size = str(usage.entries), format_size(usage.bytes)
        except (KcacheError, OSError):
            entries, size = "unknown", "unknown"
        size = f"{size} of {format_size(self.engine.max_size)}"
        named = f"{self.opened.path!r}, backend={self.opened.name!r}"
        return f"KernelCache({named}, entries={entries}, size={size!r})"

    def __enter__(self) -> Self:
        """Return this KernelCache."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the cache."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return this KernelCache."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the cache without blocking the event loop."""
        with importing:
            from asyncio import to_thread  # noqa: PLC0415  32 ms

        await to_thread(self.close)

    def _on_miss(self) -> Resolver:
        if self._resolver is None:
            with importing:
                from kcache.kernels.resolver import Resolver  # noqa: PLC0415  18 ms

            warn_of_other_backend(self.opened)
            with self.engine.counters.lock:
                if self._resolver is None:
                    for_compiler = self._requests.for_compiler
                    self._resolver = Resolver(self._tiers, self.opened, for_compiler)
        return self._resolver


#: The cache that `compile` uses, under the key None. There is no lock for opening it, because a
#: lock that another thread holds during a fork would stay locked in the child. If several threads
#: open a cache at once, the first one is kept.
_shared: dict[None, KernelCache] = {}


def compile(
    source: str | os.PathLike[str],
    names: str | Sequence[str] = (),
    options: CompileOptions | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    source_name: str = "kernel.cu",
    **fields: Any,  # noqa: ANN401  those of CompileOptions
) -> CompiledKernel:
    """Return the compiled kernel. If it is not in the user's cache, compile it and cache it.

    The first call opens the same cache as `KernelCache()`, which remains open until the process
    ends. For another directory, other limits, `compile_many` or asyncio, make a `KernelCache`.

    `fields` are fields of `CompileOptions`, such as `arch="sm_90"`, and override the same fields of
    `options`. The other arguments, the errors and the guarantees are the same as those of
    `KernelCache.get_or_compile`.
    """
    cache = _shared.get(None) or _shared.setdefault(None, KernelCache())
    if options is None:
        options = CompileOptions(**fields)
    elif fields:
        options = options.replace(**fields)
    return cache.get_or_compile(source, names, options, headers=headers, source_name=source_name)
