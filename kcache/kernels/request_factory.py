"""Request factory: turns the arguments of a call into the request that the cache works on."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kcache import environment
from kcache.errors import ArgumentTypeError, ConfigError
from kcache.nvrtc import library
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.request import CompileRequest, Request, compile_request, read_source
from kcache.util import log
from kcache.util.forks import importing
from kcache.util.memory_tier import MemoryTier
from kcache.warm.recording import RequestRecorder

if TYPE_CHECKING:
    from kcache.nvrtc.request import Caller

#: Bytes that a remembered request counts for in `memory_size`, in addition to its source text.
_REQUEST_OVERHEAD = 2048
#: Maximum number of characters of a path (PATH_MAX of Linux).
_LONGEST_PATH = 4096


class Requests:
    """Checks arguments, makes requests from them, and remembers repeated requests.

    Threads: may be called from several threads at the same time.

    Args:
        memory_size: maximum total size of the remembered requests, in bytes.
        record_to: path of a file that every request is recorded in; None to record nothing.
        relocatable: whether kernels may be used in other directories; see `kcache.nvrtc.places`.

    Attributes:
        recorders: the recorders, which get every request, new or remembered.
        closed: whether the cache was closed; then `make` raises an error.
    """

    def __init__(
        self, memory_size: int, *, record_to: str | None = None, relocatable: bool = True
    ) -> None:
        self._relocatable = relocatable
        self._known: MemoryTier[tuple[object, ...], Request] = MemoryTier(memory_size)
        self._compiler: str | None = None
        self.recorders: tuple[RequestRecorder, ...] = ()
        self.closed = False
        if record_to is not None:
            self.record(record_to)

    def make(
        self,
        source: str | os.PathLike[str],
        names: str | Sequence[str] = (),
        options: CompileOptions | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        extra_key: bytes = b"",
        source_name: str = "kernel.cu",
        caller: Caller | None = None,
        record: bool = True,
    ) -> Request:
        """Return the request for the arguments.

        A request without `headers` and `extra_key` is remembered, and returned again by an equal
        call. With `caller`, the request is made for that process instead of this one. Unless
        `record` is false, the recorders get the request.

        Raises:
            OSError: the source is a path, and its file can't be read.
            ConfigError: either an argument is not allowed, or no architecture is given and there is
                no GPU, or the cache was closed.
            CompilerNotFoundError: NVRTC is not installed.
        """
        if self.closed:
            self.require_open()
        call: tuple[object, ...] | None = None
        request = None
        if not isinstance(source, str) and isinstance(source, os.PathLike):
            source, source_name = read_source(source, source_name)
        if not (headers or extra_key):
            try:
                expressions = tuple(names) if isinstance(names, list) else names
                arch = gpu_arch(options) if options is None or options.arch is None else None
                call = (source, expressions, options, arch, source_name, caller)
                known = self._known.get(call)
                request = None if known is None else known.value
            except (TypeError, AttributeError, ConfigError):  # the checks below raise the error
                call = None
        # A remembered request is valid only in the same directory, and with the same variables.
        if (
            request is None
            or not (request.anywhere or request.is_here())
            or (caller is None and request.variables != environment.in_key())
        ):
            _check_places(source, names, options)
            if caller is None and self._compiler is None:
                self._compiler = library.require().identity
            request = Request.make(
                source,
                names,
                with_target(options),
                headers,
                extra_key,
                source_name=source_name,
                compiler=(self._compiler or "") if caller is None else caller.compiler,
                caller=caller,
                relocatable=self._relocatable,
            )
            if call is not None:
                self._known.put(call, request, 2 * len(request.source) + _REQUEST_OVERHEAD)
        if record and self.recorders:
            self.note(request)
        return request

    def note(self, request: Request) -> None:
        """Pass a request to the recorders."""
        for recorder in self.recorders:
            recorder.note(request)

    def record(self, path: str | os.PathLike[str]) -> RequestRecorder:
        """Record every request into a file until the returned recorder is closed."""
        recorder = RequestRecorder(path)
        self.recorders = (*(each for each in self.recorders if not each.closed), recorder)
        return recorder

    def of_all(self, given: Iterable[object]) -> list[Request]:
        """Return the request for each item of `given`.

        Raises:
            ConfigError: an item has an argument that is not allowed; the message names the item.
            ArgumentTypeError: `given` is a single request, or is not iterable.
        """
        asked: object = given
        single = isinstance(asked, (str, bytes, os.PathLike, Mapping, CompileRequest))
        if single or not isinstance(asked, Iterable):
            raise ArgumentTypeError(
                "requests: expected a list of requests, even for a single request, "
                f"got {type(given).__name__}"
            )
        made: list[Request] = []
        for number, each in enumerate(given):
            try:
                made.append(self.of(compile_request(each)))
            except ConfigError as error:
                raise type(error)(f"requests[{number}]: {error}") from error
        return made

    def of(
        self, call: CompileRequest, caller: Caller | None = None, *, record: bool = True
    ) -> Request:
        """Return the request for the arguments in `call`, or raise the same errors as `make`."""
        return self.make(**call._asdict(), caller=caller, record=record)

    def for_compiler(self, request: Request, identity: str) -> Request:
        """Return `request` for the compiler with this identity, which has just compiled it.

        This is needed if the file of NVRTC was replaced after kcache had identified it, because
        kernels of the new NVRTC have other keys. All remembered requests are forgotten.
        """
        log.debug("the compiler was replaced: it is %s now", identity)
        if request.caller is None:
            self._compiler = identity
        self._known.clear()
        return request.for_compiler(identity)

    def require_open(self) -> None:
        """Raise ConfigError if the cache was closed."""
        if self.closed:
            raise ConfigError("this KernelCache was closed; open another one for more requests")

    def forget(self) -> None:
        """Forget the remembered requests."""
        self._known.clear()


def _check_places(source: object, names: object, options: object) -> None:
    """Raise an error if an argument is in the wrong place; the message names the right place.

    Raises:
        ArgumentTypeError: `names` is a `CompileOptions`, or `options` is neither that nor None.
        ConfigError: the source text looks like a path.
    """
    if isinstance(names, CompileOptions):
        raise ArgumentTypeError(
            "names: expected name expressions, got CompileOptions; pass it as options=..."
        )
    if options is not None and not isinstance(options, CompileOptions):
        raise ArgumentTypeError(
            f"options: expected kcache.CompileOptions, got {type(options).__name__}"
        )
    is_short = isinstance(source, str) and len(source) < _LONGEST_PATH
    if is_short and re.fullmatch(r"[^\s;{}()#]+\.(cu|cuh|cpp|cc|cxx|h|hpp)", str(source)):
        raise ConfigError(
            f"source is the text {source!r}, which looks like a path; "
            f"expected CUDA C++ source, or pathlib.Path({source!r})"
        )


def with_target(options: CompileOptions | None) -> CompileOptions:
    """Return `options` with the current GPU's architecture, unless they already name one.

    Raises:
        ConfigError: an architecture is needed, but there is no GPU.
    """
    arch = gpu_arch(options)
    options = CompileOptions() if options is None else options
    return options if arch is None else options.replace(arch=arch)


def gpu_arch(options: CompileOptions | None) -> str | None:
    """Return the current GPU's architecture, or None if `options` already name an architecture.

    Raises:
        ConfigError: an architecture is needed, but there is no GPU.
    """
    if options is None or (
        options.arch is None and not (options.extra_options and options.target is not None)
    ):
        return _from_driver()()
    return None


@functools.cache
def _from_driver() -> Callable[[], str]:
    with importing:
        from kcache.util.cuda_driver import current_arch  # noqa: PLC0415  2 ms

    return current_arch
