"""Recording: what one run of nvcc asked the system, and what it wrote, as recorded by the recorder.

`native/recorder.c` lists the kinds of records. If a tool did anything that the recorder can't
follow, the recording is rejected, and the result of the compile is not stored.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc.answers import Answers, above, alike, grouped, same
from kcache.nvrtc.files import FileDigests, stamp_of
from kcache.nvrtc.search import ABSOLUTE, RootedPath

if TYPE_CHECKING:
    from kcache.nvcc.request import Start

#: The answers about a path that does not exist.
_MISSING = {str(-errno.ENOENT), str(-errno.ENOTDIR)}
#: Files that are the same for all users, or that no output depends on.
_HARMLESS = re.compile(r"/dev/(null|tty|u?random)$|/proc/(self/|cpuinfo$|meminfo$)|/sys/devices/")
_SYSTEM = re.compile(r"/(dev|proc|sys)/")
#: Matches a program and a clock that this program reads in every compile, although no output
#: depends on it. If the source contains the date or the time, the compilers read other clocks.
_CLOCKS = re.compile(
    r"(cicc|cudafe\+\+|ptxas|fatbinary|nvlink|nvcc|sh|dash|bash) |(cc1|cc1plus) gettimeofday$"
)
#: Programs whose output describes this machine.
_ABOUT_MACHINE = re.compile(r"__nvcc_device_query|nvidia-smi")
#: Options of the tools that make an output valid at one location only. Objects for a later link of
#: device code contain names that must be unique. Debug information and bytecode contain names of
#: directories, and may be compressed.
_BINDING = re.compile(
    r"--device-[cw]\b|[\x1f ]--?[fd]?lto\b|\x1f-g(?!enerate)[^\x1f]*\x1f|--device-debug"
)
#: Subdirectories for kinds of processors, in which the dynamic loader also looks for libraries.
_VARIANTS = (
    "glibc-hwcaps",
    "tls",
    "x86_64",
    "haswell",
    "avx512_1",
    "xeon_phi",
    "aarch64",
    "atomics",
)
_LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
#: Matches where a path or one of its parent directories ends.
_ENDS = re.compile(r"(?<=[^/])(?=/|$)")
_ELF = b"\x7fELF"
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.preload")


class RefusedError(Exception):
    """The recording can't be used; the message gives the reason."""


class Record(NamedTuple):
    """One record: kind, process, path as the tool named it, and answer."""

    kind: str
    process: str
    path: str
    answer: str


