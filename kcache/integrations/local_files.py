"""LocalFiles: files that a framework reads by path, in a directory with a cap of its own.

`kcache.files` in a folder records the sizes of the files that kcache writes there, by name, as
JSON. The record is written before the files, and only recorded files are ever deleted.
`kcache.bytes` in the directory holds the sum of all sizes, in 20 digits. It is locked while files
are counted and deleted.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kcache.util import log
from kcache.util.locks import lock, pread, pwrite
from kcache.util.open_file import open_own, replacing

_SUM, _RECORD = "kcache.bytes", "kcache.files"
#: Seconds for which a folder is kept after a use, because a process may still read its files by
#: their paths. Triton reads all files of a group within milliseconds.
GRACE = 30.0
#: Seconds to wait for the lock, which another process holds while it counts. After that, files are
#: written without making room, because the other process may be stopped.
_PATIENCE = 2.0
#: The part of the cap that stays in use after room was made. Examining 5,000 folders takes 0.2 s;
#: deleting 150 of them takes 0.2 to 0.4 s.
_LOW_WATER = 0.97
#: A recorded use further in the future than this, in seconds, is due to a wrong clock.
_FUTURE = 86_400.0
#: How many bytes of a record or a note are read. A record has about 100 bytes for each file.
MAX_NOTE = 1 << 16
#: The name of a file that a killed process did not finish.
_DRAFT = re.compile(r"^\.(.+)\.[0-9a-f]{16}\.tmp$")
#: The exceptions that reading a missing or damaged record may raise.
_ODD = (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)


class LocalFiles:
    """Files in the folders of a directory. The least recently used folders are deleted first.

    The cap may be exceeded only by files that were used within the last `GRACE` seconds. These are
    never deleted, because a process that got their paths may be about to read them. A file is
    counted before it is written, and until it is deleted.

    Threads: may be called from several threads at the same time. Processes: any number may share
    the directory. Crash: the files of a killed process are counted and deleted like all others.

    Args:
        directory: the framework's cache directory.
        max_size: the cap in bytes.
        clock: returns the seconds since the epoch; tests pass another clock.
    """

    def __init__(
        self, directory: str, max_size: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._max_size = max_size
        self._clock = clock
        self._patience = _PATIENCE

    def write(self, folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write files into a folder, each atomically; return their paths.

        A file that already has these bytes is not written again.

        Raises:
            OSError: a file can't be written.
        """
        paths = {name: self.path(folder, name) for name in files}
        self.use(folder)  # so that no process deletes it now
        changed = {n: data for n, data in files.items() if read(paths[n], len(data) + 1) != data}
        if changed:
            try:
                self._charge(folder, {name: len(data) for name, data in changed.items()})
            except OSError as error:
                log.warning_once(f"files in {self._directory} are not counted: {error}")
            os.makedirs(self.path(folder), exist_ok=True)  # noqa: TID251  as Triton does
        for name, data in changed.items():
            with replacing(paths[name]) as draft:
                Path(draft).write_bytes(data)
        self.use(folder)
        return paths

    def path(self, folder: str, name: str = "") -> str:
        """Return the path of the file `name` in a folder; without a name, that of the folder."""
        return os.path.join(self._directory, folder, name)

    def use(self, folder: str) -> None:
        """Record a use of a folder in its mtime, by which `_make_room` orders the folders."""
        now = self._clock()
        with suppress(OSError):
            os.utime(self.path(folder), (now, now))

    # -- counting --------------------------------------------------------------------------------

    def _charge(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Count files that are about to be written, and make room for them.

        Raises:
            OSError: the files can't be counted.
        """
        os.makedirs(self.path(folder), exist_ok=True)  # noqa: TID251  as Triton does
        self.use(folder)
        known, path = self._sizes(folder), self.path("", _SUM)
        record = {**known, **sizes}
        more = sum(record.values()) - sum(known.values())
        with open_own(path, os.O_RDWR | os.O_CREAT) as file:
            try:
                is_locked = lock(file, 0, timeout=self._patience)
            except TimeoutError:  # the holder may be stopped; the next process counts everything
                self._patience = 0.0
                os.unlink(path)
            else:
                raw = pread(file.fd, 20, 0)
                total = int(raw) + more if is_locked and raw.isdigit() else sys.maxsize
                if total > self._max_size:
                    total = self._make_room(folder, more)
                pwrite(file.fd, b"%020d" % total, 0)
            with replacing(self.path(folder, _RECORD)) as draft:
                Path(draft).write_text(json.dumps(record), "utf-8")

    def _make_room(self, incoming: str, more: int) -> int:
        """Delete the least recently used folders until `more` bytes fit; return the new total.

        The folder `incoming` is kept, and so are folders that were used within `GRACE` seconds,
        even if the bytes do not fit then. The total is in bytes, and includes `more`.
        """
        sizes = {each: sum(self._sizes(each).values()) for each in os.listdir(self._directory)}
        left = sum(sizes.values()) + more
        used = {each: self._last_use(each) for each, size in sizes.items() if size}
        for folder in sorted(used.keys() - {incoming}, key=lambda each: used[each]):
            if left <= self._max_size * _LOW_WATER or used[folder] > self._clock() - GRACE:
                break
            with suppress(OSError):
                if self._last_use(folder) == used[folder]:
                    self._delete(folder)
                    left -= sizes[folder]
        return left

    def _last_use(self, folder: str) -> float:
        """Return the time of a folder's last use, or 0.0 if it is unknown or in the future.

        Times up to a day in the future are accepted, because clocks differ.
        """
        try:
            used = os.stat(self.path(folder)).st_mtime
        except OSError:
            return 0.0
        return used if used < self._clock() + _FUTURE else 0.0

    def _delete(self, folder: str) -> None:
        """Delete the recorded files of a folder and their unfinished drafts, then the record."""
        ours = {*self._sizes(folder), _RECORD}
        found = [name for name in os.listdir(self.path(folder)) if _DRAFT.sub(r"\1", name) in ours]
        for name in sorted(found, key=_RECORD.__eq__):
            with suppress(FileNotFoundError):
                os.unlink(self.path(folder, name))
        with suppress(OSError):  # the folder has other files
            os.rmdir(self.path(folder))

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the recorded files in a folder, by name.

        A record that belongs to another user is ignored, and so is a recorded name that is the path
        of a file elsewhere.
        """
        with suppress(*_ODD), open_own(self.path(folder, _RECORD), os.O_RDONLY) as record:
            named = json.loads(record.read(MAX_NOTE)).items()
            return {name: max(0, int(size)) for name, size in named if is_name(name)}
        return {}


def is_name(name: str) -> bool:
    """Return whether `name` is the name of a file in a folder, and not a path to another folder."""
    return name not in ("", ".", "..") and os.path.basename(name) == name and "\0" not in name


def read(path: str, most: int) -> bytes | None:
    """Return the first `most` bytes of a file; None if it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return None
