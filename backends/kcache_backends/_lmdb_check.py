"""LMDB check: reads all of a database, finds what is wrong with it, and mends it if asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import takewhile

import lmdb
from lmdb import verify

from kcache.errors import BackendError
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_environment import PATIENCE, Environment
from kcache_backends._lmdb_errors import DAMAGE, MissingError, translated

__all__ = ["check"]

#: How often a file is verified again if another process wrote to it in the meantime.
_TRIES = 3


def check(
    environment: Environment,
    writing: Callable[[str], AbstractContextManager[object]],
    *,
    repair: bool,
) -> Iterator[str]:
    """Yield what is wrong: pages first, then sums and index; see `Backend.check`.

    With repair, a file with damaged pages is replaced by an empty one, and sums and index are
    rebuilt. Nobody else writes in a block of `writing`; if the cache is open for reading only, that
    block does nothing.

    Raises:
        BackendError: the database can't be read.
    """
    try:
        with translated("check", environment.root):
            environment.get()
    except MissingError:
        return
    with writing("check"), translated("check", environment.root):
        pages = _verify(environment)
    if pages:
        yield f"the database is damaged: {pages[0]}" + _more(len(pages) - 1)
        if repair:
            with translated("repair", environment.root):
                environment.discard(environment.open, patience=PATIENCE)
        return
    with writing("check"), translated("check", environment.root):
        env = environment.get()
        txn = environment.txn or env.begin()
        try:
            found = list(_wrong(txn))
            if found and repair:
                _mend(txn)
        finally:
            if txn is not environment.txn:
                txn.abort()
    yield from found


def _more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _verify(environment: Environment) -> list[str]:
    """Return what py-lmdb's verifier, which reads the bytes of the file, says of it."""
    for _ in range(_TRIES):
        # Looked up each time: another process may exchange it in the meantime.
        env = environment.get()
        before = env.info()["last_txnid"]
        try:
            with environment.files() as place:
                problems: list[str] = verify.verify(place)  # type: ignore[no-untyped-call]
        except (verify.VerifyError, *DAMAGE) as error:
            problems = [str(error)]
        if environment.lost():
            environment.renew()
        elif not problems or env.info()["last_txnid"] == before:
            return problems
    raise BackendError(
        f"{environment.root} can't be verified, because others write to it all the time"
    )


def _wrong(txn: lmdb.Transaction[bytes]) -> Iterator[str]:
    """Yield where the sums and the index by recency differ from the entries."""
    size = entries = lacking = right = damaged = 0
    for name in _keys(txn, b"e"):
        raw = name[1:]
        entries += 1
        lacking += txn.get(b"v" + raw) is None
        try:
            used, stored = records.info(txn, raw) or (0, 0)
        except lmdb.CorruptedError:
            damaged += 1
            continue
        size += stored
        right += txn.get(b"r" + used.to_bytes(8, "big") + raw) == stored.to_bytes(8, "little")
    values = len(_keys(txn, b"v"))
    index = len(_keys(txn, b"r"))
    try:
        counted = records.sums(txn) or (0, 0)
    except lmdb.CorruptedError:
        yield "the record of the sums is damaged"
    else:
        if counted != (size, entries):
            yield f"the sums are {counted[0]} bytes, {counted[1]} entries; right: {size}, {entries}"
    if damaged:
        yield f"{damaged} records of entries are damaged"
    if lacking or values != entries:
        yield f"{lacking} entries lack a value, {values - entries + lacking} values an entry"
    if not right == index == entries:
        yield f"the index by recency has {index} rows, {right} of them right, for {entries}"


def _mend(txn: lmdb.Transaction[bytes]) -> None:
    """Rebuild the entries, the index and the sums from the values."""
    last_use: dict[bytes, int] = {}
    for name in _keys(txn, b"e"):
        with suppress(lmdb.CorruptedError):
            last_use[name[1:]] = (records.info(txn, name[1:]) or (0, 0))[0]
    for name in (*_keys(txn, b"e"), *_keys(txn, b"r")):
        txn.delete(name)
    size = entries = 0
    for name in _keys(txn, b"v"):
        stored = records.stored_size(len(txn.get(name, b"")))
        records.put_info(txn, name[1:], last_use.get(name[1:], 0), stored)
        size += stored
        entries += 1
    records.write_sums(txn, size, entries)


def _keys(txn: lmdb.Transaction[bytes], prefix: bytes) -> list[bytes]:
    """Return the keys that begin with a letter: 41 bytes each at most, whatever the values."""
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix)
        keys = cursor.iternext(values=False) if found else iter(())
        return list(takewhile(lambda name: name.startswith(prefix), keys))
