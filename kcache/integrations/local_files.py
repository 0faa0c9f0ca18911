"""LocalFiles: what a framework reads from a directory by path, below a cap of its own.

`kcache.sqlite` in the directory has a row for each folder with files: their sizes by name, the sum,
and when they were used. Files that are not in it are never deleted::

    folders (folder TEXT PRIMARY KEY, size INTEGER, used REAL, names TEXT)
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress

from kcache.util import log
from kcache.util.forks import after_fork, at_fork
from kcache.util.open_file import replacing

_LEDGER = "kcache.sqlite"
#: Seconds for which a folder stays after a use: a process is about to read files by their paths.
#: Triton reads all files of a group within milliseconds.
GRACE = 30.0
#: Seconds to wait for another process that writes to the ledger. One that is stopped there does not
#: hold up others for longer; they write without room being made.
_PATIENCE = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS folders (
    folder TEXT PRIMARY KEY, size INTEGER NOT NULL, used REAL NOT NULL, names TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON folders (used);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON folders
    BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON folders
    BEGIN UPDATE total SET bytes = bytes + new.size - old.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON folders
    BEGIN UPDATE total SET bytes = bytes - old.size; END;
"""
_CHARGE = """
INSERT INTO folders VALUES (?, ?, ?, ?) ON CONFLICT (folder) DO UPDATE SET
    size = excluded.size, used = excluded.used, names = excluded.names
"""

#: Held by who is in SQLite, so that a fork waits: a child would inherit SQLite's locks.
_in_sqlite = threading.Lock()
at_fork(before=_in_sqlite.acquire, in_parent=_in_sqlite.release, in_child=_in_sqlite.release)


class LocalFiles:
    """Files in the folders of a directory. The least recently used folders are deleted first.

    The files never exceed the cap, but for those that were used within the last `GRACE` seconds: a
    process that got their paths may be about to read them. They are counted before they are
    written, and until they are deleted.

    Threads: safe to share. Processes: any number. Crash: what a killed process has written is
    counted. Fork: the child opens the ledger anew.

    Args:
        directory: the framework's own.
        max_size: the cap in bytes.
        ours: returns the names of our files in a folder, to count them again if the ledger is
            damaged.
        clock: seconds since the epoch, for tests.
    """

    def __init__(
        self,
        directory: str,
        max_size: int,
        *,
        ours: Callable[[str], Iterable[str]] = lambda _folder: (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._max_size = max_size
        self._ours = ours
        self._clock = clock
        self._ledger: sqlite3.Connection | None = None
        after_fork(self)

    def write(self, folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write files into a folder, each atomically; return their paths.

        A file that is there with the same bytes stays as it is.

        Raises:
            OSError: they can't be written.
        """
        paths = {name: self.path(folder, name) for name in files}
        changed = {name: data for name, data in files.items() if _read(paths[name]) != data}
        if changed:
            os.makedirs(os.path.join(self._directory, folder), exist_ok=True)
            with self._surviving(), self._writing() as ledger:
                self._charge(ledger, folder, {name: len(data) for name, data in changed.items()})
                self._make_room(ledger)
        for name, data in changed.items():
            with replacing(paths[name]) as draft, open(draft, "wb") as file:
                file.write(data)
        self.use(folder)
        return paths

    def path(self, folder: str, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self._directory, folder, name)

    def use(self, folder: str) -> None:
        """Record a use of a folder in its mtime, which counts when room is made."""
        now = self._clock()
        with suppress(OSError):
            os.utime(os.path.join(self._directory, folder), (now, now))

    def size(self) -> int:
        """Return the bytes that are counted.

        Raises:
            sqlite3.Error: the ledger can't be read.
        """
        with _in_sqlite:
            return _total(self._opened())

    def close(self) -> None:
        """Close the ledger. Idempotent; a later call opens it again."""
        with _in_sqlite:
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = None

    # -- the ledger ------------------------------------------------------------------------------

    def _charge(self, ledger: sqlite3.Connection, folder: str, sizes: dict[str, int]) -> None:
        """Count files that are about to be written."""
        row = ledger.execute("SELECT names FROM folders WHERE folder = ?", (folder,)).fetchone()
        names: dict[str, int] = {} if row is None else json.loads(row[0])
        names |= sizes
        total = sum(names.values())
        ledger.execute(_CHARGE, (folder, total, self._clock(), json.dumps(names)))

    def _make_room(self, ledger: sqlite3.Connection) -> None:
        """Delete the coldest folders until the rest is below the cap, or was used a moment ago."""
        while _total(ledger) > self._max_size:
            row = ledger.execute("SELECT folder, used, names FROM folders ORDER BY used LIMIT 1")
            folder, used, names = row.fetchone()
            if used > self._clock() - GRACE:
                return
            last = self._last_use(folder)
            if last > used:
                ledger.execute("UPDATE folders SET used = ? WHERE folder = ?", (last, folder))
            else:
                self._delete(folder, json.loads(names))
                ledger.execute("DELETE FROM folders WHERE folder = ?", (folder,))

    def _last_use(self, folder: str) -> float:
        try:
            return os.stat(os.path.join(self._directory, folder)).st_mtime
        except OSError:
            return 0.0

    def _delete(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self.path(folder, name))
        with suppress(OSError):  # it has files of others
            os.rmdir(os.path.join(self._directory, folder))

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """Begin a transaction in which no other process writes."""
        with _in_sqlite:
            ledger = self._opened()
            ledger.execute("BEGIN IMMEDIATE")
            try:
                yield ledger
            except BaseException:
                ledger.execute("ROLLBACK")
                raise
            ledger.execute("COMMIT")

    def _opened(self) -> sqlite3.Connection:
        """Return the ledger; make it if it is not there, or damaged."""
        if self._ledger is None:
            path = os.path.join(self._directory, _LEDGER)
            try:
                self._ledger = _open(path)
            except sqlite3.OperationalError:
                raise  # somebody else writes, or there is no directory
            except sqlite3.DatabaseError:
                os.unlink(path)
                self._ledger = _open(path)
                self._count_again(self._ledger)
        return self._ledger

    def _count_again(self, ledger: sqlite3.Connection) -> None:
        for folder in os.listdir(self._directory):
            paths = {name: self.path(folder, name) for name in self._ours(folder)}
            sizes = {name: os.stat(path).st_size for name, path in paths.items() if _is_file(path)}
            if sizes:
                self._charge(ledger, folder, sizes)

    @contextmanager
    def _surviving(self) -> Generator[None]:
        """Go on without the ledger if it fails."""
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            log.warning_once(f"{self._directory}/{_LEDGER}: {error}; files there are not counted")

    def after_fork(self) -> None:
        """In a child process, leave the ledger to the parent."""
        self._ledger = None


def _open(path: str) -> sqlite3.Connection:
    ledger = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    # A killed process leaves a journal that the next one rolls back. Only a machine that loses
    # power can damage the ledger; then the files are counted again.
    ledger.execute("PRAGMA journal_mode = TRUNCATE")
    ledger.execute("PRAGMA synchronous = OFF")
    ledger.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    return ledger


def _total(ledger: sqlite3.Connection) -> int:
    """Return the bytes of all folders; to sum them up would take 0.5 ms with 5,000 of them."""
    return int(ledger.execute("SELECT bytes FROM total").fetchone()[0])


def _is_file(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
