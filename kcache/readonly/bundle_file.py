"""Bundle: one file with many entries, an SQLite database that is read in place.

Any SQLite client can read it::

    sqlite3 kernels.kcb 'SELECT key, length(value) FROM entries'

=================  ===============================================================================
part               what
=================  ===============================================================================
`application_id`   ``KCB1``: a bundle, and the version of its format
`user_version`     the number of entries
`entries`          the only table. `key`: 64 hexadecimal digits. `value`: the entry's envelope
                   (`kcache.entry`), which may have a signature before it (`kcache.remote.signing`)
=================  ===============================================================================

The rows are in the order of their keys, and nothing records when, where or by whom a bundle was
made. So equal entries make equal files, with the same version of SQLite. An envelope has its own
key, length and checksum, which the caller checks.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from kcache.backend import is_key
from kcache.errors import BundleError
from kcache.remote.signing import SealError
from kcache.util.forks import after_fork, at_fork, importing

if TYPE_CHECKING:
    import sqlite3
    from types import ModuleType

    from kcache.remote.signing import Sealer

#: An export leaves larger values out, and a reader refuses them, because one whole value at a time
#: is in memory. The largest kernels of CUTLASS have 10 MB.
MAX_VALUE = 256 << 20
#: The bytes before the first page's content. See https://www.sqlite.org/fileformat2.html.
HEAD_SIZE = 100
_MAGIC = b"SQLite format 3\0"
_APPLICATION, _VERSION = b"KCB", b"1"
_TABLE = "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL)"
#: The table, and the index of its primary key.
_SCHEMA = [("entries", _TABLE), ("sqlite_autoindex_entries_1", None)]
_PAGE = 4096
#: Settings that could differ between builds of SQLite; and no journal: no unfinished file is used.
_WRITING = (
    f"page_size = {_PAGE}",
    "encoding = 'UTF-8'",
    "auto_vacuum = NONE",
    "secure_delete = ON",
    "journal_mode = OFF",
    "synchronous = OFF",
    f"application_id = {int.from_bytes(_APPLICATION + _VERSION, 'big')}",
)
#: Against malicious files. See https://www.sqlite.org/security.html.
_READING = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")
#: Steps of SQLite's virtual machine after which a statement is ended: a scan of a million entries
#: takes a tenth of them.
_MOST_STEPS = 100_000_000
#: Held by `get` and `close`, so that a fork waits: a child would inherit SQLite's locks.
_in_sqlite = threading.RLock()
at_fork(_in_sqlite.acquire, _in_sqlite.release)


def is_head(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a bundle, of any version."""
    return head.startswith(_MAGIC) and head[68:71] == _APPLICATION


def is_bundle(path: str) -> bool:
    """Return whether a file begins as a bundle does, of any version.

    Raises:
        OSError: it can't be read.
    """
    return is_head(_beginning(path)[0])


def _beginning(path: str) -> tuple[bytes, int]:
    """Return the first bytes of a regular file (of another kind of file, none), and its length."""
    if not os.path.isfile(path):
        return b"", os.stat(path).st_size
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        return file.read(HEAD_SIZE) if stat.S_ISREG(status.st_mode) else b"", status.st_size


def _read_head(path: str) -> bytes:
    """Return the head of a bundle.

    Raises:
        BundleError: it is not a bundle, has another version, or is truncated.
        OSError: it can't be read.
    """
    head, size = _beginning(path)
    if not is_head(head):
        raise BundleError("it is not a bundle")
    if head[71:72] != _VERSION:
        found = head[71:72].decode("ascii", "backslashreplace")
        raise BundleError(f"expected format version 1, got {found}")
    expected = int.from_bytes(head[28:32], "big") * _PAGE
    if expected != size:
        raise BundleError(f"it is truncated: expected {expected} bytes, got {size}")
    return head


