"""HeaderSearch: where NVRTC looks for a header, and in which order.

As observed on NVRTC 12.4 to 13.5: in-memory headers first, by the exact name that was written.
Then, for a name in quotes, the directory of the file that includes it (as that file was opened,
links not followed); for the source itself that is its own directory unless `--no-source-include`
is given.
Then the include directories in order. Directories and dangling links are passed over.
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
    """An operand of `#include` or `__has_include`: its name, and whether it stood in quotes."""

    name: str
    quoted: bool


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
        # The compiler drops one trailing slash of a directory, and joins with one.
        self.prefixes = (
            f"{folder}/" if folder else "",
            *(f"{path.removesuffix('/')}/" for path in include_paths),
        )
        self._longest = sorted(
            range(1, len(self.prefixes)), key=lambda root: len(self.prefixes[root]), reverse=True
        )

    def place(self, opened: str) -> Place:
        """Return the place of a path as the compiler opened it."""
        for root in self._longest:
            if opened.startswith(self.prefixes[root]):
                return Place(root, opened[len(self.prefixes[root]) :])
        if opened.startswith("/"):
            source = self.prefixes[SOURCE]
            if source and opened.startswith(source):
                return Place(SOURCE, opened[len(source) :])
            return Place(ABSOLUTE, opened)
        return Place(SOURCE, opened.removeprefix(self.prefixes[SOURCE]))

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

    def candidates(self, include: Include, includer: Place | None) -> Iterator[Place]:
        """Yield every place where `include` is looked for, first match first.

        `includer` is the file that includes it, None for the source itself.
        """
        name = include.name
        if name.startswith("/"):
            yield Place(ABSOLUTE, name)
            return
        if include.quoted:
            if includer is not None:
                folder, slash, _ = self.opened(includer).rpartition("/")
                yield self.place(f"{folder}{slash}{name}")
            elif self.source_include:
                yield Place(SOURCE, name)
        for root in range(1, len(self.prefixes)):
            yield Place(root, name)


def may_include(text: str) -> bool:
    """Tell whether a source can read any file at all: a quick test that errs on yes."""
    if "\\" in text:
        text = text.replace("\\\r\n", "").replace("\\\n", "")
    return "include" in text or "embed" in text or "import" in text
