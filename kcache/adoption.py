"""Adoption: decides whether a directory without a marker is a cache of an earlier version.

Earlier versions wrote no marker, and on a full disk nobody can write one. So kcache checks
everything in such a directory. Each name has to be one that kcache gives, and each file has to be
empty or what kcache writes under that name. Unless all files are empty, one of them has to prove by
itself that it is kcache's. If there is a single other file, the directory is somebody else's.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from stat import S_IFDIR, S_IFLNK, S_IFREG, S_ISDIR, S_ISLNK, S_ISREG

from kcache.backend import GROUP, is_key
from kcache.util.locks import pread
from kcache.util.marker import NAME, is_marked
from kcache.util.open_file import open_own

__all__ = ["stranger"]

_COUNTERS = 256 * 32
_RECORD = struct.Struct("<4Q")
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_SALT = 0x6B63616368652F31
_LOCK_TABLE, _NOTE = 8192, 16
_FLIGHT = b"kcache-flight/1\0"
_SETTINGS = b'{"format": "kcache-settings/1", '
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"
_LMDB_LOCK = b"kcache lmdb 1\n"
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}(-[0-9a-f]+)+\.tmp")
_EVENT = re.compile(rb"\d{1,12}\.\d{3} [a-z]+ ([0-9a-f]{32}|-) ")
_LINK = re.compile(r"\d+\.json")


class _StrangerError(Exception):
    """Something in the directory is not kcache's; its name is the argument."""


def stranger(directory: str, tag: bytes) -> str:
    """Return the name of something that kcache did not put into a directory; empty if all is ours.

    It reads, and changes nothing. A file that vanishes meanwhile, because somebody removes the
    cache beside a process that uses it, counts as absent. A name is also returned if nothing proves
    that the directory is a cache.

    Args:
        directory: which has no marker, and is not empty.
        tag: what kcache writes into `CACHEDIR.TAG`.

    Raises:
        OSError: it can't be looked at.
    """
    evidence = False
    names = sorted(os.listdir(directory))
    try:
        for name in names:
            check = _CHECKS.get(name)
            path = os.path.join(directory, name)
            if name == "CACHEDIR.TAG":
                evidence |= _begins(path, tag)
            elif check is not None:
                evidence |= check(path)
            elif name != "lost+found" and not _is_other_backend(path):
                return name
    except _StrangerError as error:
        return os.path.relpath(str(error), directory)
    return "" if evidence or not _has_content(directory) else names[0]


def _has_content(directory: str) -> bool:
    """Tell whether a file below a directory, whose names are all ours, has content."""
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(FileNotFoundError):
                if os.lstat(os.path.join(folder, name)).st_size:
                    return True
    return False


def _is_other_backend(path: str) -> bool:
    """Tell whether this is the folder of a backend that another package registers."""
    from importlib.metadata import entry_points

    names = entry_points(group=GROUP).names
    return os.path.basename(path) in names and S_ISDIR(_mode(path, S_IFDIR))


# -- for each name: whether the file proves that a cache made it, or is a stranger -----------------


def _read(path: str, most: int) -> bytes:
    try:
        file = open_own(path, os.O_RDONLY)
        return pread(file.fd, most, 0)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _StrangerError(path) from error


def _begins(path: str, header: bytes) -> bool:
    found = _read(path, len(header))
    if found and found != header:
        raise _StrangerError(path)
    return bool(found)


def _journal(path: str) -> bool:
    found = _read(path, 80)
    if found and not _EVENT.match(found):
        raise _StrangerError(path)
    return bool(found)


def _settings(path: str) -> bool:
    found = _read(path, len(_SETTINGS))
    if not _SETTINGS.startswith(found):  # incomplete: its writer was killed
        raise _StrangerError(path)
    return found == _SETTINGS


def _flight(path: str) -> bool:
    found = _read(path, _LOCK_TABLE + 1)
    if len(found) == _LOCK_TABLE and found.endswith(_FLIGHT):
        return True
    notes = (found[at : at + _NOTE] for at in range(0, len(found), _NOTE))
    if len(found) > _LOCK_TABLE or any(any(note) and not (note[15:] > b"\0") for note in notes):
        raise _StrangerError(path)
    return False  # no proof: earlier versions set no mark, and many files look like this


def _empty(path: str) -> bool:
    if _read(path, 1):
        raise _StrangerError(path)
    return False


def _items(path: str, *, links: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of everything in a folder of ours, which is no link."""
    if not S_ISDIR(_mode(path, S_IFDIR)):
        raise _StrangerError(path)
    with suppress(FileNotFoundError), os.scandir(path) as items:
        for item in items:
            if item.is_symlink() and not links:
                raise _StrangerError(item.path)
            yield item.name, item.path


def _mode(path: str, expected: int) -> int:
    """Return the kind of file at a path; `expected` if it vanished."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return expected


def _file(path: str) -> bool:
    """A folder of the backends file and zstd."""
    evidence = _is_marked(path)
    for name, below in _items(path):
        if name == "counters":
            evidence |= _counters(below)
        elif name == NAME:
            continue
        elif _SHARD.fullmatch(name):
            for entry, inside in _items(below):
                if not (is_key(entry) and entry.startswith(name)) and not _TEMPORARY.fullmatch(
                    entry
                ):
                    raise _StrangerError(inside)
        else:
            raise _StrangerError(below)
    return evidence


def _counters(path: str) -> bool:
    found = _read(path, _COUNTERS + 1)
    if found and len(found) != _COUNTERS:
        raise _StrangerError(path)
    for size, entries, generation, check in _RECORD.iter_unpack(found):
        total = size * _ODD[0] + entries * _ODD[1] + generation * _ODD[2] + _SALT
        if (total - check) % 2**64 == 0:
            return True
    if any(found):
        raise _StrangerError(path)
    return False


def _lmdb(path: str) -> bool:
    """A folder of the backends over LMDB."""
    evidence = _is_marked(path)
    for name, below in _items(path):
        if name == "lock":
            beginning = _read(below, len(_LMDB_LOCK))
            if beginning not in (_LMDB_LOCK, b""):
                raise _StrangerError(below)
            evidence |= bool(beginning)
        elif name in ("db", "new", "old"):
            for file, inside in _items(below):
                if file not in ("data.mdb", "lock.mdb") or not S_ISREG(_mode(inside, S_IFREG)):
                    raise _StrangerError(inside)
                # No proof: a database of any program looks like this.
                if file == "data.mdb" and _read(inside, 20)[16:] not in (_LMDB_MAGIC, b""):
                    raise _StrangerError(inside)
        elif name != NAME:
            raise _StrangerError(below)
    return evidence


def _is_marked(path: str) -> bool:
    try:
        return is_marked(path)
    except OSError as error:
        raise _StrangerError(path) from error


def _trace(path: str) -> bool:
    for name, below in _items(path, links=True):
        if not _LINK.fullmatch(name) or not S_ISLNK(_mode(below, S_IFLNK)):
            raise _StrangerError(below)
    return False


_CHECKS: dict[str, Callable[[str], bool]] = {
    "stats": lambda path: _begins(path, b"kcache-stats/1".ljust(64, b"\0")),
    "history": lambda path: _begins(path, b"kcache-history/1".ljust(64, b"\0")),
    "journal": _journal,
    "journal.1": _journal,
    "flight": _flight,
    "slots": _empty,
    "settings.json": _settings,
    ".settings.json.new": _settings,
    "trace": _trace,
    "file": _file,
    "zstd": _file,
    "lmdb": _lmdb,
    "zstd+lmdb": _lmdb,
    **{f"flight-{number:02}": _empty for number in range(64)},
}
