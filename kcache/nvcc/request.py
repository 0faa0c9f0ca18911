"""Start: one start of nvcc, and its request to a cache.

The *roots* of a start are the working directory, the directory for temporary files, the toolkit,
and the directories of the absolute paths among the arguments. In the key, a path is the number of
its root and the part below it. So the same command in another directory has the same key, and the
answers can be checked there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from kcache.errors import ConfigError
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.request import Request, digest_fields
from kcache.nvrtc.search import ABSOLUTE, HeaderSearch
from kcache.util.wire import WireError, number_in, split_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import DependencySet

#: Precedes the number of a root, which is one character, beginning with `_ZERO`.
_MARK = "\x01"
_ZERO = 0x30
#: Follows a mark that was in the text itself. No root has this number.
_ITSELF = "!"
#: For how many roots the recorder searches.
_MAX_ROOTS = 64
#: Variables that the C library and the shell read without `getenv`, which the recorder can't
#: record.
_UNSEEN = re.compile(
    r"LC_|LD_|LANG|GLIBC_|BASH|MALLOC_|(?:TZ|LOCPATH|NLSPATH|GCONV_PATH|CHARSET|OUTPUT_CHARSET|ENV|IFS"
    r"|TMPDIR|SHELLOPTS|POSIXLY_CORRECT)$"
)
#: These, and the variables of nvcc and gcc that `recorded` may return.
_KNOWN = re.compile(
    rf"(?:{_UNSEEN.pattern})|(?:NV|CUDA|GCC_|CICC)|(?:.*PATH|.*FLAGS|.*_ROOT|PWD|TERM|TE?MP(DIR)?)$"
)
#: Files whose content is part of the key.
_SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c")
#: Matches a directory whose name make(1) or a shell would escape in a text.
_ODD = re.compile(r"[^\w./+@%~,=-]")
#: What precedes a path in an argument or a text, and what follows a root.
_BEFORE = r"(?:(?<![^\s=,:;\"'`(\[<])|(?<=^-[ILBo])|(?<=^-MF)|(?<=^-isystem))"
_BEHIND = r"(?![^/\s=,:;\"'`)\]>])"
#: Treated as variables if nvcc has printed text: whether standard output and standard error are one
#: file, in which their order matters; and whether one of them is a terminal, for colours.
STREAMS = ONE_STREAM, TERMINAL = "(one stream)", "(terminal)"


class Roots(HeaderSearch):
    """The roots of a start. Replaces them by numbers in paths and texts, and numbers by roots.

    Immutable, so safe to share between threads.

    Args:
        directories: absolute paths; of equal paths, the first one counts.
        directory: the working directory.
        environment: the variables.

    Attributes:
        directories: the roots.
        odd: the numbers of the roots that a text may spell in an escaped form.
    """

    exists = staticmethod(os.path.lexists)

    def __init__(
        self, directories: Iterable[str], directory: str, environment: Mapping[str, str]
    ) -> None:
        named = dict.fromkeys(path.rstrip("/") for path in directories if path == path.strip(" "))
        self.directories = tuple(path for path in named if path)[:_MAX_ROOTS]
        super().__init__("", self.directories, directory=directory, variable=self._digest_of)
        self._longest = [pair for pair in self._longest if 0 < pair[1] <= len(self.directories)]
        self._bare = {path: number for number, path in enumerate(self.directories, 1)}
        self._environment = environment
        self._marks = {path: _MARK + chr(_ZERO + number) for path, number in self._bare.items()}
        longest = sorted(self.directories, key=len, reverse=True)
        either = "|".join(map(re.escape, longest))
        self._pattern = re.compile(f"{_BEFORE}({either}){_BEHIND}") if longest else None
        self.odd = {number for path, number in self._bare.items() if _ODD.search(path)}

    def in_memory(self) -> tuple[str, ...]:
        """Return an empty tuple, because nvcc reads all its texts from files."""
        return ()

    def numbered_path(self, path: str) -> str:
        """Return an absolute path with a number in place of its root."""
        root, below = self.rooted(path)
        below = below.replace(_MARK, _MARK + _ITSELF)
        return below if root == ABSOLUTE else f"{_MARK}{chr(_ZERO + root)}/{below}"

    def numbered(self, text: str) -> str:
        """Return a text with numbers in place of the roots of all paths in it."""
        text = text.replace(_MARK, _MARK + _ITSELF)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._marks[match[1]], text)

    def named(self, text: str) -> str:
        """Return a text of `numbered` with the roots of this start.

        Raises:
            LookupError: the text has the number of a root that does not exist here.
        """
        first, *others = text.split(_MARK)
        paths = {mark[1:]: path for path, mark in self._marks.items()} | {_ITSELF: _MARK}
        return first + "".join(paths[part[:1]] + part[1:] for part in others)

    def shown(self, content: bytes) -> set[int]:
        """Return the numbers of the roots that a file shows, as text or as numbers in PTX."""
        found: set[int] = set()
        for number, path in enumerate(self.directories, 1):
            raw = os.fsencode(path)
            if raw in content or ", ".join(map(str, raw)).encode() in content:
                found.add(number)
        return found

    def _digest_of(self, name: str) -> str | None:
        """Return the digest of a variable, because its value may be a secret."""
        value = self._environment.get(name)
        if value is None:
            return None
        return xxhash.xxh3_128_hexdigest(os.fsencode(self.numbered(value)))


class Start(NamedTuple):
    """One start of nvcc. Immutable.

    Attributes:
        program: path of the file that is started.
        directory: the working directory.
        mask: the umask.
        one_stream: whether standard output and standard error are one file.
        terminal: whether one of the two is a terminal.
        arguments: all arguments, including argv[0].
        environment: all variables except those of kcache.
        roots: the directories.
        compiles: starts nvcc and records it; None if the cache is only searched.
    """

    program: str
    directory: str
    mask: int
    one_stream: bool
    terminal: bool
    arguments: Sequence[str]
    environment: Mapping[str, str]
    roots: Roots
    compiles: Callable[[Start, FileDigests], tuple[Compiled, DependencySet | None]] | None = None

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Start:
        """Return the start in the fields of a client's question, in the order of the attributes.

        Raises:
            WireError: the fields are malformed.
        """
        if len(fields) != 7:
            raise WireError("no start of nvcc")
        program, directory = map(os.fsdecode, fields[:2])
        mask, one_stream, terminal = map(number_in, fields[2:5])
        arguments, texts = map(split_texts, fields[5:])
        variables = dict(text.partition("=")[::2] for text in texts)
        streams = one_stream == 1, terminal == 1
        return cls.make(program, directory, arguments, variables, mask=mask, streams=streams)

    @classmethod
    def make(
        cls,
        program: str,
        directory: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        mask: int,
        streams: tuple[bool, bool] = (False, False),
    ) -> Start:
        """Return the start of a program; `streams` are `one_stream` and `terminal`."""
        environment = _without_kcache(variables)
        if environment.get("PWD") == directory:  # tools get the same without it
            del environment["PWD"]
        found = [*_roots(program, directory, arguments, environment)]
        found += [*map(os.path.realpath, found)]  # tools also open files by these paths
        about = dict(zip(STREAMS, map(str, streams), strict=True))
        roots = Roots(found, directory, {**environment, **about})
        return cls(program, directory, mask, *streams, arguments, environment, roots)

    @property
    def request(self) -> Request:
        """The request to a cache. Its key covers everything that the caller passes.

        It also covers the content of the sources, because programs compile many sources under one
        name in random directories.
        """
        roots = self.roots
        number = roots.numbered
        unseen = [
            f"{name}={number(value)}"
            for name, value in sorted(self.environment.items())
            if _UNSEEN.match(name)
        ]
        fields = [
            ("program", number(self.program)),
            ("directory", number(self.directory)),
            ("mask", f"{self.mask:o}"),
            *(("argument", number(text)) for text in self.arguments),
            *(("variable", text) for text in unseen),
        ]
        encoded = [(name, os.fsencode(text)) for name, text in fields]
        options = CompileOptions()
        sources = dict(self._sources())
        with suppress(ConfigError):  # the options are only displayed
            options = CompileOptions(extra_options=self.arguments[1:])
        return Request(
            source=b"".join(sources.values()).decode("latin-1"),
            names=(),
            options=options,
            headers={},
            extra_key=b"",
            source_name=next(map(os.path.basename, sources), "nvcc"),
            compiler=self.program,
            key=digest_fields(
                "kcache-nvcc/2", [*encoded, *(("source", s) for s in sources.values())]
            ),
            self_contained=False,
            anywhere=False,
            search=roots,
            location=digest_fields("location", [(path, b"") for path in roots.directories]),
            spelled="",
            bound=tuple(f"variable={text}" for text in unseen),
            variables=(),
            start=self,
        )

    def compile(self, digests: FileDigests) -> tuple[Compiled, DependencySet | None]:
        """Return what nvcc makes, and what that depends on; see `compiler.compile_tracked`."""
        assert self.compiles is not None
        return self.compiles(self, digests)

    def recorded(self) -> dict[str, Any]:
        """Return what `kcache.dropin.recorded_starts` reads, including the sources' texts."""
        names = ("program", "directory", "mask", "one_stream", "arguments")
        found = {name: getattr(self, name) for name in names}
        known = {name: value for name, value in self.environment.items() if _KNOWN.match(name)}
        sources = {path: os.fsdecode(text) for path, text in self._sources()}
        return {**found, "environment": known, "sources": sources}

    def _sources(self) -> Iterator[tuple[str, bytes]]:
        """Yield path and content of each source among the arguments."""
        for path in map(self.path, self.arguments[1:]):
            with suppress(OSError):
                if path.endswith(_SOURCES) and os.path.isfile(path):
                    with open(path, "rb") as file:
                        yield path, file.read()

    def path(self, name: str) -> str:
        """Return an absolute path for the path that a tool has named, otherwise unchanged."""
        return name if name.startswith("/") else f"{self.directory}/{name}"


def _without_kcache(variables: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in variables.items() if not name.startswith("KCACHE_")}
    preloaded = found.pop("LD_PRELOAD", "").replace(" ", ":").split(":")
    others = [p for p in preloaded if p and not os.path.basename(p).startswith("libkcache_")]
    return {**found, "LD_PRELOAD": ":".join(others)} if others else found


def _roots(
    program: str, directory: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterable[str]:
    yield directory
    temporary = environment.get("TMPDIR", "")
    if os.path.isabs(temporary):
        yield temporary
    if os.path.isabs(program):
        yield os.path.dirname(program).removesuffix("/bin")
    for text in arguments[1:]:
        if os.path.isabs(text):
            yield os.path.dirname(text)
    spelled = environment.get("PWD", "")
    if os.path.isabs(spelled) and _is_same(spelled, directory):
        yield spelled


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
