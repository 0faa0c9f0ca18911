"""LocalFiles: what a framework reads from a directory by path, below a cap of its own.

`kcache.files` in a folder has a line for each time that files of ours were to be written there:
their sizes by name, as JSON. No other file is ever deleted. `kcache.bytes` in the directory has the
sum of all sizes, in 20 digits. It is locked while files are counted and deleted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from kcache.util import log
from kcache.util.locks import Patience, pread, pwrite, release
from kcache.util.open_file import open_own, replacing

_SUM, _RECORD = "kcache.bytes", "kcache.files"
#: Seconds for which a folder stays after a use: a process is about to read files by their paths.
#: Triton reads all files of a group within milliseconds.
GRACE = 30.0
#: Seconds to wait for another process that counts. One that is stopped there does not hold up
#: others for longer; they write without room being made.
_PATIENCE = 2.0
#: The part of the cap that is left once room is made. To look at 5,000 folders takes 0.2 s, and to
#: delete 150 of them takes as long or twice.
_LOW_WATER = 0.97
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class LocalFiles:
    """Files in the folders of a directory. The least recently used folders are deleted first.

    The files never exceed the cap, but for those that were used within the last `GRACE` seconds: a
    process that got their paths may be about to read them. They are counted before they are
    written, and until they are deleted.

    Threads: safe to share. Processes: any number. Crash: what a killed process has written is
    counted.

    Args:
        directory: the framework's own.
        max_size: the cap in bytes.
        clock: seconds since the epoch, for tests.
    """

    def __init__(
        self, directory: str, max_size: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._max_size = max_size
        self._clock = clock
        self._patience = Patience(_PATIENCE)

    def write(self, folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write files into a folder, each atomically; return their paths.

        A file that is there with the same bytes stays as it is.

        Raises:
            OSError: they can't be written.
        """
        paths = {name: self.path(folder, name) for name in files}
        changed = {name: data for name, data in files.items() if _read(paths[name]) != data}
        if changed:
            try:
                self._charge(folder, {name: len(data) for name, data in changed.items()})
            except OSError as error:
                log.warning_once(f"{self._directory}: files there are not counted: {error}")
            os.makedirs(self.path(folder), exist_ok=True)
        for name, data in changed.items():
            with replacing(paths[name]) as draft, open(draft, "wb") as file:
                file.write(data)
        self.use(folder)
        return paths

    def path(self, folder: str, name: str = "") -> str:
        """Return the path of a file, or of the folder."""
        return os.path.join(self._directory, folder, name)

    def use(self, folder: str) -> None:
        """Record a use of a folder in its mtime, which counts when room is made."""
        now = self._clock()
        with suppress(OSError):
            os.utime(self.path(folder), (now, now))

    # -- counting --------------------------------------------------------------------------------

    def _charge(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Count files that are about to be written, and make room for them; raises OSError."""
        os.makedirs(self.path(folder), exist_ok=True)
        self.use(folder)
        file = open_own(self.path("", _SUM), os.O_RDWR | os.O_CREAT)
        try:
            try:
                counted = pread(file.fd, 20, 0) if self._patience.lock(file, 0) else b""
                total = b"%020d" % self._total_with(folder, sizes, counted)
            except TimeoutError:
                total = b"?" * 20  # who counts next counts all again
            pwrite(file.fd, total, 0)
            with open_own(self.path(folder, _RECORD), _APPENDING) as record:
                os.write(record.fd, b"\n" + json.dumps(sizes).encode())  # the last may be torn
        finally:
            release(file)

    def _total_with(self, folder: str, sizes: Mapping[str, int], counted: bytes) -> int:
        """Return what all files take, with those that are about to be written; makes room."""
        known = self._sizes(folder)
        more = sum({**known, **sizes}.values()) - sum(known.values())
        total = int(counted) + more if counted.isdigit() else sys.maxsize
        return total if total <= self._max_size else self._make_room(folder, more)

    def _make_room(self, incoming: str, more: int) -> int:
        """Delete the coldest folders until there is room for `more` bytes in the incoming one.

        Those that were used a moment ago stay. It returns what the rest and these bytes take.
        """
        sizes = {each: sum(self._sizes(each).values()) for each in os.listdir(self._directory)}
        left = sum(sizes.values()) + more
        used = {each: self._last_use(each) for each, size in sizes.items() if size}
        for folder in sorted(used.keys() - {incoming}, key=lambda each: used[each]):
            if left <= self._max_size * _LOW_WATER or used[folder] > self._clock() - GRACE:
                break
            with suppress(OSError):
                self._delete(folder)
                left -= sizes[folder]
        return left

    def _last_use(self, folder: str) -> float:
        try:
            return os.stat(self.path(folder)).st_mtime
        except OSError:
            return 0.0

    def _delete(self, folder: str) -> None:
        for name in (*self._sizes(folder), _RECORD):
            with suppress(FileNotFoundError):
                os.unlink(self.path(folder, name))
        with suppress(OSError):  # it has files of others
            os.rmdir(self.path(folder))

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of our files in a folder by name, as they were counted.

        The record of another user is none, and names nothing outside the folder.
        """
        found: dict[str, int] = {}
        with suppress(OSError), open_own(self.path(folder, _RECORD), os.O_RDONLY) as record:
            for line in record.readall().splitlines():
                with suppress(ValueError, TypeError, AttributeError):
                    named = json.loads(line).items()
                    found |= {name: int(size) for name, size in named if is_name(name)}
        return found


def is_name(name: str) -> bool:
    """Tell whether the name of a file stays inside its folder."""
    return name not in ("", ".", "..") and os.path.basename(name) == name and "\0" not in name


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
