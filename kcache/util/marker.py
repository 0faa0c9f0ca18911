"""Marker: the small file by which a directory is known to be one that kcache made.

``kcache.json`` holds one JSON object, its format and a random id::

    {"format": "kcache-directory/1", "id": "5f0c1be90db5a5f7b9a0a4d0c4e0a7d1"}

It is written when the directory is made, or into an empty one. A directory with other files and
without it is not kcache's, whatever its files are called: nothing is written or deleted there.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from typing import cast

from kcache.util.open_file import NotOursError, open_own

__all__ = ["NAME", "claim", "is_empty", "is_marked", "mark"]

NAME = "kcache.json"
_FORMAT = "kcache-directory/1"
_KIND = _FORMAT.partition("/")[0] + "/"
_MOST = 4096
_TEMPORARY = f".{NAME}."
#: What a new file system has at its top.
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


def is_empty(directory: str) -> bool:
    """Tell whether nothing is in a directory but what a file system puts there.

    Raises:
        OSError: it can't be listed.
    """
    with os.scandir(directory) as items:
        return all(
            item.name == _LOST_AND_FOUND or item.name.startswith(_TEMPORARY) for item in items
        )


def mark(directory: str) -> None:
    """Write the marker; all of it is there or none, also if the process is killed meanwhile.

    Of two processes that do so at the same time both succeed.

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
    """Make a backend's folder ours, or find that it is: by its marker, or that of the cache.

    Raises:
        NotOursError: it has files of somebody else. Nothing was changed.
        OSError: it can't be looked at, or not be marked.
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
