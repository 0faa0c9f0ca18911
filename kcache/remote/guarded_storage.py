"""GuardedStorage: the storage of one remote, with signatures, counts, time limits and breakers."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from kcache.entry import Entry, decode, encode, merged, producer_of
from kcache.errors import CorruptEntryError
from kcache.remote.address import Address
from kcache.remote.daemon_protocol import Counts
from kcache.remote.signing import SEAL_ROOM, Sealer, SealError
from kcache.remote.storage import (
    Leases,
    RemoteError,
    RemoteTimeout,
    RemoteTooLong,
    Storage,
    open_storage,
)
from kcache.util import log
from kcache.util.units import plain

_T = TypeVar("_T")

#: This many failures in a row open the breaker. One failure is not enough, because it may be a lost
#: packet. The number is small, because a program may wait for a time-out at each failure.
FAILURES = 3
#: The seconds from the opening of the breaker to the first trial. Each further failure doubles this
#: pause, up to `LONGEST_PAUSE`. The first pause is short because a Redis that is restarted answers
#: again within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: While the breaker is open, a program asks again after this many seconds at the earliest.
SOON = 0.05
#: The largest number of characters of an error that are shown.
_MOST_TEXT = 500
#: How often a merge is tried if other machines change the same value at the same time.
_TRIES = 6


class Breaker:
    """A circuit breaker: open after `FAILURES` failures in a row, until an operation succeeds.

    While the breaker is open, operations are skipped, except for one trial after each pause.

    Threads: Several threads may use one object.

    Args:
        clock: a function that returns monotonic seconds. Tests replace it.

    Attributes:
        reason: why the last operation failed; empty if it succeeded, or if its failure was minor
            (see `failed`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, so that operations are skipped."""
        return self._failures >= FAILURES

    @property
    def wait(self) -> float:
        """The seconds until the next trial, at least `SOON`; 0.0 if the breaker is closed."""
        return max(SOON, self._until - self._clock()) if self.is_open else 0.0

    def try_again(self) -> bool:
        """Return whether the caller has to make a trial now. If so, the next pause begins.

        The result is True for one caller after each pause. That caller reports the result of its
        trial with `succeeded` or `failed`.
        """
        with self._lock:
            is_due = self.is_open and self._clock() >= self._until
            if is_due:
                self._pause()
            return is_due

    def succeeded(self) -> None:
        """Close the breaker, because an operation has succeeded."""
        with self._lock:
            self._failures = 0
            self.reason = ""

    def failed(self, reason: str, *, minor: bool = False) -> None:
        """Count a failure, and open the breaker if there were `FAILURES` in a row.

        The reason of a minor failure is recorded only if the breaker is open, because users are
        warned of each reason that is recorded.
        """
        with self._lock:
            self._failures += 1
            self.reason = "" if minor and not self.is_open else reason
            if self._failures == FAILURES:
                self._pause()

    def _pause(self) -> None:
        """Begin a pause, which is longer the more failures there were."""
        pause = FIRST_PAUSE * 2 ** min(self._failures - FAILURES, 16)
        self._until = self._clock() + min(pause, LONGEST_PAUSE)


class TimeLimit:
    """Calls functions, each in a thread of its own, and waits for them for a limited time.

    This is needed because a client limits only each single wait for bytes. An operation could still
    take forever if a server sends one byte a second, if a name server does not answer, or if the
    client has a defect.

    Threads: Several threads may use one object. A function that exceeds its time limit continues to
    run in its thread, and its result is ignored.
    """

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_late(self) -> bool:
        """Whether a function that exceeded its time limit is still running."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return bool(self._late)

    def call(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Call `work`, wait up to `seconds` for it, and return its result.

        Raises:
            RemoteTimeout: `work` takes longer than `seconds`.
            RemoteError: `work` has raised a BaseException that is not an Exception.
            RuntimeError: no thread can be started.
            Exception: the exception that `work` has raised.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a panic of Rust is not an Exception
                future.set_exception(RemoteError(repr(error)))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not future.done():
            self._late.append(thread)
            raise RemoteTimeout(f"no answer within {seconds:g} s")
        return future.result()


class GuardedStorage:
    """The storage of one remote, with signatures, counts, time limits and breakers.

    Each failure is counted as an error or as a time-out. A missing package or an unreadable file on
    this machine also counts as an error of the remote. There is one breaker for reads and one for
    writes, so that a remote is still read if it stores nothing (because the user may not write, or
    because the server is full).

    Threads: Several threads may use one object. The first thread that needs the storage opens it.

    Args:
        address: the address of the remote.
        make_sealer: a function that returns the sealer, or raises ConfigError. If it fails, the
            next operation calls it again.
        make: a function that returns the storage, or raises ConfigError. If it fails, the next
            operation calls it again.
    """

    def __init__(
        self,
        address: Address,
        make_sealer: Callable[[], Sealer],
        *,
        make: Callable[[Address], Storage] = open_storage,
    ) -> None:
        self.address = address
        self.counts = Counts()
        self.reading, self.writing = Breaker(), Breaker()
        self._make_sealer = make_sealer
        self._make = make
        #: Held while the storage is opened or closed.
        self._opening = threading.Lock()
        self._opened: tuple[Storage, Sealer] | None = None
        self._limit = TimeLimit()
        #: The error about the last kernel that was too long for the server, or empty.
        self._too_long = ""

    # -- questions -------------------------------------------------------------------------------

    def get(self, *keys: str) -> tuple[int, bytes] | None:
        """Return the index of the first key with a sound value in the remote, and its envelope.

        The result is None if the remote has no sound value under any of `keys`. All keys count as
        one question.

        Raises:
            RemoteError: the remote did not answer, or it was not asked because it had failed.
        """
        if self._is_unavailable():
            self.counts.add("skipped")
            raise RemoteError(self.reading.reason)
        found = self._get(keys)
        self.counts.add("misses" if found is None else "hits")
        return found

    def _get(self, keys: Sequence[str]) -> tuple[int, bytes] | None:
        def look(storage: Storage, sealer: Sealer) -> tuple[tuple[int, bytes] | None, float]:
            started = time.monotonic()  # the storage is open, which may have imported a package
            return self._first(storage, sealer, keys), time.monotonic() - started

        found, seconds = self._call(self.reading, "get", look)
        if found is None and seconds > self.address.slow:
            slow = f"an answer without a kernel took {seconds:.2f} s, more than `slow` allows"
            self.reading.failed(slow, minor=True)
        else:
            self.reading.succeeded()
        return found

    def _first(
        self, storage: Storage, sealer: Sealer, keys: Sequence[str]
    ) -> tuple[int, bytes] | None:
        for which, key in enumerate(keys):
            try:
                stored = storage.get(key, self.address.max_entry + SEAL_ROOM)
            except RemoteTooLong as error:  # stored by a machine with a larger `max_entry`
                log.debug("%s: a value is ignored: %s", self.address, error)
                continue
            if stored is not None:
                self.counts.add("bytes_in", len(stored.value))
                envelope = self._checked(sealer, key, stored.value)
                if envelope is not None:
                    return which, envelope
        return None

    def _checked(self, sealer: Sealer, key: str, sealed: bytes) -> bytes | None:
        """Return the envelope in `sealed`, or None if it is damaged or not signed as required.

        If the result is None, the fault is counted and logged.
        """
        try:
            envelope = sealer.unseal(sealed)
            _decoded(envelope, key)
        except (SealError, CorruptEntryError) as error:
            self.counts.add("unsigned" if isinstance(error, SealError) else "damaged")
            log.warning("%s: the entry %s is ignored: %s", self.address, key, error)
            return None
        return envelope

    # -- uploads ---------------------------------------------------------------------------------

    def put(self, key: str, envelope: bytes) -> bool:
        """Store `envelope` under `key` in the remote; return whether it is stored."""
        return self._write(
            envelope, lambda storage, sealer: storage.put(key, sealer.seal(envelope))
        )

    def merge(self, key: str, envelope: bytes) -> bool:
        """Merge a manifest into the one that the remote has under `key`; return whether it worked.

        If the remote has no manifest under `key`, `envelope` is stored.
        """
        return self._write(
            envelope, lambda storage, sealer: self._merge(storage, sealer, key, envelope)
        )

    def _merge(self, storage: Storage, sealer: Sealer, key: str, envelope: bytes) -> None:
        """Store a manifest with the dependency sets in `envelope` and those stored under `key`.

        If another machine changes the stored manifest in the meantime, the merge is tried again, so
        that no dependency set is lost.

        Raises:
            RemoteError: the manifest is not stored.
        """
        for attempt in range(_TRIES):
            if attempt:  # random, so that writers do not collide again
                time.sleep(random.uniform(0, 0.02 * 2**attempt))
            old = storage.get(key, self.address.max_entry + SEAL_ROOM)
            known = None if old is None else self._checked(sealer, key, old.value)
            both = envelope
            if known is not None:
                new = _decoded(envelope, key)
                entry = merged(_decoded(known, key), new, self.address.max_entry)
                if entry is None:
                    return
                both = encode(key, entry, producer=producer_of(envelope))
            if storage.replace(key, sealer.seal(both), old):
                return
        raise RemoteError(f"other machines changed the manifest during each of {_TRIES} merges")

    def _write(self, envelope: bytes, write: Callable[[Storage, Sealer], None]) -> bool:
        def work(storage: Storage, sealer: Sealer) -> bool:
            if sealer.can_seal:
                write(storage, sealer)
            return sealer.can_seal

        size = len(envelope)
        if not self.address.writable:
            return False
        pauses = self._is_unavailable() or (self.writing.is_open and not self._tries(self.writing))
        if pauses or size > self.address.max_entry:
            self.counts.add("dropped")
            return False
        try:
            if not self._call(self.writing, "put", work, size):
                return False
        except RemoteError as error:
            self.counts.add("dropped")
            if isinstance(error, RemoteTooLong):  # other kernels may be short enough
                self._too_long = plain(str(error)[:_MOST_TEXT])
            return False
        self.counts.add("uploads")
        self.counts.add("bytes_out", size)
        self.writing.succeeded()
        return True

    # -- leases ----------------------------------------------------------------------------------

    def ask_leases(self, ask: Callable[[Leases], bool]) -> bool | None:
        """Return what `ask` returns, or None if the remote can't be asked or has no leases."""
        if self._is_unavailable():
            return None
        try:
            return self._call(
                self.reading,
                "lease",
                lambda storage, _: ask(storage) if isinstance(storage, Leases) else None,
            )
        except RemoteError:
            return None

    # -- the storage and its failures --------------------------------------------------------------

    def _call(
        self, breaker: Breaker, operation: str, work: Callable[[Storage, Sealer], _T], size: int = 0
    ) -> _T:
        """Call `work` with the storage and the sealer, and return its result.

        A failure is counted, logged and reported to `breaker`.

        Args:
            breaker: the breaker to which a failure is reported.
            operation: the name of the operation, for the log.
            work: the function to call.
            size: the number of bytes that are sent, on which the time limit depends.

        Raises:
            RemoteTooLong: the value is longer than `max_entry`, or than the server accepts. This is
                not a failure.
            RemoteError: the operation failed.
        """
        try:
            storage, sealer = self._open()
            return self._limit.call(self.address.seconds(size), lambda: work(storage, sealer))
        except RemoteTooLong:
            raise
        except Exception as error:
            text = plain(str(error)[:_MOST_TEXT]) or type(error).__name__
            self.counts.add("timeouts" if isinstance(error, RemoteTimeout) else "errors")
            log.debug("%s: %s failed: %r", self.address, operation, error)
            breaker.failed(text)
            raise RemoteError(text) from error

    def _open(self) -> tuple[Storage, Sealer]:
        """Return the storage and the sealer, which the first call makes.

        If the signing keys can't be read, the remote is not used at all, because what it has could
        not be verified.

        Raises:
            ConfigError: a package is missing, or a file on this machine can't be used.
        """
        with self._opening:
            if self._opened is None:
                self._opened = self._make(self.address), self._make_sealer()
            return self._opened

    def close(self) -> None:
        """Close the connections. The next operation opens new ones."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(Exception):
                opened[0].close()

    def _tries(self, breaker: Breaker) -> bool:
        """Return whether the caller has to make a trial now (see `Breaker.try_again`).

        If so, the storage is closed, so that the trial reads the credentials and the keys again.
        """
        tries = breaker.try_again()
        if tries:
            self.close()
        return tries

    def _is_unavailable(self) -> bool:
        """Return whether the remote can't be asked now.

        This is so while the breaker for reads is open, or while an operation that exceeded its time
        limit is still running. If a trial is due, a new thread makes it, so that no program waits
        for its result.
        """
        if self._limit.is_late:
            return True
        if self._tries(self.reading):
            try:
                threading.Thread(target=self._try, daemon=True).start()
            except RuntimeError as error:  # the machine has no more threads
                self.reading.failed(str(error))
        return self.reading.is_open

    def _try(self) -> None:
        """Make a trial: ask for a random key, which no entry has."""
        with suppress(RemoteError):
            self._get([secrets.token_hex(32)])

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking the remote again; 0.0 if it may be asked now."""
        return max(self.reading.wait, SOON if self._limit.is_late else 0.0)

    @property
    def trouble(self) -> str:
        """The warning for users while operations fail; an empty text if they succeed."""
        if self.reading.reason:
            return f"{self.address}: {self.reading.reason}; kcache works without it"
        if self.writing.reason:
            return f"{self.address}: {self.writing.reason}; kcache stores nothing there for now"
        if self._too_long:
            return f"{self.address}: {self._too_long}; kcache does not store such kernels there"
        return ""

    def as_dict(self) -> dict[str, object]:
        """Return the address without credentials, the state of the breaker, and the counts."""
        return {
            "address": self.address.redacted(),
            "writable": self.address.writable,
            "breaker": "open" if self.reading.is_open else "closed",
            "reason": self.reading.reason or self.writing.reason,
            **self.counts.as_dict(),
        }


def _decoded(envelope: bytes, key: str) -> Entry:
    """Return the entry in `envelope`, whatever its producer; raise CorruptEntryError if damaged."""
    return decode(envelope, key, producer=producer_of(envelope))