class Recording:
    """The records of one run of nvcc, sorted by kind.

    Args:
        start: the start of nvcc that was recorded.
        raw: the records.

    Attributes:
        outputs: absolute path of each file that was written and still exists -> whether it is a new
            file: either an old file at this path was removed first, or another file was renamed to
            this path.
        shown: the numbers of the roots whose paths are in the preprocessed source text.
        bound: whether the outputs may contain the path of any root, or must differ between
            locations.
        variables: the names of the environment variables that the tools read.
        has_lines: whether outputs have line tables, which contain the paths of roots.

    Raises:
        RefusedError: a tool did something that can't be followed; so the result may depend on more
            than was recorded.
    """

    def __init__(self, start: Start, raw: bytes) -> None:
        self._start = start
        self._files: dict[str, tuple[int, ...] | None] = dict.fromkeys(
            path for path in _LOADER_FILES if os.path.exists(path)
        )
        self._missing = {path for path in _LOADER_FILES if not os.path.exists(path)}
        self._present: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._access: dict[tuple[str, int], bool] = {}
        self._resolved = {start.path(start.program)}
        self.variables: set[str] = set()
        self._written: dict[str, bool] = {}
        self._removed: set[str] = set()
        self._programs: dict[str, str] = {}
        self._libraries: set[str] = set()
        self._folders: set[str] = set()
        self._searched: set[str] = set()
        self._starts = self._began = 0
        self.shown: set[int] = set()
        self.bound = self.has_lines = False
        temporary = start.environment.get("TMPDIR") or "/tmp"
        self._temporary = start.path(temporary).rstrip("/")
        for record in _records(raw):
            self._take(record)
        if self._began != self._starts + 1:
            raise RefusedError("a program was started that could not be recorded")
        self.outputs = dict(self._outputs())

    # -- reading -----------------------------------------------------------------------------------

    def _take(self, record: Record) -> None:  # noqa: PLR0912  one case for each kind
        kind, process, name, answer = record
        path = self._start.path(name)
        match kind:
            case "E":
                if not name.startswith("KCACHE_"):
                    self.variables.add(name)
            case "T":
                program = os.path.basename(self._programs.get(process, ""))
                if not _CLOCKS.match(f"{program} {name}"):
                    raise RefusedError(f"{program or 'a program'} reads the system clock")
            case "X":
                self._starts += 1
                self._note_program(name, answer)
            case "x":
                self._starts -= 1
                self._missing.update([path] if answer.startswith("2 ") and "/" in name else [])
            case "Q":
                self._search(name, answer.split(":"))
            case "B":
                self._began += 1
                self._programs[process] = path
                self._read(path, answer)
            case "M":
                self._libraries.add(os.path.basename(path))
                self._read(path, answer)
            case "D":
                self._folders.add(self._start.path(name))
            case "!":
                if answer != "opendir" or path.rstrip("/") != self._temporary:
                    what = f"{answer} for {name or 'a descriptor'}"
                    raise RefusedError(f"a tool called {what}, which can't be followed")
            case "W" | "N" | "U" | "V":
                self._change(record)
            case _ if name:  # an empty path does not exist
                self._answer(kind, path, answer)

    def _note_program(self, name: str, arguments: str) -> None:
        program = os.path.basename(name)
        if "=native" in arguments or _ABOUT_MACHINE.match(program):
            raise RefusedError("the output may depend on the hardware of this machine")
        whole = program.startswith("cc1") and "\x1f-E\x1f" not in arguments
        self.has_lines = self.has_lines or "line-info" in arguments or "lineinfo" in arguments
        if (
            _BINDING.search(arguments)
            or (program == "nvlink" and "--shared" not in arguments)
            or (whole and "/tmpxft_" not in arguments)  # no preprocessed file was recorded for it
        ):
            self.bound = True
        if "/" in name:
            self._resolved.add(self._start.path(name))

    def _search(self, name: str, folders: Iterable[str]) -> None:
        """Add the program that execvp(3) finds in `folders`, and the paths that it tries before."""
        for folder in folders:
            path = self._start.path(os.path.join(folder, name))
            if os.path.isfile(path):
                self._resolved.add(path)
                return
            self._missing.add(path)

    def _change(self, record: Record) -> None:
        kind, _, name, answer = record
        path = self._start.path(name)
        if kind == "V":
            self._searched.add(path)
            self.shown.update(1 + int(number) for number in answer.split())
        elif kind == "U":
            self._removed.add(path)
        elif kind == "N":
            self._written[self._start.path(answer)] = True
        elif answer.startswith("-"):
            self._missing.update([path] if answer in _MISSING else [])
        elif _SYSTEM.match(path):
            if not _HARMLESS.match(path):
                raise RefusedError(f"{name} is written by a tool")
        elif path not in self._written:
            if path in self._files or (answer == "=" and path not in self._removed):
                raise RefusedError(f"{name} is read and written by the compile")
            self._written[path] = path in self._removed

    def _answer(self, kind: str, path: str, answer: str) -> None:
        if path in self._written or self._is_temporary(path) or _HARMLESS.match(path):
            return
        if _SYSTEM.match(path):
            raise RefusedError(f"{path} is read by a tool, and may differ at each compile")
        if kind == "A":
            mode, error = map(int, answer.split())
            if str(-error) in _MISSING:
                self._missing.add(path)
            else:
                self._access[path, mode] = error == 0
        elif answer in _MISSING:
            self._missing.add(path)
        elif kind in "PR" and (answer[:1] != "-" or answer == f"-{errno.EINVAL}"):
            self._resolved.add(path)
        elif answer.startswith("-"):
            raise RefusedError(f"{path} can't be read: {os.strerror(-int(answer))}")
        elif kind == "O" and answer[0] in "f!":
            self._read(path, answer)
        else:
            letter, *inode = answer.split()
            if letter == "o":
                raise RefusedError(f"{path} is not a regular file")
            self._present[path] = letter, tuple(map(int, inode[:2]))

    def _read(self, path: str, answer: str) -> None:
        if answer == "!":
            what = f"{path} was changed a moment before it was read"
            raise RefusedError(f"{what}, so another change might not show")
        stamp = tuple(map(int, answer.split()[1:]))
        if self._files.get(path) not in (None, stamp):
            raise RefusedError(f"{path} was changed during the compile")
        self._files[path] = stamp

    def _is_temporary(self, path: str) -> bool:
        """Return whether `path` is that of a temporary file of nvcc."""
        folder, _, name = path.rpartition("/")
        return folder == self._temporary and name.startswith("tmpxft_")

    def _outputs(self) -> Iterator[tuple[str, bool]]:
        for path, is_new in self._written.items():
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                self.bound = self.bound or (path.endswith(".ii") and path not in self._searched)
                continue
            if not stat.S_ISREG(mode):
                raise RefusedError(f"{path} is not a regular file")
            self.bound = self.bound or path.endswith(".ii")  # kept, and not searched
            if self._is_temporary(path):
                raise RefusedError(f"nvcc did not remove its temporary file {path}")
            yield path, is_new

    def texts(self) -> Iterator[bytes]:
        """Yield the command, with numbers in place of the roots, and each text that a tool read."""
        yield os.fsencode("\n".join(map(self._start.roots.numbered, self._start.arguments)))
        for path in self._files:
            with open(path, "rb") as file:
                head = file.read(len(_ELF))
                if head != _ELF:  # the tools themselves are left out: they have 200 MB
                    yield head + file.read()

    # -- answers -----------------------------------------------------------------------------------

    def answers(self, digests: FileDigests) -> Answers:
        """Return the recorded answers; the caller has to check that they are still right.

        Raises:
            RefusedError: a file was changed or removed during the compile.
        """
        rooted, roots = self._start.roots.rooted, self._start.roots.directories
        self._add_libraries()
        for path in [*filter(os.path.islink, self._missing)]:  # its target does not exist
            self._missing.remove(path)
            self._resolved.add(path)
        ends = {path[: match.start()] for path in roots for match in _ENDS.finditer(path)}
        self._above = {path: os.path.realpath(path) for path in ends}
        files: dict[RootedPath, bytes] = {}
        inodes: dict[RootedPath, tuple[int, ...]] = {}
        seconds: dict[RootedPath, int] = {}
        for path, stamp in self._files.items():
            name = rooted(path)
            files[name], inodes[name], seconds[name] = _read(digests, path, stamp)
        present, folders = set[RootedPath](), set[RootedPath]()
        for path, (letter, inode) in self._present.items():
            if letter == "l":
                self._resolved.add(path)
            elif path not in self._files and path not in self._written:
                (folders if letter == "d" else present).add(rooted(path))
                inodes[rooted(path)] = inode
        links: dict[str, str] = {}
        plain: set[str] = set()
        for path in sorted(self._resolved):
            self._walk(path, links, plain)
        return Answers(
            grouped(files),
            b"".join(files[name] for name in sorted(files)),
            grouped({*map(rooted, self._missing - self._written.keys())}),
            grouped(present),
            grouped(folders.difference(above((*files, *present)))),
            [],
            same(inodes, files),
            [],
            [(name, self._start.roots.variable(name)) for name in sorted(self.variables)],
            plain=grouped({*map(rooted, plain)}),
            links=sorted((self._target(to), rooted(path)) for path, to in links.items())
            + [
                (rooted(os.path.realpath(path)), RootedPath(number, "."))
                for number, path in enumerate(roots, 1)
            ],
            access=sorted((mode, ok, rooted(path)) for (path, mode), ok in self._access.items()),
            times=[*_times(files, inodes, seconds)],
        )

    def _target(self, path: str) -> RootedPath:
        """Return the target of a link: as a path below its root, or unchanged if it is relative."""
        return self._start.roots.rooted(path) if path[:1] == "/" else RootedPath(ABSOLUTE, path)

    def _add_libraries(self) -> None:
        """Add the paths that the dynamic loader may have tried before it found each library."""
        for folder in self._folders:
            for variant in _VARIANTS:
                if not os.path.isdir(f"{folder}/{variant}"):
                    self._missing.add(f"{folder}/{variant}")
            levels = _LEVELS if os.path.isdir(f"{folder}/glibc-hwcaps") else ()
            for below in ("", *(f"glibc-hwcaps/{level}/" for level in levels)):
                for name in self._libraries:
                    path = f"{folder}/{below}{name}"
                    if os.path.isfile(path):  # the library, or one of another architecture
                        self._files.setdefault(path, None)
                    else:
                        self._missing.add(path)

    def _walk(self, path: str, links: dict[str, str], plain: set[str]) -> None:
        """Add each path that realpath(3) looks up for `path` to `links` or to `plain`.

        Directories above a root are left out. A target that does not exist is added to the missing
        paths.
        """
        at, parts = "", path.split("/")[::-1]
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                at = at.rpartition("/")[0]
                continue
            step = f"{at}/{part}"
            if step in self._above:
                at = self._above[step]
            elif step in plain:
                at = step
            else:
                try:
                    target = links[step] = links.get(step) or os.readlink(step)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # the target of a link does not exist
                        self._missing.add(step)
                        return
                    plain.add(step)
                    at = step
                    continue
                parts += target.split("/")[::-1]
                at = "" if target.startswith("/") else at


