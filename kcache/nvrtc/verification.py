"""Verification: compares the answers in a dependency set with the files and variables of now."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc import places
from kcache.nvrtc.answers import each_path, identity_of
from kcache.nvrtc.files import NO_STAMP, Stamp, is_fresh, lasting, lasting_once, stamp_of

if TYPE_CHECKING:
    from kcache.nvrtc.answers import Answers
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import DependencySet
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.search import HeaderSearch, RootedPath

_STAMP = struct.Struct("<5q")


class Difference(NamedTuple):
    """One difference between a dependency set and the present state.

    Attributes:
        kind: `changed` or `gone`, of a header that was read; `appeared`, of something that was not
            there; `vanished`, of something that was; `identity`, of files that became one, or two;
            `root`, of a set that is for another include path; `variable`, of an environment
            variable; `answer`, of a path that could not be read, or now can't be so for another
            reason; `place`, of a directory that the result depends on.
        path: absolute path of the file, or name of the variable or the source; empty where no
            single one is meant.
    """

    kind: str
    path: str


class Watched(NamedTuple):
    """A directory whose status shows whether absent files have appeared below it.

    Attributes:
        stamp: its status when the files were absent; zeros if it shows nothing.
        names: the absent files below it, or None if another process checked them.
    """

    stamp: Stamp
    names: list[str] | None


def _watched_from(directory: str, names: list[str], now: Stamp, read_at: int) -> Watched:
    """Return a directory that was just checked, with its stamp if that will show a change."""
    # An existing name (a link, a directory) may change without a trace in this directory.
    firsts = {name.partition("/")[0] for name in names}
    there = any(os.path.lexists(os.path.join(directory, first)) for first in firsts)
    return Watched(NO_STAMP if there or is_fresh(now, read_at) else now, names)


class LocationState:
    """What is known of a dependency set's files in one location.

    Attributes:
        paths: absolute paths of the headers, in the set's order.
        dependencies: the same, sorted.
        stamps: under which each had its digest; `NO_STAMP` for what must be read again.
        directories: what the last check for absent files found; None before the first.
        misplaced: why the result is not used here, as far as names decide; None before the first
            look.
        readings: see `places`.
    """

    __slots__ = ("dependencies", "directories", "misplaced", "paths", "readings", "stamps")

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.dependencies = tuple(sorted(paths))
        self.stamps = [NO_STAMP] * len(paths)
        self.directories: dict[str, Watched] | None = None
        self.misplaced: tuple[Difference, ...] | None = None
        self.readings: list[Request] = []

    def pack(self) -> bytes:
        """Return what another process may trust, as the module describes it."""
        known = self.directories or {}
        watched = (each.stamp for each in known.values())
        stamps = lasting((*self.paths, *known), (*self.stamps, *watched))
        packed = [_STAMP.pack(*stamp) for stamp in stamps]
        packed.insert(len(self.paths), struct.pack("<I", len(known)))
        return b"".join((*packed, "\0".join(known).encode("utf-8", "surrogateescape")))

    def unpack(self, raw: bytes, *, absent: bool) -> None:
        """Take over what another process has verified. Without it, everything is checked.

        `absent` is whether files were absent, so that there are directories.
        """
        end = _STAMP.size * len(self.paths)
        with suppress(struct.error, ValueError):
            (count,) = struct.unpack_from("<I", raw, end)
            stamps = list(_STAMP.iter_unpack(raw[:end]))
            middle = end + 4 + count * _STAMP.size
            paths = raw[middle:].decode("utf-8", "surrogateescape").split("\0") if count else []
            watched = list(_STAMP.iter_unpack(raw[end + 4 : middle]))
            if len(watched) == len(paths) and (count or not absent):
                trusted = lasting_once((*self.paths, *paths), (*stamps, *watched))
                self.stamps = list(trusted[: len(stamps)])
                self.directories = {
                    p: Watched(s, None) for p, s in zip(paths, trusted[len(stamps) :], strict=True)
                }


def differences(
    dependency_set: DependencySet,
    request: Request,
    digests: FileDigests,
    verified: list[Stamp],
    *,
    reading: bool = False,
) -> Iterator[Difference]:
    """Yield the differences between a dependency set and now, the cheapest to find first.

    Args:
        dependency_set: the set.
        request: the request.
        digests: the contents of files.
        verified: gets the stamps of the files that do not differ.
        reading: whether the request is another reading of one that was checked; see `places`.

    Raises:
        CorruptEntryError: the set is malformed.
    """
    answers, search = dependency_set.answers(), request.search
    if answers.roots > len(search.roots):
        yield Difference("root", "")
        return
    state = dependency_set.state_at(request)
    if not (reading or answers.home == request.location):
        if state.misplaced is None:
            state.misplaced = tuple(_misplaced(dependency_set, request, state.readings))
        yield from state.misplaced
        for each in state.readings:
            yield from differences(dependency_set, each, digests, [], reading=True)
    raw, at = dependency_set.raw, answers.digests_at
    for path in digests.differing(state.paths, raw, at, state.stamps, verified):
        yield Difference("changed" if is_header(path) else "gone", path)
    yield from _appeared(answers, search, digests, state)
    yield from _other_answers(answers, search, state)


def _other_answers(
    answers: Answers, search: HeaderSearch, state: LocationState
) -> Iterator[Difference]:
    """Yield the differences in what is neither the content nor the absence of a file."""
    if answers.same and not _have_same_identities(answers.same, search):
        yield Difference("identity", "")
    for path in map(search.path, answers.present):
        if not is_header(path):
            yield Difference("vanished", path)
    for path in map(search.path, answers.folders):
        if not os.path.isdir(path):
            yield Difference("vanished", path)
    names = map(search.path, answers.names)
    for path in _confused_names(names, search.in_memory()[0], state.paths):
        yield Difference("identity", path)
    for error, rooted in answers.denied:
        if _error_now(search.path(rooted)) != error:
            yield Difference("answer", search.path(rooted))
    for name, value in answers.variables:
        if search.variable(name) != value:
            yield Difference("variable", name)


def _misplaced(
    dependency_set: DependencySet, request: Request, readings: list[Request]
) -> Iterator[Difference]:
    """Yield what keeps the result from being used where it was not compiled.

    `readings` gets the other readings of the request for which the answers must hold, too.
    """
    answers, search = dependency_set.answers(), request.search
    for condition in answers.conditions:
        try:
            readings += places.readings(condition, request)
        except ValueError:
            yield Difference("place", places.text_of(condition))
    # A question for one of the compiler's own texts would be answered from memory.
    source, *headers = map(os.path.normpath, search.in_memory())
    own = {source, *headers}
    if source in headers:
        yield Difference("identity", source)
    if any(os.fsencode(os.path.basename(path)) in dependency_set.raw for path in own):
        asked = map(os.path.normpath, map(search.path, _asked(answers)))
        yield from (Difference("identity", path) for path in own.intersection(asked))


def _appeared(
    answers: Answers, search: HeaderSearch, digests: FileDigests, state: LocationState
) -> Iterator[Difference]:
    """Yield absent files that now exist, by the status of their directories if that is enough."""
    known = state.directories
    if known is None:
        known = state.directories = _survey(answers, search)
    for directory, watched in known.items():
        try:
            now = stamp_of(os.stat(directory))
        except OSError:
            now = None
        if now == watched.stamp:
            continue
        if watched.names is None:  # another process stored it: check everything once
            state.directories = None
            yield from _appeared(answers, search, digests, state)
            return
        digests.reads += 1
        read_at = digests.clock()
        paths = (os.path.join(directory, name) for name in watched.names)
        there = None
        for there in filter(os.path.exists, paths):
            yield Difference("appeared", there)
        if there is None and now is not None:
            known[directory] = _watched_from(directory, watched.names, now, read_at)


def _survey(answers: Answers, search: HeaderSearch) -> dict[str, Watched]:
    """Group the absent files by the deepest directory that exists, stamps unknown."""
    found: dict[str, list[str]] = {}
    deepest: dict[str, str] = {}
    for path in sorted(map(search.path, each_path(answers.absent))):
        folder = os.path.dirname(path)
        existing = deepest.get(folder)
        if existing is None:
            existing = folder
            while existing not in ("", "/") and not os.path.isdir(existing):
                existing = os.path.dirname(existing)
            deepest[folder] = existing
        found.setdefault(existing, []).append(path[len(existing) :].lstrip("/"))
    return {directory: Watched(NO_STAMP, names) for directory, names in found.items()}


def _asked(answers: Answers) -> Iterator[RootedPath]:
    """Yield every path that the compiler asked for, but the names of its own texts."""
    yield from each_path((*answers.files, *answers.absent))
    yield from (*answers.present, *answers.folders)
    yield from (rooted for _, rooted in answers.denied)


def is_header(path: str) -> bool:
    """Return whether there is a readable file at `path`, links followed."""
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _confused_names(names: Iterable[str], source: str, files: Iterable[str]) -> Iterator[str]:
    """Yield names of in-memory texts that lead to a file which also exists under another name.

    The compiler takes the two for one.

    Args:
        names: those that the compiler has looked for.
        source: the present name of the source; it may have been compiled under another name.
        files: those that were read.
    """
    own = tuple(names)
    there = {path: file for path in dict.fromkeys((*own, source)) if (file := identity_of(path))}
    if not there:
        return
    read = [(path, identity_of(path)) for path in files]
    for name, file in there.items():
        others = (path for path in there if path != name)
        if any(there[path] == file for path in others) or any(
            each == file and (path != name or name not in own) for path, each in read
        ):
            yield name


def _have_same_identities(once: Iterable[tuple[int, RootedPath]], search: HeaderSearch) -> bool:
    """Return whether equal numbers are one file, and different numbers different files."""
    files: dict[int, tuple[int, int]] = {}
    for number, rooted in once:
        file = identity_of(search.path(rooted))
        if file is None or files.setdefault(number, file) != file:
            return False
    return len(set(files.values())) == len(files)


def _error_now(path: str) -> int:
    """Return the errno with which stat or open of a path fails; 0 for none."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode):
            # A forged manifest may name a file that acts when it is opened.
            return 0 if os.access(path, os.R_OK) else errno.EACCES
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        os.close(os.open(path, flags))
    except OSError as error:
        return error.errno or 0
    return 0
