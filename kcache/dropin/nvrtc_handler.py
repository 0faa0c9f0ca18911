"""NvrtcHandler: turns an NVRTC program into a request, and a kernel into NVRTC's answer.

If it can't answer exactly as NVRTC would, it declines with a reason, and the interface library
calls the real NVRTC.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

from kcache import environment
from kcache.dropin.protocol import Answer, DeclinedError, Program, standing
from kcache.errors import CompileError, MissError
from kcache.kernel_cache import KernelCache
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.kernels.lookup import manifest_type
from kcache.nvrtc import compiler, library
from kcache.nvrtc.options import BUNDLED, CompileOptions, parse_options, without_automatic_pch
from kcache.nvrtc.request import Caller, CompileRequest
from kcache.nvrtc.search import are_own_files
from kcache.util import log
from kcache.util.open_file import open_own, replacing
from kcache.util.path_safety import make_private

#: NVRTC's major version -> the architecture that it compiles for if no option names one.
_DEFAULT_ARCH = {12: "compute_52", 13: "compute_75"}
#: The beginning of a warning in the log of NVRTC 12.8 and later. NVRTC writes this warning if an
#: option names an old architecture, but not if the old architecture is the default.
_DEPRECATED = b"nvrtc: warning: Architectures prior to "
#: The name that NVRTC gives to a program that is created without a name.
_DEFAULT_NAME = b"default_program"
#: Variables of the program that change NVRTC's output. NVRTC also reads MAKEFLAGS (how many
#: compiles run at once) and CUDA_CACHE_DISABLE (NVRTC's own cache), which do not change its output.
_DECISIVE = (*environment.IN_KEY, "NVRTC_PREPEND_FLAGS", environment.WORKING_DIRECTORY)
#: A program is declined if the name of an option has one of these parts: such options read or write
#: files that kcache does not track, or make outputs that kcache does not keep. The options in
#: `_PASSED_ON` pass their value to another tool, so a program is also declined if such a value has
#: one of these parts.
_UNFOLLOWED = (
    *("optf", "preinclude", "pch", "--time", "time-trace", "options-file"),
    *("keep", "optix", "tile"),
)
_PASSED_ON = ("--ptxas-options", "-Xcudafe")
#: A text in the log of each compile that fails before it has made PTX. A compile that fails later,
#: in ptxas, is declined, because the program could ask for the PTX, which kcache does not have.
_FAILED_EARLY = b" detected in the compilation of "
_SUCCESS, _COMPILATION, _INVALID_OPTION = 0, 6, 5
#: Version and architectures of an NVRTC build. A program asks for them before its first compile.
#: They are kept in small files, because loading NVRTC for the answer would take 100 ms.
Release = tuple[tuple[int, int], tuple[int, ...]]
#: The largest number of architectures in such a file, and the file's largest size in bytes.
_MOST, _MOST_BYTES = 64, 4096


class NvrtcHandler:
    """Answers programs from a cache.

    Threads: several threads may use one object.

    Args:
        cache: the cache.
        folder: the folder in which version and architectures of NVRTC builds are kept; None to
            keep them nowhere.
    """

    def __init__(self, cache: KernelCache, folder: str | None = None) -> None:
        self.cache = cache
        self._folder = folder
        self._stamps: dict[bytes, tuple[int, int, int]] = {}
        self._about: dict[bytes, tuple[str, Release]] = {}
        self._standing = standing()

    def answer(self, program: Program) -> Answer:
        """Return NVRTC's answer to a program, from the cache or, on a miss, by a compile.

        If the setting `on_miss` is `error`, a program that can't be answered gets a compile error,
        so that the real NVRTC does not compile it either.

        Raises:
            DeclinedError: the answer might differ from that of the real NVRTC.
        """
        try:
            return self._answer(program)
        except DeclinedError as error:
            on_miss, source = self.cache.config.on_miss
            if on_miss != "error":
                raise
            what = f"the cache can't answer this program, and {source}={on_miss} allows no compile"
            return _not_compiled(f"{what}: {error}")

    def _answer(self, program: Program) -> Answer:
        try:
            self._check_standing(program.standing)
            plain = self._without_pch(program)
            self._check(plain)
            kernel = self.cache._get_or_compile_for(*self._asked(plain))
            return _answer(program, kernel)
        except DeclinedError:
            raise
        except MissError as error:
            return _not_compiled(str(error))
        except CompileError as error:
            return _failed(program, error)
        except Exception as error:  # whatever it is, the program must get an answer
            log.debug("the real NVRTC has to compile a program, because of %r", error)
            raise DeclinedError(f"{type(error).__name__}: {error}") from error

    def about(self, path: bytes, standing: bytes) -> Release:
        """Return version and architectures of the NVRTC at `path`, which a client has sent.

        Raises:
            DeclinedError, KcacheError, OSError: version and architectures can't be determined.
        """
        self._check_standing(standing)
        return self._known(path)[1]

    def _known(self, path: bytes) -> tuple[str, Release]:
        """Return the identity of the NVRTC at `path`, and its version and architectures.

        Raises:
            DeclinedError: the file was replaced after its first use; OSError: it does not exist.
            KcacheError: a worker can't load it.
        """
        self._check_stamp(path)
        if path not in self._about:
            name = os.fsdecode(path)
            identity = library.at(name).identity
            about = recall(self._folder, identity)
            if about is None:
                hello = compiler.hello(name)
                about = hello.version, hello.archs
                remember(self._folder, identity, about)
            self._about[path] = identity, about
        return self._about[path]

    def warm_up(self) -> None:
        """Load what the first hit needs, while the program is still starting.

        With these modules loaded, the first hit took 3 ms instead of 20 ms. The whole warm-up,
        together with a waiting thread and an early connection, reduced the time of CuPy's first
        kernel from 3.9 ms to 3.0 ms (22 and 23 November 2026, two cores shared by others).
        """
        manifest_type()
        found = library.find()  # most likely the NVRTC that the program will use
        if found is not None and recall(self._folder, found.identity) is not None:
            self._rehearse(os.fsencode(found.path))

    def _rehearse(self, path: bytes) -> None:
        """Look up a program that no cache contains, and stop before the compile.

        So everything that a hit needs is loaded.
        """
        (major, _), _ = self.about(path, self._standing)
        text = b"// no program has this source\n"
        self.cache._rehearse_for(
            *self._asked(Program(major, path, b"/", self._standing, {}, text, b"", [], [], []))
        )

    # -- what can be answered exactly --------------------------------------------------------------

    def _without_pch(self, program: Program) -> Program:
        """Return the program without the options of automatic precompiled headers.

        These options change only the log. The status that `nvrtcGetPCHCreateStatus` then returns is
        that of a program for which NVRTC used an existing precompiled header. NVRTC before 12.8
        rejects the options, and every release rejects a directory that it can't write to. In both
        cases, the program is returned with its options, and `_check` declines it.
        """
        options, taken = without_automatic_pch([*map(_decoded, program.options)])
        folders = [text.strip().partition("=")[2] for text in taken if "pch-dir" in text]
        here = os.fsdecode(program.directory)
        if not all(os.access(os.path.join(here, folder, "."), os.W_OK) for folder in folders):
            return program
        if taken and self._known(program.library)[1][0] < (12, 8):
            return program
        return program._replace(options=[option.encode() for option in options])

    def _check(self, program: Program) -> None:
        for option in parse_options([*map(_decoded, program.options)]):
            text = str(option) if option.name in _PASSED_ON else option.name
            unknown = option.name == BUNDLED and option.bundled is None
            if unknown or any(part in text for part in _UNFOLLOWED):
                raise DeclinedError(f"option {option.name}")
        headers = (text for _, text in program.headers)
        texts = program.source, program.name, *program.options, *headers
        if any(map(are_own_files, texts)):
            raise DeclinedError("the source, a header or an option has a path in /proc or /dev")
        if len(dict(program.headers)) != len(program.headers):
            raise DeclinedError("two headers with the same name")
        if self._known(program.library)[1][0][0] != program.major:
            raise DeclinedError("NVRTC is not of the major version that the program expects")

    def _check_standing(self, standing: bytes) -> None:
        """Raise DeclinedError if the client's standing differs from that of this process.

        A path could then name another file for the client, or the client could have other rights.
        """
        if standing != self._standing:
            raise DeclinedError(
                "the program has another user, root directory or mount namespace than the server"
            )

    def _check_stamp(self, path: bytes) -> None:
        """Raise DeclinedError if the library at `path` was replaced after its first use.

        The workers and the program may have loaded the earlier library.
        """
        status = os.stat(path)
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if self._stamps.setdefault(path, stamp) != stamp:
            raise DeclinedError("NVRTC was replaced after its first use")

    # -- asking the cache --------------------------------------------------------------------------

    def _asked(self, program: Program) -> tuple[Caller, CompileRequest]:
        """Return the caller of a program (its NVRTC, directory and variables), and the request.

        Raises:
            DeclinedError: kcache can't make a request of the program.
        """
        options = CompileOptions(extra_options=tuple(map(_decoded, program.options)))
        if options.target is None:
            default = _DEFAULT_ARCH.get(program.major)
            if default is None or any("arch" in each.name for each in options.parsed):
                raise DeclinedError("an option has an architecture in an unknown form")
            options = options.replace(arch=default)
        around = _caller(program, self._known(program.library)[0])
        call = CompileRequest(
            # A request must not have an empty source. A comment compiles to the same result.
            _decoded(program.source) if program.source.strip() else "//\n",
            tuple(_decoded(name) for name in dict.fromkeys(program.expressions)),
            options,
            {_decoded(name): _decoded(text) for name, text in program.headers},
            source_name=_decoded(program.name or _DEFAULT_NAME),
        )
        return around, call


def _caller(program: Program, compiler: str) -> Caller:
    environ = program.environment
    environment = tuple(
        (name, None if (value := environ.get(name.encode())) is None else os.fsdecode(value))
        for name in _DECISIVE
    )
    path, directory = os.fsdecode(program.library), os.fsdecode(program.directory)
    return Caller(path, compiler, directory, environment)


def _answer(program: Program, kernel: CompiledKernel) -> Answer:
    if kernel.log and kernel.raw_log is None:
        raise DeclinedError("the cache has no exact copy of the log")
    lowered = [(a.encode(), b.encode()) for a, b in kernel.lowered_names.items()]
    return Answer(
        _SUCCESS,
        (kernel.ptx or b"") + b"\0",
        kernel.cubin or b"",
        kernel.ltoir or b"",
        _log(program, kernel.raw_log or b"\0"),
        lowered,
        kernel.cached,
    )


def _log(program: Program, raw_log: bytes) -> bytes:
    """Return the log as NVRTC would write it for the options of `program`; see `_DEPRECATED`."""
    named = parse_options([*map(_decoded, program.options)]).arch is not None
    if raw_log.startswith(_DEPRECATED) and not named:
        return raw_log.partition(b"\n")[2]
    return raw_log


def _failed(program: Program, error: CompileError) -> Answer:
    result, raw_log = error.result, error.raw_log
    if result not in (_COMPILATION, _INVALID_OPTION) or not raw_log:
        raise DeclinedError("the compile failed with an unusual result code or without a log")
    if result == _COMPILATION and _FAILED_EARLY not in raw_log:
        raise DeclinedError("the compile failed after it made PTX")
    return Answer(result, b"\0", b"", b"", _log(program, raw_log), [], hit=False)


def _not_compiled(reason: str) -> Answer:
    """Return a compile error with `reason` as its log."""
    log = f"kcache: {reason}\n".encode() + b"\0"
    return Answer(_COMPILATION, b"\0", b"", b"", log, [], hit=False)


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DeclinedError("a text of the program is not UTF-8") from None


# -- versions and architectures of NVRTC builds ----------------------------------------------------


def recall(folder: str | None, identity: str) -> Release | None:
    """Return what `remember` has stored about a build, or None if that is absent or damaged."""
    if folder is None:
        return None
    try:
        file = open_own(_path(folder, identity), os.O_RDONLY)
        major, minor, *archs = map(int, os.read(file.fd, _MOST_BYTES).split())
    except (OSError, ValueError):
        return None
    return ((major, minor), tuple(archs)) if 0 < len(archs) <= _MOST else None


def remember(folder: str | None, identity: str, about: Release) -> None:
    """Store version and architectures of a build in `folder`; ignore an error of the disk."""
    if folder is None:
        return
    with suppress(OSError):
        make_private(folder)
        with (
            replacing(_path(folder, identity)) as draft,
            open(draft, "w", encoding="ascii") as file,
        ):
            print(*about[0], *about[1], file=file)


def _path(folder: str, identity: str) -> str:
    digest = hashlib.sha256(identity.encode(), usedforsecurity=False).hexdigest()
    return os.path.join(folder, f"nvrtc-{digest[:32]}.txt")