def _read(
    digests: FileDigests, path: str, recorded: tuple[int, ...] | None
) -> tuple[bytes, tuple[int, ...], int]:
    """Return digest, inode and mtime of a file that was read during the compile.

    `recorded` is the stamp of the file when it was read, or None if it is unknown.

    Raises:
        RefusedError: the file was changed or removed after it was read.
    """
    try:
        status = os.stat(path)
        size, changed, moved, inode, device = stamp_of(status)
        if recorded not in (None, (inode, device, size, changed, moved)):
            raise RefusedError(f"{path} was changed during the compile")
        return digests.digest(path, status), (inode, device), int(status.st_mtime)
    except OSError as error:
        raise RefusedError(f"{path} can't be read after the compile: {error}") from error


def _times(
    files: Mapping[RootedPath, bytes],
    inodes: Mapping[RootedPath, Sequence[int]],
    seconds: Mapping[RootedPath, int],
) -> Iterator[tuple[int, int, RootedPath]]:
    """Yield (group, number, path) for each file in `Answers.times`, where these are explained."""
    for group, paths in enumerate(alike(files)):
        times = [seconds[path] for path in paths]
        for path, time in zip(paths, times, strict=True):
            if len({inodes[each] for each in paths}) > 1:
                yield group, times.index(time), path


def _records(raw: bytes) -> Iterator[Record]:
    *texts, end = raw.decode("utf-8", "surrogateescape").split("\0")
    if end or len(texts) % 4:
        raise RefusedError("the recording is damaged")
    for record in zip(*[iter(texts)] * 4, strict=True):
        if len(record[0]) != 1:
            raise RefusedError("the recording is damaged")
        yield Record(*record)
