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

#: This many failures in a row open the breaker. A single failure may be a lost packet. Each failure
#: may cost a program a time-out.
FAILURES = 3
#: Seconds from the opening of the breaker to the first trial. Each further failure doubles this
#: pause, up to the second value. A restarted Redis is back within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: While the breaker is open, a program asks again after this many seconds at the earliest.
SOON = 0.05
#: Most characters of an error that are shown.
_MOST_TEXT = 500
#: How often a merge is tried while other machines write the same value.
_TRIES = 6


class Breaker:
    """A circuit breaker: open after `FAILURES` failures in a row, until an operation succeeds.

    While it is open, one trial may be made after each pause.

    Threads: may share it.

    Args:
        clock: monotonic seconds, for tests.

    Attributes:
        reason: why the last operation failed; empty after one that succeeded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether operations are to be skipped."""
        return self._failures >= FAILURES

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking again; 0.0 if the breaker is closed."""
        return max(SOON, self._until - self._clock()) if self.is_open else 0.0

    def try_again(self) -> bool:
        """Return whether the caller makes the trial now, and then calls `succeeded` or `failed`."""
        with self._lock:
            is_due = self.is_open and self._clock() >= self._until
            if is_due:
                self._pause()
            return is_due

    def succeeded(self) -> None:
        """Close the breaker."""
        with self._lock:
            self._failures = 0
            self.reason = ""

    def failed(self, reason: str, *, minor: bool = False) -> None:
        """Count a failure. The reason of a minor one is recorded only if the breaker is open."""
        with self._lock:
            self._failures += 1
            self.reason = "" if minor and not self.is_open else reason
            if self._failures == FAILURES:
                self._pause()

    def _pause(self) -> None:
        """Begin a pause, which is longer after more failures."""
        pause = FIRST_PAUSE * 2 ** min(self._failures - FAILURES, 16)
        self._until = self._clock() + min(pause, LONGEST_PAUSE)


class TimeLimit:
    """Calls functions, each in a thread of its own, and waits for them for a limited time.

    A client of a protocol limits each wait for bytes. Nothing else limits a server that sends one
    byte a second, a name server that does not answer, and a client with a defect.

    Threads: may share it. A call that takes longer continues in its thread; its result is dropped.
    """

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_late(self) -> bool:
        """Whether a call that exceeded its limit still runs."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return bool(self._late)

    def call(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Return the result of `work`.

        Raises:
            RemoteTimeout: `work` takes longer than `seconds`.
            RemoteError: `work` raised something that is not an Exception.
            RuntimeError: the machine has no more threads.
            Exception: whatever `work` raises.
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
    """The storage of one remote.

    A failure is an error or a time-out, whatever the protocol. A missing package or an unreadable
    file of this machine is an error, too. Reads and writes have a breaker each: a remote that
    stores nothing (a user who may not write, a full server) is still read.

    Threads: may share it. The first thread that needs the storage opens it.

    Args:
        address: address of the remote.
        make_sealer: returns the sealer, or raises ConfigError; it is called until it succeeds.
        make: returns the storage, or raises ConfigError; it is called until it succeeds.
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
        #: Held to open and to close the storage.
        self._opening = threading.Lock()
        self._opened: tuple[Storage, Sealer] | None = None
        self._limit = TimeLimit()
        #: The server's error for a kernel that was too long for it.
        self._too_long = ""

    # -- questions -------------------------------------------------------------------------------

    def get(self, *keys: str) -> tuple[int, bytes] | None:
        """Return the index of the first key that has a value, and its checked envelope, or None.

        All keys count as one question.

        Raises:
            RemoteError: the remote did not answer.
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
            self.reading.failed(f"an answer without a kernel took {seconds:.2f} s", minor=True)
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
        """Return the envelope if it is sound and well signed; otherwise, count the fault."""
        try:
            envelope = sealer.unseal(sealed)
            _decoded(envelope, key)
        except (SealError, CorruptEntryError) as error:
            self.counts.add("unsigned" if isinstance(error, SealError) else "damaged")
            log.warning("%s: %s is ignored: %s", self.address, key, error)
            return None
        return envelope

    # -- uploads ---------------------------------------------------------------------------------

    def put(self, key: str, envelope: bytes) -> bool:
        """Store an envelope; return whether it is stored."""
        return self._write(
            envelope, lambda storage, sealer: storage.put(key, sealer.seal(envelope))
        )

    def merge(self, key: str, envelope: bytes) -> bool:
        """Merge the manifest in an envelope into the stored one; return whether that succeeded."""
        return self._write(
            envelope, lambda storage, sealer: self._merge(storage, sealer, key, envelope)
        )

    def _merge(self, storage: Storage, sealer: Sealer, key: str, envelope: bytes) -> None:
        """Replace a manifest by one with the dependency sets of both, so that no set is lost.

        Raises:
            RemoteError: it is not stored.
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
        raise RemoteError(f"other machines changed the value during each of {_TRIES} tries")

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
        """Return the answer to a question about a lease, or None if there is none."""
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
        """Return what `work` returns, within the time for `size` bytes. A failure is recorded.

        Raises:
            RemoteTooLong: the value is longer than `max_entry`, or than the server takes.
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
        """Return the storage and the sealer. If the keys can't be read, the remote is not used.

        Raises:
            ConfigError: this machine lacks a package or a file.
        """
        with self._opening:
            if self._opened is None:
                self._opened = self._make(self.address), self._make_sealer()
            return self._opened

    def close(self) -> None:
        """Close the connections. The next question opens new ones."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(Exception):
                opened[0].close()

    def _tries(self, breaker: Breaker) -> bool:
        """Return whether this caller makes the trial, which reads credentials and keys again."""
        tries = breaker.try_again()
        if tries:
            self.close()
        return tries

    def _is_unavailable(self) -> bool:
        """Return whether the remote can't be asked now. After a pause, begin a trial in a thread.

        While an operation hangs beyond its limit, no other operation begins.
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
        """Ask for a key that can't exist."""
        with suppress(RemoteError):
            self._get([secrets.token_hex(32)])

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking again; 0.0 if it may be asked now."""
        return max(self.reading.wait, SOON if self._limit.is_late else 0.0)

    @property
    def trouble(self) -> str:
        """The warning for users while something fails; empty if all is well."""
        if self.reading.reason:
            return f"{self.address}: {self.reading.reason}; kcache works without it"
        if self.writing.reason:
            return f"{self.address}: {self.writing.reason}; kcache stores nothing there for now"
        if self._too_long:
            return f"{self.address}: {self._too_long}; kcache does not store such kernels there"
        return ""

    def as_dict(self) -> dict[str, object]:
        """Return the status of this remote."""
        return {
            "address": self.address.redacted(),
            "writable": self.address.writable,
            "breaker": "open" if self.reading.is_open else "closed",
            "reason": self.reading.reason or self.writing.reason,
            **self.counts.as_dict(),
        }


def _decoded(envelope: bytes, key: str) -> Entry:
    """Return the entry in an envelope of any producer; raises CorruptEntryError."""
    return decode(envelope, key, producer=producer_of(envelope))
