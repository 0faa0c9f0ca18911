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
        kind: `changed`: a header has another content; `gone`: a header can't be read any more;
            `appeared`: a path exists that did not exist; `vanished`: a path does not exist any
            more; `identity`: two paths lead to one file instead of two files, or to two instead of
            one; `root`: the set needs more include directories than the request has; `variable`: an
            environment variable has another value; `answer`: there is another answer about a path,
            such as another error; `place`: a condition for using the result at another location
            does not hold (see `places`).
        path: the absolute path of the file, the name of the variable, or the path in the condition;
            empty if the difference does not concern a single path.
    """

    kind: str
    path: str


class Watched(NamedTuple):
    """A directory whose status shows whether absent files have appeared in it.

    Attributes:
        stamp: the stamp of the directory when the files were absent; `NO_STAMP` if an unchanged
            stamp would not prove that the files are still absent.
        names: the paths, below the directory, of the absent files; None if another process has
            checked them.
        plain: the names of entries of the directory that were not links.
    """

    stamp: Stamp
    names: list[str] | None
    plain: Sequence[str] = ()


class LocationState:
    """What this process has found out about a dependency set's files at one location.

    Args:
        answers: the answers in the set.
        search: the roots at this location.

    Raises:
        IndexError: the set has a root that `search` does not have.

    Attributes:
        files, absent, present, folders, names, same, denied, plain: the same as in `Answers`, with
            absolute paths.
        dependencies: `files`, sorted.
        stamps: the stamp with which each of `files` had its digest; `NO_STAMP` if the file must be
            read again.
        directories: the directories whose status shows whether absent files have appeared; None if
            all absent files must be checked.
        misplaced: the differences found by `misplaced`; None before the first check.
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
        """Return the stamps for other processes, in the encoding that `manifest` describes.

        A stamp that other processes must not trust is replaced by `NO_STAMP`.
        """
        known = self.directories or {}
        watched = (each.stamp for each in known.values())
        stamps = durable((*self.files, *known), (*self.stamps, *watched))
        packed = [_STAMP.pack(*stamp) for stamp in stamps]
        packed.insert(len(self.files), struct.pack("<I", len(known)))
        return b"".join((*packed, "\0".join(known).encode("utf-8", "surrogateescape")))

    def unpack(self, raw: bytes) -> None:
        """Set the stamps to those in `raw`, which another process has verified.

        If `raw` is malformed, nothing is changed.
        """
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
    """Yield the differences between `answers` and the present answers of the system.

    Those that are cheapest to find come first. The stamps of files that do not differ are appended
    to `verified`.
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
    """Yield the differences in the answers `same`, `present`, `folders`, `names` and `denied`."""
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
    """Yield the differences in the answers `access`, `links` and `times`, which only nvcc has."""
    for mode, granted, rooted in answers.access:
        if os.access(search.path(rooted), mode) != granted:
            yield Difference("answer", search.path(rooted))
    for target, rooted in answers.links:
        if _target_of(rooted, search) != target:
            yield Difference("answer", search.path(rooted))
    times: dict[int, dict[int, int]] = {}
    for group, number, rooted in answers.times:
        known = times.setdefault(group, {})
        with suppress(OSError):  # a missing file is among `files` and was reported there
            now = int(os.stat(search.path(rooted)).st_mtime)
            if known.setdefault(number, now) != now or len({*known.values()}) != len(known):
                yield Difference("identity", search.path(rooted))


def _target_of(link: RootedPath, search: HeaderSearch) -> RootedPath | None:
    """Return the present target of `link`, or None if there is no link.

    If `link` is a root itself, its target is its real path.
    """
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
    """Yield the reasons why a result must not be used at a location where it was not compiled.

    These reasons depend on names alone, not on files. The other readings of the request, for which
    the answers must hold as well, are added to `state.readings`; see `places`.
    """
    search = request.search
    for condition in dependency_set.answers().conditions:
        try:
            state.readings += places.readings(condition, request)
        except ValueError:
            yield Difference("place", places.text_of(condition))
    if not search.in_memory():
        return
    # Here, the compiler would find one of its in-memory texts instead of asking for the file.
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
    """Yield a difference for each absent file that now exists, and for each new link.

    A new link is at a path that was not a link during the compile. Only paths in directories whose
    status has changed are checked.
    """
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
        if watched.names is None:  # another process has stored the stamp: check everything once
            state.directories = None
            yield from _appeared(state, digests, search)
            return
        digests.reads += 1
        read_at = digests.clock()
        # What an existing link or subdirectory contains may change while the directory's own status
        # stays the same, so a stamp proves nothing if one exists.
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
    """Return the directories to watch for absent files, without stamps.

    Args:
        paths: absent files. Each belongs to the deepest existing directory above it.
        plain: paths that were not links. Each belongs to its directory.
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
    """Return whether `path` is a readable regular file, or a link to one."""
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _confused_names(
    names: Iterable[str], own_texts: Sequence[str], files: Iterable[str]
) -> Iterator[str]:
    """Yield the names of in-memory texts at which a file exists that also has another name.

    The other name is that of a file that was read, or of another in-memory text. The compiler would
    then treat the text and this file, or the two texts, as the same.

    Args:
        names: the paths of in-memory texts that the compiler has looked for.
        own_texts: the paths of the request's in-memory texts. The first one, of the source, is
            checked, too, because the source may have had another name when it was compiled.
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
    """Return whether paths with equal numbers, and only these, now lead to the same file."""
    files: dict[int, tuple[int, int]] = {}
    for number, path in once:
        file = identity_of(path)
        if file is None or files.setdefault(number, file) != file:
            return False
    return len(set(files.values())) == len(files)


def _error_now(path: str) -> int:
    """Call stat and open for `path`; return the errno of the failure, or 0 if both succeed.

    A device or a pipe is not opened; the result is the errno that its permissions would cause.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode):
            # A forged manifest may name a file for which opening it has effects.
            return 0 if os.access(path, os.R_OK) else errno.EACCES
        os.close(os.open(path, READ_ONLY))
    except OSError as error:
        return error.errno or 0
    return 0
