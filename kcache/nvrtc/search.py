"""HeaderSearch: the roots of a compile, which are the directories to which its paths are relative.

A path that the compiler has looked for is stored as the number of a root and the path below that
root. In another checkout or container, the same request has other roots, but the same stored paths.
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
#: Matches directories that some releases of NVRTC spell differently. Some drop white space at
#: the end, an equals sign at the beginning, and slashes of a relative path with two slashes in a
#: row. A space at the beginning is dropped or kept, depending on the spelling of the option. `-I-`
#: names no directory.
_odd = re.compile(r"\A[\s=]|\s\Z|//|\A-?\Z").search
#: Matches the beginning of a path such as `/proc/self/fd/3`, `/dev/fd/3` or `/dev/stdin`, but not a
#: division by a variable with the name `proc`.
_own = re.compile(
    rb"/(?:(?<=[\s\"'<=(,]/)|(?<=\A/)|(?<=-I/))(?:dev/std|(?:proc|dev/fd)(?:/|\Z))"
).search


class RootedPath(NamedTuple):
    """A path as its root and the part below the root.

    Attributes:
        root: the number of the root: `SOURCE` for the directory of the source; 1, 2, ... for the
            include directories in order; the next number for the working directory; `ABSOLUTE` for
            a path outside all of them. If a path is in several roots, the innermost one counts.
        path: the path below the root, as the compiler has spelled it; after `ABSOLUTE`, the whole
            path.
    """

    root: int
    path: str


#: Paths grouped by root: the number of each root, and the paths below that root.
Groups: TypeAlias = list[tuple[int, list[str]]]


class HeaderSearch:
    """The roots of one compile.

    Args:
        source_name: name of the source; its directory is the root `SOURCE`.
        include_paths: directories in order, as given to the compiler.
        directory: working directory, which relative paths start from.
        headers: names of in-memory headers, relative to the working directory.
        variable: returns the value of an environment variable; by default, the value in this
            process.

    Attributes:
        source_name, directory, variable: as given.
        base: the working directory with a slash at its end.
        prefixes: the source's directory and the include directories, as the compiler writes them
            before the name of a file. The prefix of the working directory is empty.
        roots: the same directories as absolute paths that end in a slash, and then the working
            directory.
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

    #: Returns whether something exists at a path that was absent during the compile.
    exists = staticmethod(os.path.exists)

    def is_plain(self) -> bool:
        """Return whether every release of NVRTC writes the roots as in `prefixes`."""
        return not any(map(_odd, self._given))

    def rooted(self, asked: str) -> RootedPath:
        """Return the root of the path `asked`, and the part of the path below that root.

        `asked` is a path that the compiler has looked for. Its spelling is not changed.
        """
        path = self.absolute(asked)
        for prefix, root in self._longest:
            if path.startswith(prefix):
                return RootedPath(root, path[len(prefix) :] or ".")
            if path == prefix[:-1]:  # the directory of a root itself
                return RootedPath(root, ".")
        return RootedPath(ABSOLUTE, path)

    def absolute(self, asked: str) -> str:
        """Return `asked`, which may be relative to the working directory, as an absolute path."""
        return asked if asked[:1] == "/" else self.base + asked

    def path(self, rooted: RootedPath) -> str:
        """Return the absolute path of `rooted`."""
        return rooted.path if rooted.root == ABSOLUTE else self.roots[rooted.root] + rooted.path

    def paths(self, groups: Groups) -> list[str]:
        """Return the absolute path of each path in `groups`.

        Raises:
            IndexError: a group has the number of a root that this compile does not have.
        """
        starts = (("" if root == ABSOLUTE else self.roots[root], names) for root, names in groups)
        return [start + name for start, names in starts for name in names]

    def moved(self, root: int, path: str) -> HeaderSearch:
        """Return a copy in which the directory of `root` is `path`.

        Only the methods `path` and `paths` of the copy use the new directory.
        """
        other = copy(self)
        other.roots = (*self.roots[:root], path, *self.roots[root + 1 :])
        return other

    def in_memory(self) -> tuple[str, ...]:
        """Return the absolute paths of the compiler's in-memory texts, the source first."""
        return tuple(map(self.absolute, (self.source_name, *self._headers)))

    def spelled(self) -> str:
        """Return the working directory as it is spelled in debug information.

        LLVM uses the value of `PWD` if that is the working directory in another spelling.
        """
        spelled = self.variable(environment.WORKING_DIRECTORY) or ""
        if spelled != self.directory and spelled.startswith("/"):
            with suppress(OSError):
                if os.path.samefile(spelled, self.directory):
                    return spelled
        return self.directory


def _prefix(path: str) -> str:
    """Return the prefix that the compiler puts before a name to look for it in a directory.

    The compiler ignores spaces around the directory's `path` and one slash at its end. If nothing
    remains, the directory is the working directory, and its prefix is empty.
    """
    path = path.strip(" ")
    return f"{path.removesuffix('/')}/" if path else ""


def may_include(text: str) -> bool:
    """Return whether the compiler may have to read a file because of `text`.

    This is a quick test, and the result may be true although no file is read. If it is wrongly
    false, the trace of the compile shows this, and the result of the compile is not cached.
    """
    if "\\" in text:
        text = text.replace("\\\r\n", "").replace("\\\n", "")
    if "__has_" in text and "##" in text:  # the rest of a `__has_include` may be joined to it
        return True
    return "include" in text or "embed" in text or "import" in text or "??/" in text


def are_own_files(text: bytes) -> bool:
    """Return whether `text` contains a path such as `/proc/self/fd/3` or `/dev/stdin`.

    In another process, such a path leads to another file, or to none.
    """
    return _own(text) is not None
