"""KernelCache: the front door, which connects the parts of a cache."""

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

#: The share of the memory tier that remembers requests, so that a repeated request is not hashed
#: again.
_REQUEST_SHARE = 0.25


class KernelCache:
    """Compiled CUDA kernels, compiled once and shared by every process of a user.

    kcache looks for a kernel in memory, then in the backend. If it is in neither, NVRTC compiles it
    once. All threads and processes that ask for the same kernel wait for that compile. A cached
    kernel is returned only if the source, the options, the compiler and every header that was read
    are the same as at its compile. Errors of the backend never make a compile fail.

    Threads: safe to share, but not in a signal handler. Processes: any number may share a
    directory. Crash: a process may be killed at any instant; nothing needs repair after that, and
    its workers end with it. Fork: the child may use the cache, and gets workers of its own.

    Args:
        directory: the directory of the cache; by default `KCACHE_DIR`, else a directory in the
            user's cache directory.
        backend: the name of a backend, or a `Backend`; `"file"` by default.
        max_size: the cap, in bytes or as text such as `"512MB"`; 1 GiB by default. The stored bytes
            never exceed the cap; with the backends file and zstd, each concurrent writer may exceed
            it by one entry.
        memory_size: the size of the memory tier; 64 MiB by default, 0 switches it off.
        read_only: use the stored entries, and write nothing.
        disable: compile every time, and neither read nor write the cache.
        recache: compile every time, and replace the stored entries.
        header_check: `"always"`, or `"once"` to check a request's headers once per process.
        relocation: `"on"`, or `"off"` to use each kernel only in the directories that it was
            compiled in. With `"on"`, a kernel whose outputs show none of its directories is also
            used in other checkouts, containers and machines whose headers are the same.
        wait: how many seconds to wait while another thread or process compiles the same kernel; 300
            by default, 0 never waits. After a timeout, one of those that wait compiles it, and the
            others wait once more for that one.
        workers: how many compiles may run at a time; by default one for each usable core. Compiles
            run in worker processes, which all caches of this process share. With 0, this process
            compiles, and the results are not cached.
        compile_timeout: how many seconds one compile may take before it ends with a CompileError.
        on_miss: `"compile"`, or `"error"` to raise a MissError with the reason of the miss.
        remote: addresses of the caches that are asked, in order, for a kernel that this cache does
            not have: layers (`"file:///opt/kernels"`), and remotes (`"https://"`, `"redis://"`,
            `"s3://"`, ...). By default `KCACHE_REMOTE`; `()` for none.

    An argument overrides the environment, and the environment overrides what is saved in the
    directory (`kcache config --set`). A wrong value in the environment or the directory is not an
    error: kcache logs one warning and ignores it. If `KCACHE_DIR` can't be used, this process
    caches in memory alone.

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
            source: CUDA C++ source text, or the path (`pathlib.Path`) of a file that holds it. The
                path is then the source's name, unless `source_name` is given.
            names: one or several name expressions, such as `"axpy<float>"`. They instantiate
                templates, and `CompiledKernel.lowered_names` maps each to its mangled name.
            options: see `CompileOptions`.
            headers: in-memory headers, include name -> text.
            extra_key: bytes that become part of the key, for anything that kcache can't see.
            source_name: the name of the source in the compiler's messages. Headers in quotes are
                searched in its directory, which is the working directory by default.

        Raises:
            ConfigError: an argument is not allowed, or there is neither an architecture nor a GPU.
            CompileError: the compiler rejected the source; `.log` has its whole log.
            MissError: the kernel is not cached, and `on_miss` is `"error"`.
            CompilerNotFoundError: NVRTC is not installed.
            KcacheError: the process has no file descriptors left.
            OSError: the source is a path, and its file can't be read.
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
                raise KcacheError(f"kcache has no descriptors left: {error}") from error
            raise

    def _get_or_compile_for(self, around: Caller, call: CompileRequest) -> CompiledKernel:
        """Return the kernel that a program under the drop-in requests; `around` describes it."""
        started = time.perf_counter()
        return self._answer(self._requests.of(call, around), started)

    def _answer(self, request: Request, started: float) -> CompiledKernel:
        return self._tiers.hit(request, started) or self._on_miss().get(request)

    def _rehearse_for(self, around: Caller, call: CompileRequest) -> None:
        """Look up a kernel that is not cached, uncounted, to warm up the code path of a hit."""
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
        """Do the same as `get_or_compile`, without blocking the event loop.

        Tasks that request the same kernel at the same time share one compile. A cancelled task
        stops waiting, but the compile continues for the other tasks and for the cache. If the
        cache is closed first, its kernel is not stored.

        The arguments and errors are those of `get_or_compile`.
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
        """Return a kernel, or the error of its compile, for each request, in order.

        `jobs` threads compile the kernels that are not in the cache. Equal requests are compiled
        once. Processes with the same requests share the work: each compiles in a different order.

        Args:
            requests: each a `CompileRequest`, source text, a path, a tuple of its fields in their
                order, or a mapping of its fields.
            jobs: how many compiles run at the same time, at least 1; by default one for each usable
                core.
            progress: called in this thread with (finished requests, all requests).

        Raises:
            ConfigError: a request has an argument that is not allowed; the message names the
                request. Nothing was compiled.
            CompilerNotFoundError: NVRTC is not installed.
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
        """Return the compiled kernel if it is in the cache, else None. Never compile.

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

        Arguments and errors are the same. The call compiles nothing, changes nothing, and is
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
        """Record every request in a `with` block, for `kcache warm`.

        The first request for each kernel appends one line to the file at `path`, even if it is a
        hit. Several processes may record into one file. If the file can't be written, kcache logs
        one warning. With `KCACHE_RECORD`, requests are recorded from the start, without this
        method.
        """
        return closing(self._requests.record(path))

    @property
    def directory(self) -> Path | None:
        """The directory of the cache, or None for a `Backend` that the caller made."""
        if self.opened.path is None:
            return None
        with importing:
            from pathlib import Path  # noqa: PLC0415  4 ms

        return Path(self.opened.path)

    @property
    def size_bytes(self) -> int:
        """The stored bytes of all processes."""
        return self.engine.size_bytes

    @property
    def size_mb(self) -> float:
        """The stored megabytes (of 1,000,000 bytes) of all processes."""
        return self.engine.size_bytes / 1e6

    @property
    def entry_count(self) -> int:
        """The number of stored entries: kernels, and one manifest per source with includes."""
        return self.engine.entry_count

    def stats(self) -> Stats:
        """Return the counts of this object. `kcache stats` prints those of all processes."""
        return self.engine.stats()

    def total_stats(self) -> Stats:
        """Return the counts of all processes that use this directory; zeros if unreadable."""
        return self.engine.total_stats()

    def print_info(self, file: TextIO | None = None) -> None:
        """Print the directory, the size and the counts of the cache to `file` or stdout."""
        with importing:
            from kcache.admin.info import format_info  # noqa: PLC0415  20 ms

        where = self.opened.path or "(none)"
        text = format_info(self.engine, directory=where, backend=self.opened.name)
        print(text, file=sys.stdout if file is None else file)

    def clear(self) -> int:
        """Delete every entry in memory and in the backend, and return their number."""
        self.clear_memory()
        return self.engine.clear()

    def clear_memory(self) -> None:
        """Empty the memory tier of this process. The backend keeps its entries."""
        self._requests.require_open()
        self._requests.forget()
        self.engine.memory.clear()

    def trim(
        self, max_size: int | str | None = None, *, older_than: float | str | None = None
    ) -> int:
        """Evict the coldest entries until at most `max_size` bytes are stored; return bytes freed.

        `max_size` is 90 % of the cap by default. `older_than` is seconds, or text such as `"30d"`:
        entries that were not used for that long are evicted first. After that, others are evicted
        only if `max_size` is given.

        Raises:
            ConfigError: `max_size` is not a size, or `older_than` not an age.
        """
        self._requests.require_open()
        return self.engine.trim(max_size, older_than=older_than)

    def close(self) -> None:
        """Write the statistics and release the backend. Idempotent.

        After that, a request, `clear` and `trim` raise a ConfigError. A compile that is running is
        finished, and its kernel is not stored.
        """
        self._requests.closed = True
        if self._async is not None:
            self._async.close()
        if self._resolver is not None:
            self._resolver.close()
        self._tiers.close()
        self.engine.close()

    def __reduce__(self) -> NoReturn:
        """Refuse: a cache is opened where it is used."""
        raise TypeError(
            "a KernelCache can't be pickled; open the same directory in the other process: "
            f"kcache.KernelCache({self.opened.path!r})"
        )

    def __repr__(self) -> str:
        """Return the directory and the size of the cache; never raise an exception."""
        try:
            usage = self.engine.backend.usage()
            entries, size = str(usage.entries), format_size(usage.bytes)
        except (KcacheError, OSError):
            entries, size = "unknown", "unknown"
        size = f"{size} of {format_size(self.engine.max_size)}"
        named = f"{self.opened.path!r}, backend={self.opened.name!r}"
        return f"KernelCache({named}, entries={entries}, size={size!r})"

    def __enter__(self) -> Self:
        """Return the cache itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the cache itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close, without blocking the event loop."""
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


#: The cache of `compile`, under no name. If several threads open it at once, one remains: a lock
#: that a thread holds during a fork would stay locked in the child.
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
    """Return a compiled kernel from the cache of the environment, or compile it and cache it.

    The first call opens the cache that `KernelCache()` opens; it stays open until the process ends.
    For another directory, other limits, `compile_many` or asyncio, make a `KernelCache`.

    `fields` are those of `CompileOptions`, such as `arch="sm_90"`; they replace those of `options`.
    The other arguments, the errors and the guarantees are those of `KernelCache.get_or_compile`.
    """
    cache = _shared.get(None) or _shared.setdefault(None, KernelCache())
    if options is None:
        options = CompileOptions(**fields)
    elif fields:
        options = options.replace(**fields)
    return cache.get_or_compile(source, names, options, headers=headers, source_name=source_name)
