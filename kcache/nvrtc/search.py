"""HeaderSearch: where NVRTC looks for a header, and in which order.

As observed on NVRTC 12.4 to 13.5: in-memory headers first, by the exact name that was written.
Then, for a name in quotes, the directory of the file that includes it (as that file was opened,
links not followed; that of an in-memory header starts from the working directory), unless
`--no-source-include` is given. Then the include directories in order. The operand of
`--pre-include` is looked for in the working directory first, with that option too. Directories and
dangling links are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["ABSOLUTE", "SOURCE", "HeaderSearch", "Include", "Place", "may_include"]

#: Root numbers that are not positions in the include path.
SOURCE = 0
ABSOLUTE = -1


class Place(NamedTuple):
    """A file by its root and its path below it, so that it can be found in another folder too.

    Attributes:
        root: `SOURCE`, the directory of the source; 1, 2, ... the include directories in order;
            `ABSOLUTE` for a path that was written out.
        path: below the root, as the compiler would open it.
    """

    root: int
    path: str


class Include(NamedTuple):
    """An operand of `#include` or `__has_include`: its name, and whether it stood in quotes.

    With `next` it is one of `#include_next`: looked for in the directories after the includer's.
    """

    name: str
    quoted: bool
    next: bool = False


class HeaderSearch:
    """The include path of one compile.

    Args:
        source_name: name of the source; its directory is the root `SOURCE`.
        include_paths: directories in order, as given to the compiler.
        in_memory: include names of the in-memory headers.
        source_include: False after `--no-source-include`.
        directory: working directory, which relative paths start from.
    """

    def __init__(
        self,
        source_name: str,
        include_paths: Iterable[str],
        *,
        in_memory: Iterable[str] = (),
        source_include: bool = True,
        directory: str,
    ) -> None:
        folder = os.path.dirname(source_name)
        self.in_memory = frozenset(in_memory)
        self.source_include = source_include
        self.directory = directory
        self.prefixes = (
            "" if not folder else "/" if folder == "/" else f"{folder}/",
            *map(_prefix, include_paths),
        )
        self._longest = sorted(
            range(1, len(self.prefixes)), key=lambda root: len(self.prefixes[root]), reverse=True
        )

    def place(self, opened: str) -> Place:
        """Return the one place of a path as the compiler opened it."""
        for root in self._longest:
            prefix = self.prefixes[root]
            if opened.startswith(prefix) and (prefix or opened[:1] != "/"):
                return Place(root, opened[len(prefix) :])
        source = self.prefixes[SOURCE]
        if opened.startswith(source) and (source or opened[:1] != "/"):
            return Place(SOURCE, opened[len(source) :])
        return Place(ABSOLUTE, opened)

    def opened(self, place: Place) -> str:
        """Return the path as the compiler opens it."""
        if place.root == ABSOLUTE:
            return place.path
        return self.prefixes[place.root] + place.path

    def path(self, place: Place) -> str:
        """Return an absolute path of the place."""
        return os.path.join(self.directory, self.opened(place))

    def has(self, place: Place) -> bool:
        """Tell whether the place's root exists in this search at all."""
        return place.root < len(self.prefixes)

    def nesting(self) -> Iterator[str]:
        """Yield which roots lie inside which, and where: it decides which place a path has."""
        for outer, prefix in enumerate(self.prefixes):
            for inner, other in enumerate(self.prefixes):
                if inner != outer and other.startswith(prefix) and (prefix or other[:1] != "/"):
                    yield f"{outer} {inner} {other[len(prefix) :]}"

    def candidates(self, include: Include, includer: Place | None) -> Iterator[Place]:
        """Yield every place where `include` is looked for, first match first.

        `includer` is the file that includes it, None for the source itself. Of `#include_next` the
        directories before the includer's too.
        """
        beside_first = include.quoted and self.source_include and not include.next
        if beside_first and include.name[:1] != "/":
            beside = self.prefixes[SOURCE]
            if includer is not None:
                folder, slash, _ = self.opened(includer).rpartition("/")
                beside = folder + slash
            yield self.place(beside + include.name)
        yield from self._along(include.name)

    def pre_candidates(self, name: str) -> Iterator[Place]:
        """Yield every place where the operand of `--pre-include` is looked for."""
        if name[:1] != "/":
            yield self.place(name)
        yield from self._along(name)

    def _along(self, name: str) -> Iterator[Place]:
        if name[:1] == "/":
            yield self.place(name)
            return
        for prefix in self.prefixes[1:]:
            yield self.place(prefix + name)


def _prefix(path: str) -> str:
    """Return what the compiler puts before a name: the directory, one trailing slash dropped.

    It ignores spaces around the directory, and takes an empty one for the working directory.
    """
    path = path.strip(" ")
    return f"{path.removesuffix('/')}/" if path else ""


def may_include(text: str) -> bool:
    """Tell whether a source can read any file at all: a quick test that errs on yes."""
    if "\\" in text:
        text = text.replace("\\\r\n", "").replace("\\\n", "")
    if "__has_" in text and "##" in text:  # the rest of a `__has_include` may be joined to it
        return True
    return "include" in text or "embed" in text or "import" in text
