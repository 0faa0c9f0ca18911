"""Request: one start of nvcc, and its key, in which the directories of the call are numbers.

The *roots* of a call are the working directory, the directory for temporary files, the toolkit, and
the directories of the absolute paths among the arguments. A path below a root is a number and a
rest. So the same command in another directory has the same key, and its evidence can be checked
there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from kcache.nvrtc.request import digest_fields
from kcache.util.wire import WireError, number_in, split_texts

#: Stands before the number of a root, which is one character from `_ZERO` on.
_MARK = "\x01"
_ZERO = 0x30
#: Stands behind a mark that was in the text itself; no number of a root is it.
_ITSELF = "!"
#: As many as the recorder searches for.
_MAX_ROOTS = 64
#: Variables that the C library and the shell read without `getenv`, so that the recorder can't
#: see it. Those of the drop-in are not among them.
_UNSEEN = re.compile(
    r"LC_|LD_|LANG|GLIBC_|BASH|MALLOC_|(?:TZ|LOCPATH|NLSPATH|GCONV_PATH|CHARSET|OUTPUT_CHARSET|ENV|IFS"
    r"|TMPDIR|SHELLOPTS|POSIXLY_CORRECT)$"
)
#: Files whose content counts in the key. Outputs of these names are not usual.
_SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c")
#: A directory whose name make(1) or a shell would escape in a text.
_ODD = re.compile(r"[^\w./+@%~,=-]")
#: What stands before a path in an argument or a text, and behind a root.
_BEFORE = r"(?:(?<![^\s=,:;\"'`(\[<])|(?<=^-[ILBo])|(?<=^-MF)|(?<=^-isystem))"
_BEHIND = r"(?![^/\s=,:;\"'`)\]>])"


class Roots:
    """The directories of a call: paths and texts with numbers in their place, and back.

    Immutable, so safe to share between threads.

    Args:
        directories: absolute paths, of which the first of equal ones counts.
    """

    def __init__(self, directories: Iterable[str]) -> None:
        named = dict.fromkeys(path.rstrip("/") for path in directories)
        self.paths = tuple(path for path in named if path)[:_MAX_ROOTS]
        marks = {path: _MARK + chr(_ZERO + number) for number, path in enumerate(self.paths)}
        longest = sorted(marks, key=len, reverse=True)
        self._marks = marks
        self._longest = [(path, f"{path}/", marks[path]) for path in longest]
        either = "|".join(map(re.escape, longest))
        self._pattern = re.compile(f"{_BEFORE}({either}){_BEHIND}") if longest else None

    def rooted(self, path: str) -> str:
        """Return an absolute path with a number in place of its root, if it is below one."""
        for root, below, mark in self._longest:
            if path.startswith(below) or path == root:
                return mark + path[len(root) :]
        return path

    def absolute(self, path: str) -> str:
        """Return the path that `rooted` has returned, below the roots here; raises LookupError."""
        return self.paths[ord(path[1]) - _ZERO] + path[2:] if path[:1] == _MARK else path

    def numbered(self, text: str) -> str:
        """Return a text with numbers in place of the roots, wherever a path stands in it."""
        text = text.replace(_MARK, _MARK + _ITSELF)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._marks[match[1]], text)

    def named(self, text: str) -> str:
        """Return the text that `numbered` has returned, with the roots here; raises LookupError."""
        first, *others = text.split(_MARK)
        paths = {chr(_ZERO + number): path for number, path in enumerate(self.paths)}
        paths[_ITSELF] = _MARK
        return first + "".join(paths[part[:1]] + part[1:] for part in others)

    def shown(self, content: bytes) -> set[int]:
        """Return the numbers of the roots that a file shows, as text or as PTX has text."""
        found: set[int] = set()
        for number, path in enumerate(self.paths):
            raw = os.fsencode(path)
            if raw in content or ", ".join(map(str, raw)).encode() in content:
                found.add(number)
        return found

    @cached_property
    def odd(self) -> set[int]:
        """The numbers of those that may stand in a text in another form."""
        return {number for number, path in enumerate(self.paths) if _ODD.search(path)}


class Request(NamedTuple):
    """One start of nvcc.

    Attributes:
        program: path of the file that is started.
        directory: the working directory.
        mask: the umask.
        one_stream: whether standard output and standard error are one file.
        terminal: whether one of the two is a terminal.
        arguments: all of them, with argv[0].
        environment: all variables, but for those of kcache.
        roots: the directories of the call.
    """

    program: str
    directory: str
    mask: int
    one_stream: bool
    terminal: bool
    arguments: Sequence[str]
    environment: Mapping[str, str]
    roots: Roots

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Request:
        """Return the request in the fields of a client's question, in the order of the attributes.

        Raises:
            WireError: there is none.
        """
        if len(fields) != 7:
            raise WireError("no start of nvcc")
        program, directory = map(os.fsdecode, fields[:2])
        mask, one_stream, terminal = map(number_in, fields[2:5])
        arguments, variables = map(split_texts, fields[5:])
        environment = _without_kcache(text.partition("=") for text in variables)
        if environment.get("PWD") == directory:  # what tools find out without it, too
            del environment["PWD"]
        return cls(
            program,
            directory,
            mask,
            one_stream == 1,
            terminal == 1,
            arguments,
            environment,
            Roots(_roots(program, directory, arguments, environment)),
        )

    @property
    def key(self) -> str:
        """The key of the request: everything that the caller passes, and where.

        The sources count, too: programs compile many under one name in random directories.
        """
        number = self.roots.numbered
        unseen = [
            f"{name}={number(value)}"
            for name, value in sorted(self.environment.items())
            if _UNSEEN.match(name)
        ]
        fields = [
            ("program", number(self.program)),
            ("directory", self.roots.rooted(self.directory)),
            ("mask", f"{self.mask:o}"),
            *(("argument", number(text)) for text in self.arguments),
            *(("variable", text) for text in unseen),
        ]
        encoded = [(name, os.fsencode(text)) for name, text in fields]
        return digest_fields("kcache-nvcc/2", [*encoded, *self._sources()])

    def _sources(self) -> Iterator[tuple[str, bytes]]:
        for text in self.arguments[1:]:
            with suppress(OSError):
                if text.endswith(_SOURCES) and os.path.isfile(self.path(text)):
                    with open(self.path(text), "rb") as file:
                        yield "source", file.read()

    def path(self, name: str) -> str:
        """Return the absolute path of a file as a tool has named it; nothing else is changed."""
        return name if name.startswith("/") else f"{self.directory}/{name}"


def _without_kcache(variables: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    found = {name: value for name, _, value in variables if not name.startswith("KCACHE_")}
    preloaded = found.pop("LD_PRELOAD", "").replace(" ", ":").split(":")
    others = [p for p in preloaded if p and not os.path.basename(p).startswith("libkcache_")]
    return {**found, "LD_PRELOAD": ":".join(others)} if others else found


def _roots(
    program: str, directory: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterable[str]:
    yield directory
    spelled = environment.get("PWD", "")
    if os.path.isabs(spelled) and _is_same(spelled, directory):
        yield spelled
    temporary = environment.get("TMPDIR", "")
    if os.path.isabs(temporary):
        yield temporary
    if os.path.isabs(program):
        yield os.path.dirname(program).removesuffix("/bin")
    for text in arguments[1:]:
        if os.path.isabs(text):
            yield os.path.dirname(text)


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
