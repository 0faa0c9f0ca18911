"""SqliteBackend keeps the contract; its medium is looked at through a connection of its own."""

import sqlite3
import time
from contextlib import closing

from kcache_sqlite import SqliteBackend

from kcache.testing import BackendContract


class TestSqlite(BackendContract):
    """The contract, over one SQLite file."""

    #: SQLite keeps one file of its own, and looks at no other file in the directory.
    refuses_strangers = False
    #: SQLite returns the bytes that were put; it does not know the cap.
    bounds_reads = False

    def open(self, place, *, max_size=1 << 26, read_only=False, clock=None):
        return SqliteBackend(
            place, max_size=max_size, read_only=read_only, clock=clock or time.time_ns
        )

    def look(self, place):
        return dict(self.query(place, "SELECT key, length(value) FROM entries"))

    def read_raw(self, place, key):
        return self.query(place, "SELECT value FROM entries WHERE key = ?", key)[0][0]

    def write_raw(self, place, key, image):
        self.query(place, "UPDATE entries SET value = ? WHERE key = ?", image, key)

    def query(self, place, statement, *values):
        if not (place / "entries.db").exists():
            return []
        with closing(sqlite3.connect(place / "entries.db", timeout=30)) as connection, connection:
            return connection.execute(statement, values).fetchall()
