"""HeaderSearch: the roots of a compile, which are the directories that its paths start from.

A path that the compiler asked for is stored as the number of a root and the path below that root.
In another checkout or container, the same request has other roots and the same questions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kcache import config

__all__ = [
    "ABSOLUTE",
    "SOURCE",
    "SPELLING",
    "HeaderSearch",
    "RootedPath",
    "may_include",
    "may_name_file",
]

#: Root numbers that are not positions in the include path.
SOURCE = 0
ABSOLUTE = -1
#: How many digits of a location (`Request.location`) tell how the include directories are spelled.
SPELLING = 24
#: Matches directories that the compiler may write otherwise than they were given. Some releases
#: drop white space at the end, slashes of a relative path that has two in a row, and an equals sign
#: at the beginning. A space at the beginning is dropped in one spelling of the option, and kept in
#: others. `-I-` names no directory.
_odd = re.compile(r"\A[\s=]|\s\Z|//|\A-?\Z").search


class RootedPath(NamedTuple):
    """A path as its root and the part below the root.

    Attributes:
        root: `SOURCE`, the directory of the source; 1, 2, ... the include directories in order; the
            number after those is the working directory, if it is not the source's; `ABSOLUTE` for a
            path outside all of them.
        path: below the root, as the compiler asked for it.
    """

    root: int
    path: str


class HeaderSearch:
    """The roots of one compile.

    Args:
        source_name: name of the source; its directory is the root `SOURCE`.
        include_paths: directories in order, as given to the compiler.
        directory: working directory, which relative paths start from.
        variable: returns an environment variable that a compiler asked for; None for this
            process's own.

    Attributes:
        variable: as given.
        prefixes: the roots as the compiler writes them before a name; empty for the working
            directory.
        roots: the same as absolute paths that end in a slash, the working directory's included.
        source_name: as given.
    """

    def __init__(
        self,
        source_name: str,
        include_paths: Iterable[str],
        *,
        directory: str,
        variable: Callable[[str], str | None] = config.variable,
    ) -> None:
        folder = os.path.dirname(source_name)
        self._given = (source_name, *include_paths)
        self.source_name = source_name
        self.directory = directory
        self.variable = variable
        self.prefixes = (
            "" if not folder else "/" if folder == "/" else f"{folder}/",
            *map(_prefix, self._given[1:]),
        )
        base = directory if directory.endswith("/") else f"{directory}/"
        self.base = base
        roots = [base + prefix if prefix[:1] != "/" else prefix for prefix in self.prefixes]
        if base != roots[SOURCE]:
            roots.append(base)
        self.roots = tuple(roots)
        # The include path before the source's own directory, the longest first.
        order = sorted(range(len(roots)), key=lambda root: (len(roots[root]), root), reverse=True)
        self._longest = [(roots[root], root) for root in order]

    def is_plain(self) -> bool:
        """Tell whether every release writes the roots as `prefixes` says."""
        return not any(map(_odd, self._given))

    def rooted(self, asked: str) -> RootedPath:
        """Return the root of a path and the part below it, as the compiler asked for it."""
        path = asked if asked[:1] == "/" else self.base + asked
        for prefix, root in self._longest:
            if path.startswith(prefix):
                return RootedPath(root, path[len(prefix) :] or ".")
            if path == prefix[:-1]:  # the directory of a root itself
                return RootedPath(root, ".")
        return RootedPath(ABSOLUTE, path)

    def path(self, rooted: RootedPath) -> str:
        """Return the absolute path."""
        return rooted.path if rooted.root == ABSOLUTE else self.roots[rooted.root] + rooted.path

    def source(self) -> str:
        """Return the absolute path of the source's name; no file need exist there."""
        name = self.source_name
        return name if name[:1] == "/" else self.base + name

    def has(self, rooted: RootedPath) -> bool:
        """Tell whether the root of a path exists in this search at all."""
        return rooted.root < len(self.roots)

    def nesting(self) -> Iterator[str]:
        """Yield which include directories lie inside which others, and where.

        A path in both has one root. At another location, where the directories don't lie inside
        each other, the compiler would ask for another path. So this is part of the key. `marks`
        covers the paths that a text can reach from the source's or the working directory.
        """
        for outer, inner, rest in self._nested():
            if self._is_include(outer) and self._is_include(inner):
                yield f"{outer} {inner} {rest}"
            elif not rest:
                yield f"{outer} {inner}"

    def marks(self) -> frozenset[str]:
        """Return what a text must contain to reach one root from another by a relative path.

        There are such texts if an include directory lies in the source's or the working directory,
        or the other way round. An example is `inc/`, if `#include "inc/x.h"` and `-Iinc` lead to
        one file.
        """
        return frozenset(
            rest.rstrip("/").rpartition("/")[2] + "/"
            for outer, inner, rest in self._nested()
            if rest and not (self._is_include(outer) and self._is_include(inner))
        )

    def _is_include(self, root: int) -> bool:
        return 0 < root < len(self.prefixes)

    def _nested(self) -> Iterator[tuple[int, int, str]]:
        for outer, prefix in enumerate(self.roots):
            for inner, other in enumerate(self.roots):
                if inner != outer and other.startswith(prefix):
                    yield outer, inner, other[len(prefix) :]


def _prefix(path: str) -> str:
    """Return the prefix that the compiler puts before a name: the directory without one last slash.

    The compiler ignores spaces around the directory, and takes an empty one for the working
    directory.
    """
    path = path.strip(" ")
    return f"{path.removesuffix('/')}/" if path else ""


def may_include(text: str) -> bool:
    """Tell whether a source can read any file at all: a quick test that errs towards yes.

    The questions of the compile show it for certain. If this test was wrong, the outcome is not
    cached.
    """
    if "\\" in text:
        text = text.replace("\\\r\n", "").replace("\\\n", "")
    if "__has_" in text and "##" in text:  # the rest of a `__has_include` may be joined to it
        return True
    return "include" in text or "embed" in text or "import" in text or "??/" in text


def may_name_file(text: str) -> bool:
    """Tell whether a text may depend on the source's name: a quick test that errs towards yes.

    A text can compute with `__FILE__` and its kin, so that an output need not show them. `assert`
    contains `__FILE__`, and `#` can turn it into a string. Everything else that puts the name into
    an output (an `assert` that is evaluated, names with internal linkage) shows there.
    """
    return (
        "FILE" in text
        or ("assert" in text and _makes_texts(text))
        or "assertfail" in text  # `assert` calls these, and they may be macros
        or "source_location" in text
        or "##" in text  # `__FI ## LE__`
        or "%:%:" in text
        or "??/" in text
        or "\\\n" in text  # a word that goes on in the next line
        or "\\\r" in text
    )


def _makes_texts(text: str) -> bool:
    """Tell whether a text may have the operator `#`, which does not begin a line."""
    lines = (line.lstrip()[1:] for line in text.splitlines())
    return any("#" in line or "%:" in line for line in lines)
