"""Marker: the small file by which a directory is known to be one that kcache made.

``kcache.json`` holds one JSON object, its format and a random id::

    {"format": "kcache-directory/1", "id": "5f0c1be90db5a5f7b9a0a4d0c4e0a7d1"}

kcache writes it when it makes the directory, or into an empty one. A directory that has other files
and not this one is not kcache's, whatever its files are called. kcache writes and deletes nothing
there.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from stat import S_ISLNK
from typing import cast

from kcache.util.locks import RangeLocks
from kcache.util.open_file import NotOursError, OpenFile, is_own, open_own, owner_problem

__all__ = [
    "NAME",
    "claim",
    "is_empty",
    "is_marked",
    "mark",
    "marker_problem",
    "open_or_replace",
    "set_aside",
]

NAME = "kcache.json"
_FORMAT = "kcache-directory/1"
_KIND = _FORMAT.partition("/")[0] + "/"
_MOST = 4096
_TEMPORARY = f".{NAME}."
#: The entries that a new file system has at its top.
_LOST_AND_FOUND = "lost+found"


def is_marked(directory: str) -> bool:
    """Tell whether a directory has the marker.

    Raises:
        NotOursError: it has the marker of another version of kcache.
        OSError: it can't be read.
    """
    path = os.path.join(directory, NAME)
    try:
        file = open_own(path, os.O_RDONLY)
        found: object = json.loads(os.read(file.fd, _MOST))
    except (FileNotFoundError, NotADirectoryError, NotOursError, ValueError, RecursionError):
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):  # a link, or a socket
            return False
        raise
    form = cast("dict[str, object]", found).get("format") if isinstance(found, dict) else None
    if not isinstance(form, str) or not form.startswith(_KIND):
        return False
    if form != _FORMAT:
        raise NotOursError(f"it was made by another version of kcache ({form[:40]!r})", directory)
    return True


def marker_problem(directory: str) -> str:
    """Return why something called as the marker is none, in words that continue "it is"."""
    try:
        status = os.stat(os.path.join(directory, NAME), follow_symlinks=False)
    except OSError:
        return ""
    if S_ISLNK(status.st_mode):
        return "a link"
    return "no marker of kcache" if is_own(status) else owner_problem(status)


def is_empty(directory: str) -> bool:
    """Tell whether a directory is empty, except for names that a file system puts there.

    Raises:
        OSError: it can't be listed.
    """
    with os.scandir(directory) as items:
        return all(
            item.name == _LOST_AND_FOUND or item.name.startswith(_TEMPORARY) for item in items
        )


def mark(directory: str) -> None:
    """Write the marker completely or not at all, even if the process is killed meanwhile.

    If two processes do so at the same time, both succeed.

    Raises:
        OSError: it can't be written (full or read-only file system).
    """
    ending = os.urandom(16).hex()
    temporary = os.path.join(directory, f"{_TEMPORARY}{os.getpid()}.{ending[:8]}")
    text = json.dumps({"format": _FORMAT, "id": ending}) + "\n"
    file = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(file.fd, text.encode())
        os.replace(temporary, os.path.join(directory, NAME))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def claim(folder: str) -> None:
    """Make a backend's folder ours, or recognise it by its marker or by that of the cache.

    Raises:
        NotOursError: it has files of somebody else. Nothing was changed.
        OSError: it can't be examined or marked.
    """
    if is_marked(folder) or is_marked(os.path.dirname(folder)):
        return
    if not is_empty(folder):
        raise NotOursError(
            f"it has files in it, and no {NAME} of kcache's, so they are somebody else's. Nothing "
            "was changed; allowed: a directory that is new or empty, or that kcache made",
            folder,
        )
    mark(folder)


# -- files of a cache that are damaged -------------------------------------------------------------

#: Locked while a damaged file is set aside. This byte is far behind the contents of our files, and
#: behind the bytes that other locks use.
_ASIDE = (1 << 63) - 2
_TRIES = 3


def open_or_replace(path: str, flags: int, is_sound: Callable[[OpenFile], bool]) -> OpenFile:
    """Open a file for writing; an unsound one gets another name, and a new one is made.

    So its content is not lost: it may have been damaged, or it may never have been ours. The other
    name is that of the file with `.damaged` behind it. In a directory that is no cache, the file
    keeps its name, because it is somebody else's.

    Args:
        path: the file, made if it is not there.
        flags: as for `os.open`.
        is_sound: tells whether the opened file is new, or one that kcache wrote.

    Raises:
        NotOursError: it is not a plain file of the present user with one name, or it is not sound
            and lies in a directory that is no cache. Nothing was changed.
        OSError: it can't be opened or renamed.
    """
    for _ in range(_TRIES):
        file = open_own(path, flags | os.O_CREAT)
        if is_sound(file):
            return file
        _require_cache(path)
        # Several processes may find the damage. One sets the file aside; the others then find the
        # new file.
        with RangeLocks(file).held(_ASIDE, 1, timeout=1.0):
            if file.is_at(path):
                set_aside(path)
    raise NotOursError("it is no file of kcache, time and again", path)


def _require_cache(path: str) -> None:
    if not is_marked(os.path.dirname(path)):
        reason = f"it is no file of kcache, and there is no {NAME} of kcache's beside it"
        raise NotOursError(reason, path)


def set_aside(path: str) -> None:
    """Give a file of ours that is damaged another name: its own, with `.damaged` behind it.

    Raises:
        NotOursError: something that is not ours has the other name.
        OSError: it can't be renamed.
    """
    aside = f"{path}.damaged"
    try:
        status = os.stat(aside, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        if not is_own(status):
            raise NotOursError(f"it is {owner_problem(status)}", aside)
    os.rename(path, aside)
