"""Tracker: finds out the header set of one compile."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from kcache.nvrtc.changes import changed_since, stamps
from kcache.nvrtc.files import FileDigests, Stamp
from kcache.nvrtc.headers import HeaderSet, UncacheableError, is_header, tree_files
from kcache.nvrtc.macros import Macros
from kcache.nvrtc.probes import probes
from kcache.nvrtc.scan import (
    Definitions,
    FileScan,
    expand,
    leads_out,
    names_file,
    packs,
    scan,
    spliced,
)
from kcache.nvrtc.search import ABSOLUTE, HeaderSearch, Include, Place
from kcache.nvrtc.trace import Trace

__all__ = ["Tracker"]

#: Roots with more files than this are not taken whole for a dependency.
MAX_TREE = 20_000

#: Includes, each with the file that it stands in.
_Asked: TypeAlias = "list[tuple[Include, Place | str | None]]"

#: What includes the files of `--pre-include`: its name starts from the working directory.
_COMMAND_LINE = Place(ABSOLUTE, "")


class Tracker:
    """Finds out the header set of one compile.

    Args:
        source: the source text.
        search: its include path.
        pre_includes: files of `--pre-include`.
        defines: `NAME` and `NAME=VALUE` of the options.
        in_memory: in-memory headers, include name -> text.
        trigraphs: those that the compiler replaces; a header with one is not followed.
        digests: the process's memory of file contents.
    """

    def __init__(
        self,
        source: str,
        search: HeaderSearch,
        *,
        pre_includes: Iterable[str] = (),
        defines: Iterable[str] = (),
        in_memory: Mapping[str, str] | None = None,
        trigraphs: Iterable[str] = (),
        digests: FileDigests,
    ) -> None:
        self._search = search
        self._digests = digests
        self._pre_includes = [Include(name, quoted=True) for name in pre_includes]
        self._trigraphs = [each.encode() for each in trigraphs]
        self._source = source.encode()
        self._in_memory = {name: text.encode() for name, text in (in_memory or {}).items()}
        self._option_macros = "".join(
            f"#define {name} {value if equals else '1'}\n"
            for name, equals, value in (define.partition("=") for define in defines)
        ).encode()
        #: Texts by the place of the file; None is the source, text names are in-memory headers.
        self._texts: dict[Place | str | None, bytes] = {None: self._source}
        self._texts.update(self._in_memory)
        self._joined: dict[Place | str | None, bytes] = {}
        self._scans: dict[Place | str | None, FileScan] = {}
        self._found: dict[Place, bool] = {}
        #: Files that exist where an include was looked for, and were not read.
        self._bystanders: set[Place] = set()
        #: Places where the compiler looked and found none, and did not say so.
        self._unfound: set[Place] = set()
        #: Places where it looked, found none, and a trace would have said otherwise.
        self._lacking: set[Place] = set()
        #: Whether a header's path was written out, and leads into an include directory.
        self._located = False
        #: Whether nobody told which headers were read.
        self._scanned = False

    def from_trace(self, trace: Trace) -> HeaderSet:
        """Return the header set of a compile that told which headers it opened.

        Raises:
            UncacheableError: the outcome must not be cached.
        """
        for name in trace.headers:
            place = self._search.place(name)
            # A file can be opened under the very name of an in-memory header that was not meant.
            if name not in self._in_memory or ("/" in name and self._exists(place)):
                self._read(place)
        if not trace.complete:
            self._add_direct_includes()
        return self._finish()

    def from_scan(self) -> HeaderSet:
        """Return a header set that holds at least what the compiler can have read.

        Follows every include in every branch. Where one is computed in a way that can't be
        resolved, every file below the include directories counts.

        Raises:
            UncacheableError: the outcome must not be cached.
        """
        self._scanned = True
        pending: list[Place | str | None] = [None, *self._in_memory]
        done: set[Place | str | None] = set(pending)

        def follow(includes: Iterable[Include], includer: Place | str | None) -> None:
            for include in includes:
                add(self._resolve(include, includer))

        def add(places: Iterable[Place]) -> None:
            for place in places:
                if place not in done:
                    done.add(place)
                    pending.append(place)
                    self._read(place)

        follow(self._pre_includes, _COMMAND_LINE)
        computed: set[tuple[str, Place | str | None]] = set()
        trees: frozenset[int] = frozenset()
        while pending:
            while pending:
                name = pending.pop()
                found = self._scan(name)
                follow(found.includes, name)
                computed |= {(operand, name) for operand in found.computed}
            defined = self._macros()
            unknown: list[tuple[str, Place | str | None]] = []
            for operand, name in computed:
                expanded = expand(operand, defined)
                if expanded is None:
                    unknown.append((operand, name))
                follow(expanded or (), name)
            if unknown and not pending:  # what any file may define was looked at
                for operand, name in unknown:
                    self._check_inside(operand, name, defined)
                trees = self._trees()
                for root in trees:
                    add(self._below(root))
        return self._finish(trees)

    def known(self) -> HeaderSet:
        """Return the files found so far, where `extra_key` answers for the others."""
        files = {place: self._digests.of(self._texts[place]) for place in self._places()}
        return HeaderSet(files, frozenset(), frozenset())

    def changed_since(self, start_ns: int, *, silent: bool = False) -> bool:
        """Tell whether what was found may differ from what a compile begun at `start_ns` saw.

        True if a file that was read, or that exists and was passed over, has a status change at or
        after the start, or a link or directory on the way to it has; or if a file that was looked
        for and not found may have gone since. `silent` says that the compile told nothing: then
        all the places count where it may have found a file that is gone again.
        """
        return changed_since(*self._looked_at(silent=silent), start_ns)

    def stamps(self) -> list[tuple[str, Stamp | None]]:
        """Return the status of all that `changed_since` looks at, to compare two of them."""
        return stamps(*self._looked_at(silent=False))

    def _looked_at(self, *, silent: bool) -> tuple[set[str], set[str]]:
        """Return the paths of files that exist, and folders of files that do not."""
        path = self._search.path
        there = {path(place) for place in {*self._places(), *self._bystanders}}
        missing = self._unfound.union(self._lacking if silent or self._scanned else ())
        return there, {os.path.dirname(path(place)) for place in missing}

    def names_paths(self, *, opaque: bool) -> bool:
        """Tell whether a header's text makes the outcome depend on where the header lies.

        With `opaque`, strings can't be found in the output, so every use of `__FILE__` counts,
        definitions of macros and assertions included.
        """
        if self._located:
            return True
        headers = [self._texts[name] for name in self._places()]
        if opaque:
            return any(_asserts(text) for text in (*headers, self._option_macros))
        if not (b"__FILE__" in self._option_macros or any(self._scan(n).file for n in self._texts)):
            return False
        others = [self._option_macros, self._source, *self._in_memory.values()]
        return names_file(headers, others)

    def packs(self) -> bool:
        """Tell whether a text that was found may set how structures are packed."""
        return any(map(packs, self._texts.values())) or packs(self._option_macros)

    # -- gathering -----------------------------------------------------------------------------

    def _read(self, place: Place) -> None:
        if place in self._texts:
            return
        try:
            self._texts[place] = self._digests.read(self._search.path(place))
        except OSError as error:
            raise UncacheableError(
                f"{self._search.opened(place)} was read by the compiler and is gone"
            ) from error

    def _scan(self, name: Place | str | None) -> FileScan:
        found = self._scans.get(name)
        if found is None:
            found = self._scans[name] = self._digests.scanned(
                self._texts[name], lambda: scan(self._spliced(name))
            )
        return found

    def _exists(self, place: Place) -> bool:
        found = self._found.get(place)
        if found is None:
            found = self._found[place] = place in self._texts or is_header(self._search.path(place))
        return found

    def _candidates(self, include: Include, includer: Place | str | None) -> list[Place]:
        """Return where an include is looked for on disk; nowhere if it is in memory."""
        if include.name in self._in_memory:
            return []
        if includer is _COMMAND_LINE:
            found = list(self._search.pre_candidates(include.name))
        else:
            if isinstance(includer, str):
                includer = Place(ABSOLUTE, includer)
            found = list(self._search.candidates(include, includer))
        beside = include.quoted and self._search.source_include and not include.next
        fixed = isinstance(includer, Place) and includer.root == ABSOLUTE and beside
        if (
            found
            and found[0].root > 0
            and (fixed or include.name[:1] == "/" or includer is _COMMAND_LINE)
        ):
            self._located = True
        return found

    def _resolve(self, include: Include, includer: Place | str | None) -> list[Place]:
        """Return the header that an include finds; of `#include_next` all that it may find."""
        found = list(filter(self._exists, self._candidates(include, includer)))
        return found if include.next else found[:1]

    def _macros(self) -> Macros:
        return Macros([*map(self._spliced, self._texts), self._option_macros])

    def _spliced(self, name: Place | str | None) -> bytes:
        """Return a text with continued lines joined."""
        found = self._joined.get(name)
        if found is None:
            found = self._joined[name] = spliced(self._texts[name])
        return found

    def _add_direct_includes(self) -> None:
        """Read what the source and `--pre-include` name, whether the branch was taken or not.

        For traces that lack headers which the source itself includes.
        """
        found = self._scan(None)
        new: set[tuple[Include, Place | None]] = {(include, None) for include in found.includes}
        new |= {(include, _COMMAND_LINE) for include in self._pre_includes}
        followed: set[tuple[Include, Place | None]] = set()
        while True:
            for include, includer in new:
                for place in self._resolve(include, includer):
                    self._read(place)
            followed |= new
            # What was read may define the macros of the next, so until there is no next.
            defined: Definitions = self._macros() if found.computed else {}
            named = {operand: expand(operand, defined) for operand in found.computed}
            new = set()
            new.update((include, None) for each in named.values() for include in each or ())
            new -= followed
            if not new:
                break
        for operand, expanded in named.items():
            if expanded is None:
                raise UncacheableError(
                    f"#include {operand} can't be followed: an earlier compile in this process "
                    "failed inside a header, which leaves NVRTC's trace incomplete",
                    covered_by_extra_key=True,
                )

    def _check_inside(self, operand: str, name: Place | str | None, defined: Definitions) -> None:
        """Raise unless what a computed include names lies below the include directories."""
        outside = isinstance(name, str) or (isinstance(name, Place) and name.root == ABSOLUTE)
        if outside or leads_out(operand, defined):
            raise UncacheableError(
                f"#include {operand} of {self._title(name)} can't be followed",
                covered_by_extra_key=True,
            )

    def _trees(self) -> frozenset[int]:
        """Return the roots that a header can be found below."""
        first = 0 if self._search.source_include else 1
        return frozenset(range(first, len(self._search.prefixes)))

    def _below(self, root: int) -> Iterator[Place]:
        """Yield the place of every file below a root."""
        prefix = self._search.prefixes[root]
        top = os.path.join(self._search.directory, prefix)
        found = tree_files(top, MAX_TREE)
        if found is None:
            raise UncacheableError(
                f"a computed #include can't be followed, and {top} holds more than {MAX_TREE} "
                "files",
                covered_by_extra_key=True,
            )
        for path in found:
            yield self._search.place(prefix + path)

    # -- deciding ------------------------------------------------------------------------------

    def _finish(self, trees: frozenset[int] = frozenset()) -> HeaderSet:
        for name in (None, *self._in_memory, *self._places()):
            found = self._scan(name)
            if found.time:
                raise UncacheableError(f"{self._title(name)} uses the time of the compile")
            if found.embed:
                raise UncacheableError(f"{self._title(name)} has an #embed, which is not followed")
            if any(mark in self._texts[name] for mark in self._trigraphs):
                raise UncacheableError(f"{self._title(name)} has trigraphs, which are not followed")
            if found.alias:
                raise UncacheableError(
                    f"{self._title(name)} gives headers other names by a pragma",
                    covered_by_extra_key=True,
                )
        absent: set[Place] = set()
        present: set[Place] = set()
        self._shadows(absent)
        self._probes(absent, present)
        self._lacking |= absent
        for place in absent:
            if self._exists(place):
                raise UncacheableError(f"{self._search.opened(place)} appeared during the compile")
        files = {place: self._digests.of(self._texts[place]) for place in self._places()}
        once = self._identities(files)
        return HeaderSet(files, frozenset(absent), frozenset(present - files.keys()), trees, once)

    def _places(self) -> list[Place]:
        return [name for name in self._texts if isinstance(name, Place)]

    def _title(self, name: Place | str | None) -> str:
        if name is None:
            return "the source"
        return name if isinstance(name, str) else self._search.opened(name)

    def _shadows(self, absent: set[Place]) -> None:
        """Add the places that come before each header on the include path, and hold none.

        A file that was passed over although it would be found may be one that was read, under
        another name: the compiler tells files by their inode, and does not open a link to a header
        again that has `#pragma once` or a guard. Should the link lead elsewhere one day, it will.
        """
        read = set(self._places())
        inodes = {_inode(self._search.path(place)) for place in read}
        asked, unknown = self._asked(read)
        read |= self._aliases(unknown, inodes)
        seen: set[object] = set()
        for include, name in asked:
            if isinstance(name, Place):
                # Where it is looked for depends on no more than the includer's folder.
                folder = (name.root, name.path.rpartition("/")[0])
                where = (include, folder if include.quoted else name.root == ABSOLUTE)
                if where in seen:
                    continue
                seen.add(where)
            before: list[Place] = []
            for place in self._candidates(include, name):
                if not self._exists(place):
                    before.append(place)
                    continue
                if place not in read and _inode(self._search.path(place)) in inodes:
                    self._read(place)
                    read.add(place)
                if place in read:
                    absent.update(before)
                else:
                    self._bystanders.add(place)
                if not include.next:
                    break
            else:
                self._lacking.update(before)
        for _, name in unknown:
            self._unknown_shadows(read, name, absent)

    def _asked(self, read: Iterable[Place]) -> tuple[_Asked, list[tuple[str, Place | str | None]]]:
        """Return what is included, and by which file; and the operands that can't be told."""
        asked: _Asked = [(include, _COMMAND_LINE) for include in self._pre_includes]
        unknown: list[tuple[str, Place | str | None]] = []
        defined: Macros | None = None
        for name in (None, *self._in_memory, *read):
            found = self._scan(name)
            asked += ((include, name) for include in found.includes)
            for operand in found.computed:
                defined = self._macros() if defined is None else defined
                expanded = expand(operand, defined)
                if expanded is None:
                    unknown.append((operand, name))
                asked += ((include, name) for include in expanded or ())
        return asked, unknown

    def _aliases(
        self, unknown: Sequence[tuple[str, Place | str | None]], inodes: Container[object]
    ) -> set[Place]:
        """Read the other names of files that were read: includes that can't be told may be of them.

        Where a header is skipped that was read under another name, the trace does not tell.
        """
        if self._scanned or not unknown:
            return set()
        defined = self._macros()
        for operand, name in unknown:
            self._check_inside(operand, name, defined)
        found = {
            place
            for root in self._trees()
            for place in self._below(root)
            if place not in self._texts and _inode(self._search.path(place)) in inodes
        }
        for place in found:
            self._read(place)
        return found

    def _unknown_shadows(
        self, read: Iterable[Place], includer: Place | str | None, absent: set[Place]
    ) -> None:
        """Add the places before every header, as if a computed include had named it."""
        for place in read:
            opened = self._search.opened(place)
            names = {opened[len(p) :] for p in self._search.prefixes[1:] if opened.startswith(p)}
            for name in names:
                for other in self._candidates(Include(name, quoted=True), includer):
                    if other == place:
                        break
                    if not self._exists(other):
                        absent.add(other)

    def _identities(self, files: Mapping[Place, bytes]) -> tuple[tuple[int, Place], ...]:
        """Number the files of equal content which `#pragma once` tells apart, or does not."""
        groups: dict[bytes, list[Place]] = {}
        for place, digest in sorted(files.items()):
            groups.setdefault(digest, []).append(place)
        numbers: dict[object, int] = {}
        return tuple(
            (numbers.setdefault(_inode(self._search.path(place)), len(numbers)), place)
            for group in groups.values()
            if len(group) > 1 and b"once" in self._spliced(group[0])
            for place in group
        )

    def _probes(self, absent: set[Place], present: set[Place]) -> None:
        """Add what `__has_include` found, and what it did not find."""
        scans = [scan(self._option_macros), *map(self._scan, self._texts)]
        if not any(found.probes for found in scans):
            return
        titles = {repr(name): name for name in self._texts}
        named = {title: self._spliced(name) for title, name in titles.items()}
        found, complete = probes({**named, "options": self._option_macros})
        if not complete or any(each.joins for each in scans):
            raise UncacheableError(
                "an operand of __has_include is computed, and can't be followed",
                covered_by_extra_key=True,
            )
        asked = {(include, titles[title]) for title, include in found if title in titles}
        for title, include in found:
            if title not in titles:  # in a macro, which any file can use
                users = self._texts if include.quoted else (None,)
                asked.update((include, user) for user in users)
        for include, user in asked:
            before: list[Place] = []
            for place in self._candidates(include, user):
                if not self._exists(place):
                    before.append(place)
                    continue
                present.add(place)
                self._bystanders.add(place)
                if not include.next:
                    break
            else:
                absent.update(before)
                self._unfound.update(before)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def _asserts(text: bytes) -> bool:
    return b"assert" in text or scan(spliced(text)).file
