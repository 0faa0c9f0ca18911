"""PrecompiledHeaders: the headers that sources begin with, parsed once and kept for this process.

What a source begins with, its *preamble*, are its comments and directives up to the first token of
anything else. After a plain, traced compile the preamble alone is compiled once more with
`--create-pch`; later sources with an equal preamble are compiled with `--use-pch`.

Measured on NVRTC 13.5, the reasons for what is done here:

*Nothing is revalidated.* A file given to `--use-pch` is used whatever has become of its headers:
edited, with other times, gone, shadowed by a new one, another outcome of `__has_include`, other
in-memory headers of the same names. The compiler compares the command line, the directives in
front and the address of its heap, no more. So a precompiled header is known by everything that a
request's key knows but the code, and its headers are checked before each use as those of a hit
are. Automatic ones (`--pch`) are as unchecked, keep files in the temporary directory, and can't be
told apart by us.

*The trace* is one of the options that must be equal. With it, a CUTLASS GEMM that uses a
precompiled header takes half as long again, for the events of its templates. So neither the
compile that makes one nor those that use it are traced. Which headers were read the plain compile
before has told, and nothing may be included after the preamble. In directives alone the compiler
goes on to the end of them; a null directive, or a token in a branch not taken, ends its part early.

*The outcome* is the same bytes, unless it has debug information (`-G`) or is LTOIR: those name
lambdas by a count of lines that leaves out what was precompiled. They are compiled plainly.

*Packing.* What `#pragma pack` has set is not restored: after a header that pushes and pops it, all
structures of the code are packed as in between, and after one that sets it for good, none are. With
a header that names it, everything is compiled plainly. CUB, CUTLASS and the CUDA headers have none.

*The log* lacks warnings of the preamble. They are those of the compile that made it, up to the line
which says so.

*The file* is an image of the compiler's heap, 448 MB for CUTLASS, and mapped: a damaged one crashes
the process (seen). So it has no name from the moment that it is there, and is used through its
descriptor. A full disk, a limit on file sizes or on memory fail the compile that makes it.

*The heap* has one address per process and size: setting the size (256 MB at first) moves it, and
what was made before is refused, at no harm, also beside running compiles. It is reserved, not
taken. A heap that is too small makes no file, and the compiler says how much it takes.

*Threads:* the compiler's frontend runs one compile at a time, with precompiled headers or without.
*Fork:* a child has the heap at the same address, and could use its parent's files; but it need not
outlive them. Other processes have it elsewhere and can't.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kcache.errors import CompileError
from kcache.nvrtc import compiler
from kcache.nvrtc.files import FileDigests, next_tick
from kcache.nvrtc.headers import UncacheableError
from kcache.nvrtc.manifest import Variant
from kcache.nvrtc.scan import scan, spliced
from kcache.util import log
from kcache.util.forks import after_fork

if TYPE_CHECKING:
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.dependencies import Tracker
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.trace import Trace

__all__ = ["PrecompiledHeaders", "preamble"]

#: Kept at once, and bytes of all their files: four times CUTLASS.
MAX_KEPT = 4
MAX_BYTES = 2 << 30
#: Bytes of the compiler's heap: what CUTLASS needs (446 MB), and the most it is raised to.
HEAP = 512 << 20
MAX_HEAP = 2 << 30
#: The temporary directory must have room for this many heaps.
SPARE_HEAPS = 2
#: Preambles that can't be precompiled are remembered up to this many.
_MAX_REFUSED = 1024

#: Options with which the outcome is not the same bytes.
_OTHER_BYTES = ("-G", "--device-debug", "-dlto", "--dlink-time-opt", "--gen-opt-lto")

_SPLICE = r"\\\r?\n"
_BLANK = re.compile(rf"(?:\s|{_SPLICE}|//(?:{_SPLICE}|[^\n])*+|/\*.*?\*/)*+", re.DOTALL)
#: One directive to the end of its line; comments that go on after it are no part of it.
_DIRECTIVE = re.compile(
    rf"(?:#|%:)(?:[ \t\f\v]|{_SPLICE}|/\*[^\n]*?\*/)*+([a-z_]+)"
    rf"((?:{_SPLICE}|/\*[^\n]*?\*/|//(?:{_SPLICE}|[^\n])*+|[^\n/]|/(?![/*]))*+)(?:\n|\Z)"
)
_OPENING = ("if", "ifdef", "ifndef")
_BETWEEN = ("elif", "elifdef", "elifndef", "else")
_FREE = ("include", "include_next", "define", "undef", "warning", "error")
#: Pragmas that say nothing of the declaration after them.
_PRAGMA = re.compile(r"\s*(?:once|message|(?:nv_)?diag_\w+|GCC|clang)\b")
_REMARK = re.compile(r"^Remark: The warnings can be suppressed with .*\n*", re.MULTILINE)

#: What a precompiled header is good for: the preamble, flags, name of the source, in-memory
#: headers, location and compiler.
_Key: TypeAlias = tuple[str, tuple[str, ...], str, tuple[tuple[str, str], ...], str, str]


class _RefusedError(Exception):
    """There is no precompiled header to be had; the message says why."""

    def __init__(self, reason: str, *, for_now: bool = False) -> None:
        super().__init__(reason)
        self.for_now = for_now


class _File(NamedTuple):
    """A file that the compiler made: descriptor, size of the heap that it is for, warnings."""

    fd: int
    heap: int
    log: str


class _Kept:
    """One precompiled header; its file goes when the last reference does."""

    __slots__ = ("__weakref__", "_closing", "_status", "file", "path", "trace", "variant")

    def __init__(self, file: _File, trace: Trace, variant: Variant) -> None:
        self.file = file
        self.path = f"/proc/self/fd/{file.fd}"
        self.trace = trace
        self.variant = variant
        self._closing = weakref.finalize(self, os.close, file.fd)
        self._status = _status(file.fd)

    @property
    def size(self) -> int:
        return self._status[0]

    def intact(self) -> bool:
        """Tell whether the descriptor is still that of the file, and the file what it was.

        If not, somebody has closed what is not theirs, and the number may be another file's now.
        """
        try:
            intact = _status(self.file.fd) == self._status
        except OSError:
            intact = False
        if not intact:
            self._closing.detach()
        return intact


def _status(fd: int) -> tuple[int, int, int, int]:
    status = os.fstat(fd)
    return (status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


class PrecompiledHeaders:
    """The precompiled headers of this process, made and used where a request asks for them.

    Nothing here makes a compile fail or changes its outcome: where anything is unexpected, there
    is no precompiled header, and the debug log says why.

    Threads: safe to share; one of those that miss with one preamble makes its header. Fork: the
    child starts with none. Crash: leaves no file behind but one that was just being made. Bounded:
    `MAX_KEPT` and `MAX_BYTES`, the least recently used goes first.

    Args:
        digests: the process's memory of file contents.
        tracker: makes a tracker of a request's headers.
    """

    def __init__(self, digests: FileDigests, tracker: Callable[[Request], Tracker]) -> None:
        self._digests = digests
        self._tracker = tracker
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._refused: set[_Key] = set()
        self._making: set[_Key] = set()
        after_fork(self)

    def after_fork(self) -> None:
        """Forget, in a child process, what the parent keeps, and its threads' lock."""
        self._lock = threading.Lock()
        self._kept = OrderedDict()
        self._making = set()

    def compile(self, request: Request) -> tuple[Compiled, Trace] | None:
        """Compile with the precompiled header of the request's preamble; None where there is none.

        The trace is that of the headers. None too if the compiler refuses the source: a plain
        compile tells why.
        """
        key = _key(request)
        kept = None if key is None else self._holding(key, request)
        if key is None or kept is None:
            return None
        try:
            compiled = compiler.compile_program(
                request.source,
                (f"--use-pch={kept.path}", *request.options.flags()),
                names=request.names,
                headers=request.headers,
                source_name=request.source_name,
            )
        except CompileError as error:
            if _around(error.log, "using", kept.path) is None:
                self._drop(key, kept, f"the compiler refuses it ({error})", refused=True)
            return None
        around = _around(compiled.log, "using", kept.path)
        if around is None:
            self._drop(key, kept, f"the compiler does not use it ({compiled.log})", refused=True)
            return None
        return replace(compiled, log=_with_warnings(kept.file.log, "".join(around))), kept.trace

    def make(self, request: Request, trace: Trace, start_ns: int) -> None:
        """Make the precompiled header of a request's preamble, if it has none.

        Args:
            request: it was compiled plainly a moment ago.
            trace: what that compile opened.
            start_ns: before that compile, on the file system's clock.
        """
        key = _key(request)
        if key is None:
            return
        with self._lock:
            if key in self._kept or key in self._refused or key in self._making:
                return
            self._making.add(key)
        try:
            kept = self._make(request._replace(source=key[0], names=()), trace, start_ns)
            with self._lock:
                self._kept[key] = kept
                self._evict()
        except _RefusedError as error:
            self._refuse(key, str(error), for_now=error.for_now)
        except OSError as error:  # nowhere to put the file
            self._refuse(key, str(error), for_now=True)
        finally:
            with self._lock:
                self._making.discard(key)

    # -- using -----------------------------------------------------------------------------------

    def _holding(self, key: _Key, request: Request) -> _Kept | None:
        """Return what is kept under `key`, if its headers are what they were."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
        if not kept.intact():
            self._drop(key, kept, "the file is another")
            return None
        if kept.file.heap != compiler.precompiled_heap():
            self._drop(key, kept, "the heap has moved")
            return None
        if not kept.variant.holds(request.search, self._digests, request.location):
            self._drop(key, kept, "a header has changed")
            return None
        return kept

    def _drop(self, key: _Key, kept: _Kept, reason: str, *, refused: bool = False) -> None:
        with self._lock:
            if self._kept.get(key) is kept:
                del self._kept[key]
        self._refuse(key, reason, for_now=not refused)

    def _refuse(self, key: _Key, reason: str, *, for_now: bool) -> None:
        log.debug("no precompiled headers for %s: %s", key[2], reason)
        if not for_now:
            with self._lock:
                if len(self._refused) >= _MAX_REFUSED:
                    self._refused.clear()
                self._refused.add(key)

    def _evict(self) -> None:
        size = sum(kept.size for kept in self._kept.values())
        while len(self._kept) > MAX_KEPT or size > MAX_BYTES:
            _, kept = self._kept.popitem(last=False)
            size -= kept.size

    # -- making ----------------------------------------------------------------------------------

    def _make(self, part: Request, trace: Trace, start_ns: int) -> _Kept:
        """Precompile a request that consists of a preamble.

        Raises:
            _RefusedError: it can't be done; OSError: there is no place for a file.
        """
        begun = next_tick()
        tracker = self._tracker(part)
        try:
            variant = Variant.of(tracker.from_trace(trace))
        except UncacheableError as error:
            raise _RefusedError(str(error)) from error
        if tracker.packs():
            raise _RefusedError("#pragma pack is not kept in one", for_now=True)
        kept = _Kept(_precompile(part), trace, variant)
        # It holds what the compile before it read only if nothing changed since that began; and it
        # told nothing, so that what came and went since it began counts too.
        if tracker.changed_since(start_ns) or tracker.changed_since(begun, silent=True):
            raise _RefusedError("headers changed meanwhile", for_now=True)
        return kept


def _precompile(part: Request) -> _File:
    """Make a file without a name. Raises like `PrecompiledHeaders._make`."""
    folder = tempfile.mkdtemp(prefix="kcache-pch-")
    path = os.path.join(folder, "headers")
    wanted = HEAP
    try:
        while True:
            heap = _raised_heap(wanted)
            if shutil.disk_usage(folder).free < SPARE_HEAPS * heap:
                raise _RefusedError("too little room for temporary files", for_now=True)
            made = compiler.precompile(
                part.source,
                part.options.flags(),
                path,
                headers=part.headers,
                source_name=part.source_name,
            )
            if not made.exhausted:
                break
            if made.heap <= heap or made.heap > MAX_HEAP:
                raise _RefusedError(f"{made.heap} bytes are needed")
            wanted = min(made.heap + made.heap // 4, MAX_HEAP)
        around = _around(made.log, "creating", path)
        if around is None:
            raise _RefusedError(f"the compiler makes none ({made.log})")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _File(fd, heap, around[0].strip(" \n"))
    except CompileError as error:
        raise _RefusedError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _raised_heap(size: int) -> int:
    """Raise the compiler's heap to `size` bytes at least; return what it is now."""
    with _heap_lock:
        heap = compiler.precompiled_heap()
        if heap < size:
            compiler.set_precompiled_heap(size)
            heap = compiler.precompiled_heap()
        return heap


