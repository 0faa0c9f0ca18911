"""Reader: reads values and rows from an LMDB database that others may exchange meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import TypeAlias, TypeVar, cast

import lmdb

from kcache.backend import Backend, EntryInfo
from kcache.errors import BackendError, CorruptEntryError, FullError
from kcache_backends._lmdb_environment import Environment
from kcache_backends._lmdb_errors import DAMAGE, MissingError, is_full, translated

__all__ = ["Infos", "Reader"]

T = TypeVar("T")
Rows: TypeAlias = list[tuple[bytes, bytes, int, int]]
Infos: TypeAlias = Iterator[EntryInfo]

#: How many rows one read transaction of `coldest` or `scan` looks at. A longer transaction would
#: keep LMDB from using pages again.
ROWS = 256
#: How often a read is tried if another process or thread exchanges its database.
_TRIES = 4
#: ... and the pause between two tries if the database could not be opened, in seconds.
_PAUSE = 1e-3


class Reader(Backend):
    """The part of a backend that reads: in a transaction of its own, or in that of its thread.

    Threads: safe to share. A read waits for no writer, and is tried again where another thread or
    process closes, exchanges or enlarges the database in the middle of it.
    """

    _root: str
    _max_size: int
    _environment: Environment
    _closed: bool
    #: The first error within a write transaction.
    _failure: BaseException | None

    def _value(self, txn: lmdb.Transaction[bytes], name: bytes) -> bytes | None:
        """Return a copy of a value; None if it is larger than the cap, so that no put wrote it."""
        value = txn.get(name)
        return None if value is None or len(value) > self._max_size else bytes(value)

    def _find(
        self, look: Callable[[lmdb.Transaction[bytes]], T], *, buffers: bool = False
    ) -> T | None:
        """Return what `look` finds; if nothing, search the database that replaced this one.

        An exchange empties the old database last.

        Args:
            look: finds it in a transaction.
            buffers: whether it takes views of the map instead of copies.
        """
        found = self._read(look, buffers=buffers)
        if not found and self._renewed():
            found = self._read(look, buffers=buffers)
        return found

    def _read(
        self, look: Callable[[lmdb.Transaction[bytes]], T], *, buffers: bool = False
    ) -> T | None:
        """Return what `look` finds in a read transaction, or in this thread's own transaction.

        None if there is no database and none may be made.
        """
        environment = self._environment
        if environment.writer == get_ident() and environment.txn is not None:
            with self._noting_failure("read"):
                return look(environment.txn)
        if self._closed:
            raise BackendError(f"{self._root} is closed")
        try:
            with self._translated("read"):
                return self._look(look, buffers=buffers)
        except MissingError:
            return None

    def _look(self, look: Callable[[lmdb.Transaction[bytes]], T], *, buffers: bool) -> T:
        environment = self._environment
        failure: Exception = lmdb.Error("others replace the database all the time")
        for _ in range(_TRIES):
            env: lmdb.Environment | None = None
            try:
                env = environment.get()
                txn = cast("lmdb.Transaction[bytes]", env.begin(buffers=buffers))  # type: ignore[call-overload]
                try:
                    return look(txn)
                finally:
                    txn.abort()
            except lmdb.MapResizedError:
                environment.adopt_size()
            except lmdb.ReadersFullError:
                if env is None or not env.reader_check():
                    raise
            except DAMAGE as error:
                if env is None:
                    raise
                environment.discard(env)
                raise CorruptEntryError(f"{self._root} is damaged: {error}") from error
            except (lmdb.Error, FileNotFoundError) as error:
                # Perhaps another thread closes or remaps the database. Try once more with the open
                # one.
                failure = error
                time.sleep(0.0 if environment.open else _PAUSE)
        raise failure

    def _renewed(self) -> bool:
        """Tell whether the database was exchanged since it was opened; if so, release it."""
        environment = self._environment
        return environment.writer != get_ident() and environment.renew()

    def _rows(
        self, look: Callable[[lmdb.Transaction[bytes], bytes, int], Rows], after: bytes = b""
    ) -> Infos:
        """Yield what `look` returns of the tree, `ROWS` at a time, each in a transaction."""
        self._renewed()

        def more(txn: lmdb.Transaction[bytes]) -> Rows:
            return look(txn, after, ROWS)

        while rows := self._find(more):
            for _, raw, used, size in rows:
                yield EntryInfo(raw.hex(), size, used)
            after = rows[-1][0] + b"\0"

    # -- errors -----------------------------------------------------------------------------------

    @contextmanager
    def _noting_failure(self, operation: str) -> Generator[None]:
        """Translate LMDB's errors in a transaction, and note why the transaction must fail."""
        try:
            with self._translated(operation):
                yield
        except BackendError as error:
            self._failure = self._failure or error.__cause__
            if is_full(self._failure, self._root) and not isinstance(error, FullError):
                raise FullError(f"{error}, after {self._failure}") from self._failure
            raise

    def _translated(self, operation: str) -> AbstractContextManager[None]:
        return translated(operation, self._root)
