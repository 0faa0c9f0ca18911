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
made. So bundles with the same entries are equal files, if the same version of SQLite wrote them. An
envelope contains its key, length and checksum, which the caller checks.
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

#: Larger values are left out of an export and rejected by a reader, because a whole value has to be
#: in memory. The largest kernels of CUTLASS have 10 MB.
MAX_VALUE = 256 << 20
#: The size of SQLite's header at the start of the file. See
#: https://www.sqlite.org/fileformat2.html.
HEAD_SIZE = 100
_MAGIC = b"SQLite format 3\0"
_APPLICATION, _VERSION = b"KCB", b"1"
_TABLE = "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL)"
#: The table, and the index of its primary key.
_SCHEMA = [("entries", _TABLE), ("sqlite_autoindex_entries_1", None)]
_PAGE = 4096
#: The first settings could differ between builds of SQLite. There is no journal, because a file
#: that was not written to its end is never used.
_WRITING = (
    f"page_size = {_PAGE}",
    "encoding = 'UTF-8'",
    "auto_vacuum = NONE",
    "secure_delete = ON",
    "journal_mode = OFF",
    "synchronous = OFF",
    f"application_id = {int.from_bytes(_APPLICATION + _VERSION, 'big')}",
)
#: Settings that protect against malicious files. See https://www.sqlite.org/security.html.
_READING = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")
#: A statement is aborted after this many steps of SQLite's virtual machine, because a malicious
#: file could make it endless. A scan of a million entries takes a tenth of them.
_MOST_STEPS = 100_000_000
#: Held by `get` and `close`. A fork waits for it, because the child would inherit locks of SQLite
#: that are held at that moment.
_in_sqlite = threading.RLock()
at_fork(_in_sqlite.acquire, _in_sqlite.release)


def is_head(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a bundle, of any version."""
    return head.startswith(_MAGIC) and head[68:71] == _APPLICATION


def is_bundle(path: str) -> bool:
    """Return whether the file at `path` begins like a bundle, of any version.

    Raises:
        OSError: the file can't be read.
    """
    return is_head(_beginning(path)[0])


def _beginning(path: str) -> tuple[bytes, int]:
    """Return the first `HEAD_SIZE` bytes of the file at `path`, and the file's size.

    If it is not a regular file, no bytes are read.
    """
    if not os.path.isfile(path):
        return b"", os.stat(path).st_size
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        return file.read(HEAD_SIZE) if stat.S_ISREG(status.st_mode) else b"", status.st_size


def _read_head(path: str) -> bytes:
    """Return the first `HEAD_SIZE` bytes of the bundle at `path`.

    Raises:
        BundleError: the file is not a bundle, has another version, or is truncated.
        OSError: the file can't be read.
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
    """A bundle file, opened for reading, alone or as a read-only tier. Nothing is unpacked.

    If another file is renamed over the bundle while its database is open, this object still reads
    the old file. The file is not mapped into memory, so a file that is truncated while it is being
    read causes a BundleError, not SIGBUS. Reading a malicious file causes a BundleError, too, after
    at most `_MOST_STEPS` steps, and takes at most the memory of two values of `MAX_VALUE` bytes.

    Threads: may be called from several threads at the same time. Fork: a fork waits until a running
    `get` has ended; the child opens the file again. Processes: any number may read the file.

    Args:
        path: the path of the file. Its database is opened, and `sqlite3` imported, when an entry is
            first read.
        keep: see `DirectoryTier`.
        sealer: decides which signatures are accepted.
        name: the name of the file in messages; by default `path`.

    Raises:
        BundleError: the file is not a bundle, has another version, or is truncated.
        OSError: the file can't be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, sealer: Sealer, keep: bool = False, name: str = ""
    ) -> None:
        self.path = os.path.abspath(path)
        self.name = name or os.fspath(path)
        self.keep = keep
        #: Whether all values that were read are signed with one of the keys; None if some have
        #: signatures, but there are no keys.
        self.signed: bool | None = bool(sealer.verifiers)
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
        """Yield (key, envelope) for every entry, by ascending key; only one thread may iterate.

        Raises:
            BundleError: an envelope is not signed as required, the file is damaged or can't be
                read, or the keys are malformed, not in order, or not as many as the file says.
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

    #: A forked child must not use the files that SQLite opened in the parent.
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
        if not self._sealer.verifiers and len(envelope) < len(value):
            self.signed = None
        return envelope

    @contextmanager
    def _translated(self) -> Generator[None]:
        """Raise each error of the block as a BundleError that names the file.

        Other errors than those of bundles and SQLite are not changed.
        """
        try:
            yield
        except BundleError as error:
            raise BundleError(f"{self.name}: {error}") from error
        except _sqlite_errors() as error:
            raise BundleError(f"{self.name}: it is damaged ({error})") from error


def _sqlite_errors() -> tuple[type[Exception], ...]:
    """Return the types of the exceptions that SQLite may raise.

    UnicodeDecodeError is one of them, because names in a malicious file may not be UTF-8.
    """
    module = sys.modules.get("sqlite3")
    return () if module is None else (module.Error, UnicodeDecodeError)


def _sqlite() -> ModuleType:
    """Import and return the module `sqlite3`.

    Raises:
        BundleError: this build of Python lacks the module.
    """
    try:
        with importing:
            import sqlite3  # noqa: PLC0415
    except ImportError as error:
        reason = f"bundles need the module sqlite3, which this Python lacks ({error})"
        raise BundleError(reason) from error
    return sqlite3


def _connect_to_read(path: str) -> sqlite3.Connection:
    """Open the bundle's database at `path`, which may be malicious, for reading.

    Raises:
        BundleError: the database is not that of a bundle, or `sqlite3` is missing.
        sqlite3.Error: the database is damaged or can't be read.
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
            raise BundleError("it is an SQLite database without the table of a bundle")
    except BaseException:
        connection.close()
        raise
    return connection


def write_bundle(path: str, rows: Iterable[tuple[str, bytes]]) -> int:
    """Write `rows`, which are in the order of their keys, into an empty file; return their number.

    Crash: readers reject a file that was not written to its end.

    Raises:
        BundleError: either the file can't be written (for example because the disk is full), or
            `sqlite3` is missing.
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
