"""SqliteBackend: the entries of a kcache in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kcache.backend import Backend, EntryInfo, Usage, increasing
from kcache.errors import BackendError

__all__ = ["SqliteBackend"]

# Triggers keep the sums. A count would have to read every entry.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries
    (key TEXT PRIMARY KEY, size INTEGER, used INTEGER, value BLOB);
CREATE INDEX IF NOT EXISTS by_use ON entries (used, key, size);
CREATE TABLE IF NOT EXISTS sums (bytes INTEGER, entries INTEGER);
INSERT INTO sums SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM sums);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN
    UPDATE sums SET bytes = bytes + new.size, entries = entries + 1; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entries BEGIN
    UPDATE sums SET bytes = bytes - old.size, entries = entries - 1; END;
COMMIT;
"""
_BY_USE = "SELECT used, key, size FROM entries WHERE (used, key) > (?, ?) ORDER BY used, key"
_BY_KEY = "SELECT used, key, size FROM entries WHERE key > ? ORDER BY key"
_PAGE = " LIMIT 256"


class SqliteBackend(Backend):
    """Values as rows of a table, with an index by last use, and triggers that keep the sums.

    Threads: safe to share; they take turns. Processes: any number, which SQLite's locks make take
    turns. Crash: what a killed process had begun is rolled back by whoever comes next. Fork: the
    child opens a connection of its own. Power cut: the file may be damaged.

    Args:
        directory: made if it is not there; holds `entries.db`.
        max_size: ignored; SQLite needs no bound.
        read_only: create and change nothing.
        clock: nanoseconds since the epoch, for recency.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_size: int | None = None,
        read_only: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        del max_size
        self._path = os.path.join(os.path.abspath(directory), "entries.db")
        self._read_only = read_only
        self._now = increasing(clock)
        self._closed = False
        self._begin_afresh()
        _backends.add(self)

    # -- the contract --------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        rows = self._query("SELECT value FROM entries WHERE key = ?", key)
        return rows[0][0] if rows else None

    def put(self, key: str, value: bytes) -> int:
        with self.batch():
            self._query("DELETE FROM entries WHERE key = ?", key)
            row = (key, len(value), self._now(), value)
            self._query("INSERT INTO entries VALUES (?, ?, ?, ?)", *row)
        return len(value)

    def delete(self, key: str) -> int:
        with self.batch():
            rows = self._query("SELECT size FROM entries WHERE key = ?", key)
            self._query("DELETE FROM entries WHERE key = ?", key)
        return rows[0][0] if rows else 0

    def touch(self, key: str) -> None:
        if not self._read_only:
            with self.batch():
                self._query("UPDATE entries SET used = ? WHERE key = ?", self._now(), key)

    @contextmanager
    def batch(self) -> Generator[None]:
        if self._read_only:
            raise BackendError(f"{self._path} is open for reading only")
        with self._lock:
            if self._depth:  # part of the batch around it
                yield
                return
            self._query("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                self._query("COMMIT")
            except BaseException:
                with suppress(BackendError):
                    self._query("ROLLBACK")
                raise
            finally:
                self._depth = 0

    def usage(self) -> Usage:
        rows = self._query("SELECT bytes, entries FROM sums")
        return Usage(*rows[0]) if rows else Usage(0, 0)

    def coldest(self) -> Iterator[EntryInfo]:
        offered: set[str] = set()
        page = self._query(_BY_USE + _PAGE, -1, "")
        while page:
            for used, key, size in page:
                if key not in offered:  # used since then; the scan meets it again later
                    offered.add(key)
                    yield EntryInfo(key, size, used)
            page = self._query(_BY_USE + _PAGE, *page[-1][:2])

    def scan(self) -> Iterator[EntryInfo]:
        page = self._query(_BY_KEY + _PAGE, "")
        while page:
            for used, key, size in page:
                yield EntryInfo(key, size, used)
            page = self._query(_BY_KEY + _PAGE, page[-1][1])

    def check(self, *, repair: bool = False) -> Iterator[str]:
        for (line,) in self._query("PRAGMA quick_check"):
            if line != "ok":
                yield f"{self._path}: {line}"
        for (key,) in self._query("SELECT key FROM entries WHERE size <> length(value)"):
            yield f"{key} has not the length that it was put with"
            if repair:
                self.delete(key)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._disconnect()

    # -- SQLite --------------------------------------------------------------------------------

    def _query(self, statement: str, *values: object) -> list[Any]:
        """Return all rows; none where the file is not there, and none may be made."""
        try:
            with self._lock:
                connection = self._connect()
                return (
                    [] if connection is None else connection.execute(statement, values).fetchall()
                )
        except (sqlite3.Error, OSError) as error:
            raise BackendError(f"{self._path}: {error}") from error

    def _connect(self) -> sqlite3.Connection | None:
        """Return the connection to the file that is at the path now; the caller holds the lock."""
        if self._closed:
            raise BackendError(f"{self._path} is closed")
        if not self._depth and self._identity() != self._opened:
            self._disconnect()  # somebody has removed the directory
        if self._connection is None and not (self._read_only and self._identity() is None):
            if not self._read_only:
                os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            mode = "ro" if self._read_only else "rwc"
            self._connection = sqlite3.connect(
                f"{Path(self._path).as_uri()}?mode={mode}",
                uri=True,
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
            )
            if not self._read_only:
                self._connection.executescript(
                    "PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = OFF;" + _SCHEMA
                )
            self._opened = self._identity()
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection, self._opened = self._connection, None, None
        if connection is not None:
            connection.close()

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    # -- fork ----------------------------------------------------------------------------------

    def _begin_afresh(self) -> None:
        """Be without a connection. In a child the parent's must be neither used nor closed."""
        _abandoned.append(getattr(self, "_connection", None))
        self._lock = threading.RLock()
        self._depth = 0
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None


_backends: weakref.WeakSet[SqliteBackend] = weakref.WeakSet()
_abandoned: list[sqlite3.Connection | None] = []
_held: list[SqliteBackend] = []


def _before_fork() -> None:
    """Let no thread be within SQLite, whose own locks the child would inherit."""
    _held.extend(_backends)
    for backend in _held:
        backend._lock.acquire()


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop()._lock.release()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop()._begin_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