class Bundle:
    """A bundle that is read in place, by itself or as a read-only tier: nothing is unpacked.

    If another file is renamed over it while it is open, this object still reads the old one. The
    file is not mapped into memory, so reading a truncated file raises BundleError, not SIGBUS. A
    malicious file raises BundleError, too, after at most `_MOST_STEPS` steps and with the memory of
    two values.

    Threads: may share it. Fork: a fork waits for a `get`; the child opens the file again.
    Processes: any number.

    Args:
        path: the file. It is opened by the first `get`, which then imports `sqlite3`.
        keep: see `DirectoryTier`.
        sealer: decides which signatures are accepted.
        name: the file's name in messages.

    Raises:
        BundleError: it is not a bundle, has another version, or is truncated.
        OSError: it can't be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, sealer: Sealer, keep: bool = False, name: str = ""
    ) -> None:
        self.path = os.path.abspath(path)
        self.name = name or os.fspath(path)
        self.keep = keep
        #: How many values without a signature were read.
        self.unsigned = 0
        self._sealer = sealer
        self._connection: sqlite3.Connection | None = None
        with self._translated():
            head = _read_head(self.path)
        self.entries = int.from_bytes(head[60:64], "big")
        self.size = int.from_bytes(head[28:32], "big") * _PAGE
        after_fork(self)

    def get(self, key: str) -> bytes | None:
        """Return the envelope stored under `key`, or None; the caller checks it.

        Raises:
            BundleError: the envelope is not signed as required, or the file is damaged or can't be
                read.
        """
        with self._translated():
            with _in_sqlite:
                row = self._query("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
            return None if row is None else self._unsealed(key, row[0])

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield every key and envelope, by ascending key; only one thread may iterate.

        Raises:
            BundleError: as `get`; or a key, their order or their number is wrong.
        """
        last, count = "", 0
        with self._translated():
            for key, value in self._query("SELECT key, value FROM entries ORDER BY key"):
                if not is_key(key) or key <= last:
                    raise BundleError(f"its keys are not in order at {key!r:.70}")
                last, count = key, count + 1
                yield key, self._unsealed(key, value)
            if count != self.entries:
                raise BundleError(f"expected {self.entries} entries, got {count}")

    def close(self) -> None:
        """Close the file; a later `get` opens it again. Idempotent."""
        with _in_sqlite:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    #: A child must not use the files that SQLite opened in its parent.
    after_fork = close

    def _query(self, sql: str, arguments: tuple[str, ...] = ()) -> sqlite3.Cursor:
        connection = self._connection
        if connection is None:
            connection = self._connection = _connect_to_read(self.path)
        return connection.execute(sql, arguments)

    def _unsealed(self, key: str, value: object) -> bytes:
        if not isinstance(value, bytes):
            raise BundleError(f"entry {key}: expected a BLOB, got {type(value).__name__}")
        try:
            envelope = self._sealer.unseal(value)
        except SealError as error:
            raise BundleError(f"entry {key}: {error}") from error
        self.unsigned += len(envelope) == len(value)
        return envelope

    @contextmanager
    def _translated(self) -> Generator[None]:
        """Name the file in each error that the block raises."""
        try:
            yield
        except BundleError as error:
            raise BundleError(f"{self.name}: {error}") from error
        except _sqlite_errors() as error:
            raise BundleError(f"{self.name}: it is damaged ({error})") from error


def _sqlite_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that SQLite raises, also for names in the file that are not text."""
    module = sys.modules.get("sqlite3")
    return () if module is None else (module.Error, UnicodeDecodeError)


def _sqlite() -> ModuleType:
    """Return the module `sqlite3`, which some builds of Python lack.

    Raises:
        BundleError: there is none.
    """
    try:
        with importing:
            import sqlite3  # noqa: PLC0415
    except ImportError as error:
        reason = f"bundles need the module sqlite3, which this Python lacks ({error})"
        raise BundleError(reason) from error
    return sqlite3


def _connect_to_read(path: str) -> sqlite3.Connection:
    """Open a database that may be malicious.

    Raises:
        BundleError: it is not the database of a bundle, or SQLite is missing.
        sqlite3.Error: it is damaged, or can't be read.
    """
    sqlite = _sqlite()
    # A path may begin with two slashes, after which SQLite would expect a host.
    uri = f"file:///{quote(os.fsencode(path)).lstrip('/')}?mode=ro&immutable=1"
    connection: sqlite3.Connection = sqlite.connect(
        uri, uri=True, check_same_thread=False, isolation_level=None
    )
    try:
        connection.setlimit(sqlite.SQLITE_LIMIT_LENGTH, MAX_VALUE + 1000)
        connection.setlimit(sqlite.SQLITE_LIMIT_SQL_LENGTH, 1000)
        connection.set_progress_handler(lambda: 1, _MOST_STEPS)
        for setting in _READING:
            connection.execute(f"PRAGMA {setting}")
        found = connection.execute("SELECT name, sql FROM sqlite_master LIMIT 3").fetchall()
        if found != _SCHEMA:
            raise BundleError("it is a database without the table of a bundle")
    except BaseException:
        connection.close()
        raise
    return connection


def write_bundle(path: str, rows: Iterable[tuple[str, bytes]]) -> int:
    """Write keys and values, in the order of the keys, into an empty file; return their number.

    Crash: every reader rejects a file that was not written to its end.

    Raises:
        BundleError: it can't be written (full disk), or SQLite is missing.
    """
    sqlite = _sqlite()
    try:
        with closing(sqlite.connect(path, isolation_level=None)) as connection:
            for setting in _WRITING:
                connection.execute(f"PRAGMA {setting}")
            connection.execute("BEGIN")
            connection.execute(_TABLE)
            connection.executemany("INSERT INTO entries VALUES (?, ?)", rows)
            count: int = connection.total_changes
            connection.execute(f"PRAGMA user_version = {count}")
            connection.execute("COMMIT")
            return count
    except sqlite.Error as error:
        raise BundleError(f"{path}: it can't be written ({error})") from error
