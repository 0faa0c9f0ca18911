"""Tracker: finds out the header set of one compile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from kcache.errors import KcacheError
from kcache.nvrtc.files import FileDigests
from kcache.nvrtc.headers import HeaderSet, is_header, tree_files
from kcache.nvrtc.scan import FileScan, expand, macros, probes, scan, spliced
from kcache.nvrtc.search import ABSOLUTE, SOURCE, HeaderSearch, Include, Place
from kcache.nvrtc.trace import Trace

__all__ = ["Tracker", "UncacheableError"]

#: Roots with more files than this are not taken whole for a dependency.
MAX_TREE = 20_000


class UncacheableError(KcacheError):
    """A compile's outcome must not be cached; the message says why. Never reaches a caller.

    Attributes:
        covered_by_extra_key: whether a caller's `extra_key` takes responsibility for the reason.
    """

    def __init__(self, reason: str, *, covered_by_extra_key: bool = False) -> None:
        super().__init__(reason)
        self.covered_by_extra_key = covered_by_extra_key


class Tracker:
    """Finds out the header set of one compile.

    Args:
        source: the source text.
        search: its include path.
        pre_includes: files of `--pre-include`.
        defines: `NAME` and `NAME=VALUE` of the options.
        in_memory: in-memory headers, include name -> text.
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
        digests: FileDigests,
    ) -> None:
        self._search = search
        self._digests = digests
        self._pre_includes = tuple(Include(name, quoted=True) for name in pre_includes)
        self._source = source.encode()
        self._in_memory = {name: text.encode() for name, text in (in_memory or {}).items()}
        self._option_macros = "".join(
            f"#define {name} {value if equals else '1'}\n"
            for name, equals, value in (define.partition("=") for define in defines)
        ).encode()
        #: Texts by the place of the file; None is the source, text names are in-memory headers.
        self._texts: dict[Place | str | None, bytes] = {None: self._source}
        self._texts.update(self._in_memory)
        self._scans: dict[Place | str | None, FileScan] = {}
        self._found: dict[Place, bool] = {}
        #: Files that exist where an include was looked for, and were not read.
        self._bystanders: set[Place] = set()
        #: Files that a `__has_include` did not find.
        self._unfound: set[Place] = set()

    def from_trace(self, trace: Trace) -> HeaderSet:
        """Return the header set of a compile that told which headers it opened.

        Raises:
            UncacheableError: the outcome must not be cached.
        """
        names = trace.headers - self._search.in_memory
        for place in map(self._search.place, names):
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
        pending: list[Place | str | None] = [None, *self._in_memory]
        done: set[Place | str | None] = set(pending)
        whole_tree = False

        def follow(includes: Iterable[Include], includer: Place | str | None) -> None:
            for include in includes:
                place = self._resolve(include, includer)
                if place is not None and place not in done:
                    done.add(place)
                    pending.append(place)
                    self._read(place)

        follow(self._pre_includes, None)
        computed: set[tuple[str, Place | str | None]] = set()
        resolved: set[tuple[str, Place | str | None, Include]] = set()
        while pending:
            while pending:
                name = pending.pop()
                found = self._scan(name)
                follow(found.includes, name)
                computed |= {(operand, name) for operand in found.computed}
            defined = macros([*map(spliced, self._texts.values()), self._option_macros])
            for operand, name in computed:
                expanded = expand(operand, defined)
                whole_tree = whole_tree or expanded is None
                new = {(operand, name, include) for include in expanded or ()} - resolved
                resolved |= new
                follow((include for _, _, include in new), name)
        return self._finish(self._read_tree() if whole_tree else frozenset())

    def known(self) -> HeaderSet:
        """Return the files found so far, where `extra_key` answers for the others."""
        files = {place: self._digests.of(self._texts[place]) for place in self._places()}
        return HeaderSet(files, frozenset(), frozenset())

    def changed_since(self, start_ns: int) -> bool:
        """Tell whether what was found may differ from what a compile begun at `start_ns` saw.

        True if a file that was read, or that exists and was passed over, has a status change at or
        after the start; or if a file that a `__has_include` did not find may have gone since.
        """
        for place in {*self._places(), *self._bystanders}:
            try:
                if _changed_ns(os.stat(self._search.path(place))) >= start_ns:
                    return True
            except OSError:
                return True
        folders = {os.path.dirname(self._search.path(place)) for place in self._unfound}
        for folder in folders:
            try:
                if os.stat(folder).st_mtime_ns >= start_ns:
                    return True
            except OSError:
                continue
        return False

    def names_paths(self, *, opaque: bool) -> bool:
        """Tell whether a header's text makes the outcome depend on where the header lies.

        With `opaque`, strings can't be found in the output, so every use of `__FILE__` counts,
        definitions of macros included.
        """
        scans = [self._scan(name) for name in self._places()]
        return any(found.file or (opaque and found.file_macro) for found in scans)

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
            found = self._scans[name] = self._digests.scanned(self._texts[name], scan)
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
        if isinstance(includer, str):
            includer = (
                Place(SOURCE, includer)
                if not includer.startswith("/")
                else Place(ABSOLUTE, includer)
            )
        return list(self._search.candidates(include, includer))

    def _resolve(self, include: Include, includer: Place | str | None) -> Place | None:
        return next(filter(self._exists, self._candidates(include, includer)), None)

    def _add_direct_includes(self) -> None:
        """Read what the source and `--pre-include` name, whether the branch was taken or not.

        For traces that lack headers which the source itself includes.
        """
        found = self._scan(None)
        includes = set(found.includes).union(self._pre_includes)
        if found.computed:
            defined = macros([*map(spliced, self._texts.values()), self._option_macros])
            for operand in found.computed:
                expanded = expand(operand, defined)
                if expanded is None:
                    raise UncacheableError(
                        f"#include {operand} can't be followed: an earlier compile in this process "
                        "failed inside a header, which leaves NVRTC's trace incomplete",
                        covered_by_extra_key=True,
                    )
                includes |= expanded
        for include in includes:
            place = self._resolve(include, None)
            if place is not None:
                self._read(place)

    def _read_tree(self) -> frozenset[int]:
        """Read every file below the roots, and return the roots."""
        roots = range(0 if self._search.source_include else 1, len(self._search.prefixes))
        for root in roots:
            top = os.path.join(self._search.directory, self._search.prefixes[root])
            found = tree_files(top, MAX_TREE)
            if found is None:
                raise UncacheableError(
                    f"a computed #include can't be followed, and {top} holds more than {MAX_TREE} "
                    "files",
                    covered_by_extra_key=True,
                )
            for path in found:
                self._read(Place(root, path))
        return frozenset(roots)

    # -- deciding ------------------------------------------------------------------------------

    def _finish(self, trees: frozenset[int] = frozenset()) -> HeaderSet:
        for name in (None, *self._in_memory, *self._places()):
            found = self._scan(name)
            if found.time:
                raise UncacheableError(f"{self._title(name)} uses the time of the compile")
            if found.embed:
                raise UncacheableError(f"{self._title(name)} has an #embed, which is not followed")
        absent: set[Place] = set()
        present: set[Place] = set()
        self._shadows(absent)
        self._probes(absent, present)
        self._links(present)
        for place in absent:
            if self._exists(place):
                raise UncacheableError(f"{self._search.opened(place)} appeared during the compile")
        files = {place: self._digests.of(self._texts[place]) for place in self._places()}
        return HeaderSet(files, frozenset(absent), frozenset(present - files.keys()), trees)

    def _places(self) -> list[Place]:
        return [name for name in self._texts if isinstance(name, Place)]

    def _title(self, name: Place | str | None) -> str:
        if name is None:
            return "the source"
        return name if isinstance(name, str) else self._search.opened(name)

    def _shadows(self, absent: set[Place]) -> None:
        """Add the places that come before each header on the include path, and hold none."""
        read = set(self._places())
        explained: set[Place] = set()
        computing: list[Place | str | None] = []
        for name in (None, *self._in_memory, *self._places()):
            found = self._scan(name)
            if found.computed:
                computing.append(name)
            includes = found.includes.union(self._pre_includes) if name is None else found.includes
            for include in includes:
                before: list[Place] = []
                for place in self._candidates(include, name):
                    if self._exists(place):
                        if place in read:
                            explained.add(place)
                            absent.update(before)
                        else:
                            self._bystanders.add(place)
                        break
                    before.append(place)
        self._computed_shadows(read - explained, computing, absent)

    def _computed_shadows(
        self,
        computed: Iterable[Place],
        computing: Iterable[Place | str | None],
        absent: set[Place],
    ) -> None:
        """Add the places before headers that no literal include explains.

        Their names were computed: what follows some root; and they may have been looked for beside
        every file that computes one.
        """
        for place in computed:
            if place.root == ABSOLUTE:
                continue
            others = [Place(root, place.path) for root in range(1, place.root)]
            for name in computing:
                others += self._candidates(Include(place.path, quoted=True), name)[:1]
            absent.update(other for other in others if not self._exists(other))

    def _links(self, present: set[Place]) -> None:
        """Read the passed-over files that are a file which was read, under another name.

        The compiler tells a file by its inode, so with `#pragma once` a link to a header that was
        read is not opened again. Should the link lead elsewhere one day, it will be.
        """
        read = {_inode(self._search.path(place)) for place in self._places()}
        for place in self._bystanders - present:
            if _inode(self._search.path(place)) in read:
                self._read(place)

    def _probes(self, absent: set[Place], present: set[Place]) -> None:
        """Add what `__has_include` found, and what it did not find."""
        if not any(self._scan(name).probes for name in self._texts):
            return
        texts = {name: spliced(text) for name, text in self._texts.items()}
        titles: dict[str, Place | str | None] = {}
        for name in texts:
            titles[repr(name)] = name
        named = {title: texts[name] for title, name in titles.items()}
        found, complete = probes({**named, "options": self._option_macros})
        if not complete:
            raise UncacheableError(
                "an operand of __has_include is computed, and can't be followed",
                covered_by_extra_key=True,
            )
        for title, include in found:
            before: list[Place] = []
            for place in self._candidates(include, titles.get(title)):
                if self._exists(place):
                    present.add(place)
                    self._bystanders.add(place)
                    break
                before.append(place)
            else:
                absent.update(before)
                self._unfound.update(before)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def _changed_ns(status: os.stat_result) -> int:
    """Return when a file was last changed; Windows keeps no such time but mtime."""
    return status.st_mtime_ns if os.name == "nt" else status.st_ctime_ns
