"""SQLite cache: what many would write instead, one table of the standard library's SQLite.

Written fairly: a write-ahead log, no fsync per commit, an index on the last use, the sum of all
sizes kept in a row instead of summed up, an object over the cap refused.
"""

import sqlite3
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (key TEXT PRIMARY KEY, used INTEGER, size INTEGER, value BLOB);
CREATE INDEX IF NOT EXISTS by_use ON entry (used);
CREATE TABLE IF NOT EXISTS held (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER);
INSERT OR IGNORE INTO held VALUES (1, 0);
"""


class SqliteCache:
    """A bounded LRU cache in one file; several processes may share it.

    `cap` bounds the sum of the values' lengths. What SQLite raises passes through.
    """

    def __init__(self, folder: Path, cap: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._cap = cap
        self._db = sqlite3.connect(folder / "cache.db", timeout=60.0, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def get(self, key: str) -> bytes | None:
        """Returns the value, and records the use: a write, as it is for diskcache."""
        row = self._db.execute("SELECT value FROM entry WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        self._db.execute("UPDATE entry SET used = ? WHERE key = ?", (time.time_ns(), key))
        return bytes(row[0])

    def put(self, key: str, value: bytes) -> bool:
        """Puts the value and evicts what is over the cap; tells whether it was small enough."""
        if len(value) > self._cap:
            return False
        with self._transaction():
            self._add(-self._delete(key))
            self._insert(key, value, time.time_ns())
            excess = self._add(len(value)) - self._cap
            while excess > 0:
                oldest = "SELECT key FROM entry ORDER BY used LIMIT 1"
                freed = self._delete(self._db.execute(oldest).fetchone()[0])
                self._add(-freed)
                excess -= freed
        return True

    def fill(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Puts many in one transaction, the least recently used first, and evicts nothing."""
        with self._transaction():
            for number, (key, value) in enumerate(entries):
                self._insert(key, value, number)
                self._add(len(value))

    def used(self) -> int:
        """Returns the bytes of all values."""
        return int(self._db.execute("SELECT bytes FROM held").fetchone()[0])

    def close(self) -> None:
        self._db.close()

    def _insert(self, key: str, value: bytes, used: int) -> None:
        self._db.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (key, used, len(value), value))

    def _delete(self, key: str) -> int:
        """Returns the bytes freed."""
        rows = self._db.execute("DELETE FROM entry WHERE key = ? RETURNING size", (key,)).fetchall()
        return sum(size for (size,) in rows)

    def _add(self, size: int) -> int:
        """Returns the bytes held now."""
        row = self._db.execute("UPDATE held SET bytes = bytes + ? RETURNING bytes", (size,))
        return int(row.fetchone()[0])

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
