"""HeaderSearch: the roots of a compile, which are the directories that its paths start from.

A path that the compiler asked for is stored as the number of a root and the path below that root.
In another checkout or container, the same request has other roots, but the same stored paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from typing import NamedTuple, TypeAlias

from kcache import environment

#: Root numbers that are not positions in the include path.
SOURCE = 0
ABSOLUTE = -1
#: Matches directories that the compiler may spell differently. Some releases drop white space at
#: the end, an equals sign at the beginning, and slashes of a relative path with two slashes in a
#: row. A space at the beginning is dropped or kept, depending on the spelling of the option. `-I-`
#: names no directory.
_odd = re.compile(r"\A[\s=]|\s\Z|//|\A-?\Z").search
#: Matches the beginning of a path, but not a division by a variable with the name `proc`.
_own = re.compile(
    rb"/(?:(?<=[\s\"'<=(,]/)|(?<=\A/)|(?<=-I/))(?:dev/std|(?:proc|dev/fd)(?:/|\Z))"
).search


class RootedPath(NamedTuple):
    """A path as its root and the part below the root.

    Attributes:
        root: `SOURCE`, the directory of the source; 1, 2, ... the include directories in order; the
            number after those is the working directory; `ABSOLUTE` for a path outside all of them.
            If roots are nested, it is the innermost one.
        path: below the root, as the compiler asked for it.
    """

    root: int
    path: str


#: Paths by root.
Groups: TypeAlias = list[tuple[int, list[str]]]


class HeaderSearch:
    """The roots of one compile.

    Args:
        source_name: name of the source; its directory is the root `SOURCE`.
        include_paths: directories in order, as given to the compiler.
        directory: working directory, which relative paths start from.
        headers: names of in-memory headers, relative to the working directory.
        variable: returns the value of an environment variable; by default, of this process.

    Attributes:
        variable: as given.
        prefixes: the roots as the compiler writes them before a name; empty for the working
            directory.
        roots: the roots as absolute paths that end in a slash, and the working directory last.
        source_name: as given.
    """

    def __init__(
        self,
        source_name: str,
        include_paths: Iterable[str],
        *,
        directory: str,
        headers: Iterable[str] = (),
        variable: Callable[[str], str | None] = environment.variable,
    ) -> None:
        folder = os.path.dirname(source_name)
        self._given = (source_name, *include_paths)
        self.source_name = source_name
        self.directory = directory
        self._headers = tuple(headers)
        self.variable = variable
        self.prefixes = (
            "" if not folder else "/" if folder == "/" else f"{folder}/",
            *map(_prefix, self._given[1:]),
        )
        base = directory if directory.endswith("/") else f"{directory}/"
        self.base = base
        roots = [base + prefix if prefix[:1] != "/" else prefix for prefix in self.prefixes]
        self.roots = (*roots, base)
        order = sorted(enumerate(self.roots), key=lambda pair: (len(pair[1]), pair[0]))
        self._longest = [(path, root) for root, path in reversed(order)]

    #: Returns whether a path exists that the compiler found absent.
    exists = staticmethod(os.path.exists)

    def is_plain(self) -> bool:
        """Return whether every release writes the roots as in `prefixes`."""
        return not any(map(_odd, self._given))

    def rooted(self, asked: str) -> RootedPath:
        """Return the root of a path and the part below it, as the compiler asked for it."""
        path = self.absolute(asked)
        for prefix, root in self._longest:
            if path.startswith(prefix):
                return RootedPath(root, path[len(prefix) :] or ".")
            if path == prefix[:-1]:  # the directory of a root itself
                return RootedPath(root, ".")
        return RootedPath(ABSOLUTE, path)

    def absolute(self, asked: str) -> str:
        """Return the absolute path of a path that the compiler asked for."""
        return asked if asked[:1] == "/" else self.base + asked

    def path(self, rooted: RootedPath) -> str:
        """Return the absolute path."""
        return rooted.path if rooted.root == ABSOLUTE else self.roots[rooted.root] + rooted.path

    def paths(self, groups: Groups) -> list[str]:
        """Return the absolute paths of the groups.

        Raises:
            IndexError: a group has a root that does not exist here.
        """
        starts = (("" if root == ABSOLUTE else self.roots[root], names) for root, names in groups)
        return [start + name for start, names in starts for name in names]

    def moved(self, root: int, path: str) -> HeaderSearch:
        """Return a copy in which one root lies at `path`; only `path` and `paths` use that."""
        other = copy(self)
        other.roots = (*self.roots[:root], path, *self.roots[root + 1 :])
        return other

    def in_memory(self) -> tuple[str, ...]:
        """Return the absolute paths of the compiler's in-memory texts, the source first."""
        return tuple(map(self.absolute, (self.source_name, *self._headers)))

    def spelled(self) -> str:
        """Return the working directory as in debug information: LLVM uses the spelling of PWD."""
        spelled = self.variable(environment.WORKING_DIRECTORY) or ""
        if spelled != self.directory and spelled.startswith("/"):
            with suppress(OSError):
                if os.path.samefile(spelled, self.directory):
                    return spelled
        return self.directory


def _prefix(path: str) -> str:
    """Return the prefix that the compiler puts before a name: the directory without one last slash.

    The compiler ignores spaces around the directory, and takes an empty one for the working
    directory.
    """
    path = path.strip(" ")
    return f"{path.removesuffix('/')}/" if path else ""


def may_include(text: str) -> bool:
    """Return whether a source may read a file: a quick test that errs towards true.

    The trace of the compile shows it for certain. If this test was wrong, the result is not cached.
    """
    if "\\" in text:
        text = text.replace("\\\r\n", "").replace("\\\n", "")
    if "__has_" in text and "##" in text:  # the rest of a `__has_include` may be joined to it
        return True
    return "include" in text or "embed" in text or "import" in text or "??/" in text


def are_own_files(text: bytes) -> bool:
    """Return whether a text has a path in it such as `/proc/self/fd/3` or `/dev/stdin`.

    In another process, such a path leads to another file, or to none.
    """
    return _own(text) is not None
