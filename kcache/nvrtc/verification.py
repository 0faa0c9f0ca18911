"""Verification: compares the answers in a dependency set with the present files and variables."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc import places
from kcache.nvrtc.answers import identity_of
from kcache.nvrtc.files import NO_STAMP, READ_ONLY, Stamp, durable, is_fresh, stamp_of
from kcache.nvrtc.search import ABSOLUTE, RootedPath

if TYPE_CHECKING:
    from kcache.nvrtc.answers import Answers
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import DependencySet
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.search import HeaderSearch

_STAMP = struct.Struct("<5q")


class Difference(NamedTuple):
    """One difference between a dependency set and the present state.

    Attributes:
        kind: `changed` or `gone`: a header that was read; `appeared`: a path that did not exist;
            `vanished`: a path that existed; `identity`: two files became one, or one became two;
            `root`: the set is for another number of include directories; `variable`: an environment
            variable; `answer`: another answer about a path, such as another error; `place`: a
            directory that the result depends on.
        path: absolute path of the file, or name of the variable or the source; empty if the
            difference is not that of one path.
    """

    kind: str
    path: str


class Watched(NamedTuple):
    """A directory whose status shows whether absent files have appeared below it.

    Attributes:
        stamp: its status when the files were absent; zeros if that can't be trusted.
        names: the absent files below it; None if another process checked them.
        plain: names below it that were not links.
    """

    stamp: Stamp
    names: list[str] | None
    plain: Sequence[str] = ()


class LocationState:
    """What this process has found out about a dependency set's files at one location.

    Args:
        answers: of the set.
        search: the roots at this location.

    Raises:
        IndexError: the set has more roots than the request.

    Attributes:
        files, absent, present, folders, names, same, denied, plain: the answers, with absolute
            paths.
        dependencies: the files, sorted.
        stamps: the stamp under which each file had its digest; `NO_STAMP` if it must be read again.
        directories: the result of the last check for absent files; None before the first check.
        misplaced: the differences that depend on names alone; None before the first check.
        readings: the other readings of the request; see `places`.
    """

    def __init__(self, answers: Answers, search: HeaderSearch) -> None:
        self.files = search.paths(answers.files)
        self.absent = search.paths(answers.absent)
        self.present = search.paths(answers.present)
        self.folders = search.paths(answers.folders)
        self.names = search.paths(answers.names)
        self.same = [(number, search.path(rooted)) for number, rooted in answers.same]
        self.denied = [(error, search.path(rooted)) for error, rooted in answers.denied]
        self.plain = search.paths(answers.plain)
        self.dependencies = tuple(sorted(self.files))
        self.stamps = [NO_STAMP] * len(self.files)
        self.directories: dict[str, Watched] | None = None
        self.misplaced: tuple[Difference, ...] | None = None
        self.readings: list[Request] = []

    def pack(self) -> bytes:
        """Return the stamps that another process may trust, encoded as `manifest` describes."""
        known = self.directories or {}
        watched = (each.stamp for each in known.values())
        stamps = durable((*self.files, *known), (*self.stamps, *watched))
        packed = [_STAMP.pack(*stamp) for stamp in stamps]
        packed.insert(len(self.files), struct.pack("<I", len(known)))
        return b"".join((*packed, "\0".join(known).encode("utf-8", "surrogateescape")))

    def unpack(self, raw: bytes) -> None:
        """Use the stamps that another process has verified; ignore them if they are malformed."""
        end = _STAMP.size * len(self.files)
        with suppress(struct.error, ValueError):
            (count,) = struct.unpack_from("<I", raw, end)
            stamps = list(_STAMP.iter_unpack(raw[:end]))
            middle = end + 4 + count * _STAMP.size
            paths = raw[middle:].decode("utf-8", "surrogateescape").split("\0") if count else []
            watched = list(_STAMP.iter_unpack(raw[end + 4 : middle]))
            if len(watched) == len(paths) and (count or not (self.absent or self.plain)):
                trusted = durable((*self.files, *paths), (*stamps, *watched))
                self.stamps = list(trusted[: len(stamps)])
                self.directories = {
                    p: Watched(s, None) for p, s in zip(paths, trusted[len(stamps) :], strict=True)
                }


def differences(
    answers: Answers,
    state: LocationState,
    search: HeaderSearch,
    digests: FileDigests,
    verified: list[Stamp],
) -> Iterator[Difference]:
    """Yield the differences between answers and the present state, the cheapest first.

    `verified` gets the stamps of the files that do not differ.
    """
    for path in digests.differing(state.files, answers.digests, state.stamps, verified):
        yield Difference("changed" if is_header(path) else "gone", path)
    yield from _appeared(state, digests, search)
    yield from _other_answers(state, search)
    yield from _more_answers(answers, search)
    for name, value in answers.variables:
        if search.variable(name) != value:
            yield Difference("variable", name)


def _other_answers(state: LocationState, search: HeaderSearch) -> Iterator[Difference]:
    """Yield the differences in answers other than the content or the absence of a file."""
    if state.same and not _have_same_identities(state.same):
        yield Difference("identity", "")
    for path in state.present:
        if not is_header(path):
            yield Difference("vanished", path)
    for path in state.folders:
        if not os.path.isdir(path):
            yield Difference("vanished", path)
    for path in _confused_names(state.names, search.in_memory(), state.files):
        yield Difference("identity", path)
    for error, path in state.denied:
        if _error_now(path) != error:
            yield Difference("answer", path)


def _more_answers(answers: Answers, search: HeaderSearch) -> Iterator[Difference]:
    """Yield the differences in answers that only nvcc's tools ask for."""
    for mode, granted, rooted in answers.access:
        if os.access(search.path(rooted), mode) != granted:
            yield Difference("answer", search.path(rooted))
    for target, rooted in answers.links:
        if _target_of(rooted, search) != target:
            yield Difference("answer", search.path(rooted))
    times: dict[int, dict[int, int]] = {}
    for group, number, rooted in answers.times:
        known = times.setdefault(group, {})
        with suppress(OSError):  # a missing file was reported among those that were read
            now = int(os.stat(search.path(rooted)).st_mtime)
            if known.setdefault(number, now) != now or len({*known.values()}) != len(known):
                yield Difference("identity", search.path(rooted))


