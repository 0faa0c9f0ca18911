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

#: Precedes the number of a root in a text. The number N is the character `_ZERO` + N.
_MARK = "\x01"
_ZERO = 0x30
#: Follows a `_MARK` that was in the original text. It is not the number of any root.
_ITSELF = "!"
#: Maximum number of roots, because the recorder searches for no more.
_MAX_ROOTS = 64
#: Variables that the C library and the shell read without `getenv`, which the recorder can't
#: record.
_UNSEEN = re.compile(
    r"LC_|LD_|LANG|GLIBC_|BASH|MALLOC_|(?:TZ|LOCPATH|NLSPATH|GCONV_PATH|CHARSET|OUTPUT_CHARSET|ENV|IFS"
    r"|TMPDIR|SHELLOPTS|POSIXLY_CORRECT)$"
)
#: The variables that `Start.recorded` returns: those of `_UNSEEN`, and those of nvcc and gcc.
_KNOWN = re.compile(
    rf"(?:{_UNSEEN.pattern})|(?:NV|CUDA|GCC_|CICC)|(?:.*PATH|.*FLAGS|.*_ROOT|PWD|TERM|TE?MP(DIR)?)$"
)
#: Files whose content is part of the key.
_SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c")
#: Matches a directory whose name make(1) or a shell would escape in a text.
_ODD = re.compile(r"[^\w./+@%~,=-]")
#: Match what is before a path in an argument or a text, and what is after a root.
_BEFORE = r"(?:(?<![^\s=,:;\"'`(\[<])|(?<=^-[ILBo])|(?<=^-MF)|(?<=^-isystem))"
_BEHIND = r"(?![^/\s=,:;\"'`)\]>])"
#: Two conditions that are stored like variables if nvcc has printed text. The first is whether
#: standard output and standard error are one file, because then the order of their texts matters.
#: The second is whether one of them is a terminal, because then texts may be coloured.
STREAMS = ONE_STREAM, TERMINAL = "(one stream)", "(terminal)"


class Roots(HeaderSearch):
    """The roots of a start; replaces roots in paths and texts by numbers, and numbers by roots.

    Threads: may be used by several threads at the same time, because it is immutable.

    Args:
        directories: absolute paths; further copies of a path are ignored.
        directory: the working directory.
        environment: the environment variables of the start.

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
        """Return an absolute path with a number in place of its root, if it is below a root."""
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
        """Return `text`, a result of `numbered`, with this start's roots in place of the numbers.

        Raises:
            LookupError: the text has the number of a root that this start does not have.
        """
        first, *others = text.split(_MARK)
        paths = {mark[1:]: path for path, mark in self._marks.items()} | {_ITSELF: _MARK}
        return first + "".join(paths[part[:1]] + part[1:] for part in others)

    def shown(self, content: bytes) -> set[int]:
        """Return the numbers of the roots whose paths are in the content of a file.

        In PTX, a path may be a list of the numbers of its bytes.
        """
        found: set[int] = set()
        for number, path in enumerate(self.directories, 1):
            raw = os.fsencode(path)
            if raw in content or ", ".join(map(str, raw)).encode() in content:
                found.add(number)
        return found

    def _digest_of(self, name: str) -> str | None:
        """Return the digest of a variable's value, which may be a secret; None if it is not set."""
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
        environment: all environment variables except those of kcache.
        roots: the roots of the start.
        compiles: called with the start to run nvcc and record the run; None if the cache is only
            searched.
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
        """Return the start that a client's question describes.

        Args:
            fields: `program` to `environment`, in the order of the attributes.

        Raises:
            WireError: the fields are malformed.
        """
        if len(fields) != 7:
            raise WireError(f"a start of nvcc: expected 7 fields, got {len(fields)}")
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
        """Return the start of `program`; `streams` is the pair (`one_stream`, `terminal`)."""
        environment = _without_kcache(variables)
        if environment.get("PWD") == directory:  # without it, tools find the same directory
            del environment["PWD"]
        found = [*_roots(program, directory, arguments, environment)]
        found += [*map(os.path.realpath, found)]  # tools also open files by these paths
        about = dict(zip(STREAMS, map(str, streams), strict=True))
        roots = Roots(found, directory, {**environment, **about})
        return cls(program, directory, mask, *streams, arguments, environment, roots)

    @property
    def request(self) -> Request:
        """The request to a cache. Its key covers everything that the caller passes to nvcc.

        The key has the directories as numbers, so that the result can be used in other directories.
        It also covers the contents of the sources: some programs compile many different sources
        under the same file name, each in a directory with a random name.
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
        """Run nvcc; return its result and what this depends on, as `compile_tracked` does.

        `compiles` must be set.
        """
        assert self.compiles is not None
        return self.compiles(self, digests)

    def recorded(self) -> dict[str, Any]:
        """Return the start as data for JSON, including the texts of the sources.

        `kcache.dropin.recorded_starts` reads it. Of the environment, only the variables in `_KNOWN`
        are included.
        """
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
        """Return the path that a tool has named as an absolute path, which is not normalized."""
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