def _key(request: Request) -> _Key | None:
    """Return what a precompiled header for the request is known by; None if it can have none."""
    options = request.options
    if not options.precompiled_headers or options.debug or options.lto:
        return None
    if any(option.strip().partition("=")[0] in _OTHER_BYTES for option in options.extra_options):
        return None
    begin = preamble(request.source)
    if begin is None:
        return None
    return (
        begin,
        options.flags(),
        request.source_name,
        tuple(request.headers.items()),
        request.location,
        request.compiler,
    )


def preamble(source: str) -> str | None:
    """Return the part of a source that can be precompiled: all its includes, and no other code.

    None if it includes nothing, or if it may after the first token that is no directive's. Errs on
    that side: ends before whatever might end the compiler's own idea of it, inside a branch too.
    """
    end = at = depth = 0
    while True:
        blank = _BLANK.match(source, at)
        directive = _DIRECTIVE.match(source, at if blank is None else blank.end())
        if directive is None or (depth := _depth_after(directive, depth)) < 0:
            break
        at = directive.end()
        end = at if depth == 0 else end
    begin, rest = (scan(spliced(part.encode())) for part in (source[:end], source[end:]))
    if "??" in source:  # a trigraph may hide a directive
        return None
    if rest.includes or rest.computed or rest.embed or "import" in source[end:]:
        return None
    return source[:end] if begin.includes or begin.computed else None


def _depth_after(directive: re.Match[str], depth: int) -> int:
    """Return in how many conditionals a directive leaves us; -1 if it does not belong here."""
    name = directive[1]
    if name in _OPENING:
        return depth + 1
    if name == "endif":
        return depth - 1
    if name in _BETWEEN:
        return depth or -1
    allowed = name in _FREE or (name == "pragma" and _PRAGMA.match(directive[2]) is not None)
    return depth if allowed else -1


def _around(text: str, doing: str, path: str) -> tuple[str, str] | None:
    """Return what a log says before and after telling of a precompiled header; None if nothing."""
    line = rf'^".*": {doing} precompiled header file "{re.escape(path)}"\n*'
    parts = re.split(line, text, maxsplit=1, flags=re.MULTILINE)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _with_warnings(warnings: str, text: str) -> str:
    """Return a log with the preamble's warnings before it; the compiler remarks on them once."""
    if not warnings:
        return text.strip(" \n")
    if _REMARK.search(warnings):
        text = _REMARK.sub("", text, count=1)
    return f"{warnings}\n\n{text}".strip(" \n")


_heap_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Forget a lock that a thread of the parent may have held."""
    global _heap_lock  # noqa: PLW0603
    _heap_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