def _target_of(link: RootedPath, search: HeaderSearch) -> RootedPath | None:
    """Return where a link leads; for a root itself, its real path."""
    try:
        if link.path == ".":
            return search.rooted(os.path.realpath(search.path(link)))
        target = os.readlink(search.path(link))
    except OSError:
        return None
    return search.rooted(target) if target.startswith("/") else RootedPath(ABSOLUTE, target)


def misplaced(
    dependency_set: DependencySet, request: Request, state: LocationState
) -> Iterator[Difference]:
    """Yield the reasons not to use the result at a location where it was not compiled.

    Adds to `state.readings` the other readings of the request for which the answers must hold.
    """
    search = request.search
    for condition in dependency_set.answers().conditions:
        try:
            state.readings += places.readings(condition, request)
        except ValueError:
            yield Difference("place", places.text_of(condition))
    if not search.in_memory():
        return
    # The compiler would answer a question about one of its in-memory texts from memory.
    source, *headers = map(os.path.normpath, search.in_memory())
    own = {source, *headers}
    if source in headers:
        yield Difference("identity", source)
    if any(os.fsencode(os.path.basename(path)) in dependency_set.raw for path in own):
        denied = (path for _, path in state.denied)
        paths = (*state.files, *state.absent, *state.present, *state.folders, *denied)
        asked = map(os.path.normpath, paths)
        yield from (Difference("identity", path) for path in own.intersection(asked))


def _appeared(
    state: LocationState, digests: FileDigests, search: HeaderSearch
) -> Iterator[Difference]:
    """Yield absent files that now exist; check only directories whose status has changed."""
    known = state.directories
    if known is None:
        known = state.directories = _survey(state.absent, state.plain)
    for directory, watched in known.items():
        try:
            now = stamp_of(os.stat(directory))
        except OSError:
            now = None
        if now == watched.stamp:
            continue
        if watched.names is None:  # another process stored it: check everything once
            state.directories = None
            yield from _appeared(state, digests, search)
            return
        digests.reads += 1
        read_at = digests.clock()
        # An existing link or directory may change without a change of this directory's status.
        firsts = {name.partition("/")[0] for name in watched.names}
        there = {each for each in firsts if os.path.lexists(os.path.join(directory, each))}
        names = (name for name in watched.names if name.partition("/")[0] in there)
        appeared = [*filter(search.exists, (os.path.join(directory, name) for name in names))]
        yield from (Difference("appeared", path) for path in appeared)
        linked = [path for name in watched.plain if os.path.islink(path := f"{directory}/{name}")]
        yield from (Difference("answer", path) for path in linked)
        if not (appeared or linked) and now is not None:
            shows = not (there or is_fresh(now, read_at))
            known[directory] = watched._replace(stamp=now if shows else NO_STAMP)


def _survey(paths: Iterable[str], plain: Iterable[str]) -> dict[str, Watched]:
    """Group absent files by the deepest directory that exists; the stamps are not known yet.

    `plain` are names that are not links; they are grouped by their directories.
    """
    found: dict[str, list[str]] = {}
    deepest: dict[str, str] = {}
    for path in sorted(paths):
        folder = path.rpartition("/")[0]
        existing = deepest.get(folder)
        if existing is None:
            existing = folder
            while existing and not os.path.isdir(existing):
                existing = existing.rpartition("/")[0]
            deepest[folder] = existing
        found.setdefault(existing or "/", []).append(path[len(existing) :].lstrip("/"))
    unlinked: dict[str, list[str]] = {}
    for folder, _, name in (path.rpartition("/") for path in plain):
        unlinked.setdefault(folder or "/", []).append(name)
    return {
        folder: Watched(NO_STAMP, found.get(folder, []), unlinked.get(folder, ()))
        for folder in dict.fromkeys((*found, *unlinked))
    }


def is_header(path: str) -> bool:
    """Return whether there is a readable file at `path`, links followed."""
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _confused_names(
    names: Iterable[str], own_texts: Sequence[str], files: Iterable[str]
) -> Iterator[str]:
    """Yield the names of in-memory texts at which there is a file that has another name, too.

    The compiler would treat the text and the file as one.

    Args:
        names: the names of texts that the compiler has looked for.
        own_texts: the present names of the texts, the source first, because it may have been
            compiled under another name.
        files: the files that were read.
    """
    own = tuple(names)
    asked = dict.fromkeys((*own, *own_texts[:1]))
    there = {path: file for path in asked if (file := identity_of(path))}
    if not there:
        return
    read = [(path, identity_of(path)) for path in files]
    for name, file in there.items():
        others = (path for path in there if path != name)
        if any(there[path] == file for path in others) or any(
            each == file and (path != name or name not in own) for path, each in read
        ):
            yield name


def _have_same_identities(once: Iterable[tuple[int, str]]) -> bool:
    """Return whether paths with equal numbers, and no others, are now the same file."""
    files: dict[int, tuple[int, int]] = {}
    for number, path in once:
        file = identity_of(path)
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
        os.close(os.open(path, READ_ONLY))
    except OSError as error:
        return error.errno or 0
    return 0
