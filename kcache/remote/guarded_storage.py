"""GuardedStorage: one remote. It seals and counts; after failures it is left alone for a while."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kcache.entry import Entry, decode, encode, producer_of
from kcache.errors import ConfigError, CorruptEntryError
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcache.remote.address import Address
    from kcache.remote.daemon_protocol import Counts

_T = TypeVar("_T")

#: Most characters of an error that are shown.
_MOST_TEXT = 500
#: How often a merge is tried if other machines write the same value.
_TRIES = 6


class GuardedStorage:
    """One remote.

    A failure is an error or a time-out, whatever the protocol; a package or a file that this
    machine lacks is an error, too. Reading and writing fail apart from each other: a user who may
    not write, and a server that is full, are still asked.

    Threads: safe to share; the client is made by the first thread that needs it.

    Args:
        address: address of the remote.
        make_sealer: returns the sealer; raises ConfigError at each call that can't make one.
        counts: counts of the remote.
        make: returns the remote's client; raises ConfigError likewise.
    """

    def __init__(
        self,
        address: Address,
        make_sealer: Callable[[], Sealer],
        counts: Counts,
        *,
        make: Callable[[Address], Storage] = open_storage,
    ) -> None:
        self.address = address
        self.counts = counts
        self.reading, self.writing = Breaker(), Breaker()
        self._make_sealer = make_sealer
        self._make = make
        self._opened: tuple[Storage, Sealer] | None = None
        self._opening = threading.Lock()
        self._limit = TimeLimit()
        self._checking = threading.Lock()
        self._writing_is_known = False
        #: What the server said of a kernel that was too long for it.
        self._too_long = ""

    # -- questions -------------------------------------------------------------------------------

    def get(self, *keys: str) -> tuple[int, bytes] | None:
        """Return the index of the first key that has a value, and its checked envelope, or None.

        All keys count as one question.

        Raises:
            RemoteError: there is no answer.
        """
        if self._is_left_alone():
            self.counts.add("skipped")
            raise RemoteError(self.reading.reason)
        found = self._ask(keys)
        self.counts.add("misses" if found is None else "hits")
        return found

    def _ask(self, keys: Sequence[str]) -> tuple[int, bytes] | None:
        try:
            client, sealer = self._open()  # which may import a package
            started = time.monotonic()
            found = self._limit.call(
                self.address.seconds(), lambda: self._first(client, sealer, keys)
            )
        except Exception as error:
            raise self._failed(self.reading, "get", error) from error
        seconds = time.monotonic() - started
        if found is None and seconds > self.address.slow:
            self.reading.failed(f"an answer without a kernel took {seconds:.2f} s", minor=True)
        else:
            self.reading.succeeded()
        if sealer.can_seal:
            self._check_writing(client)
        return found

    def _check_writing(self, client: Storage) -> None:
        """After the first answer, find out whether the server stores anything, if it can tell.

        A program is told of that at its start; it has often ended when its first upload fails.
        """
        if self._writing_is_known or not self.address.writable or not isinstance(client, Leases):
            return
        with self._checking:  # whoever asks meanwhile is told, too
            if self._writing_is_known:
                return
            try:
                self._limit.call(self.address.seconds(), client.check_writable)
            except Exception as error:
                self._failed(self.writing, "put", error)
            self._writing_is_known = True

    def _first(
        self, client: Storage, sealer: Sealer, keys: Sequence[str]
    ) -> tuple[int, bytes] | None:
        for which, key in enumerate(keys):
            try:
                stored = client.get(key, self.address.max_entry + SEAL_ROOM)
            except RemoteTooLong as error:  # a machine that takes more has stored it
                log.debug("%s: a value is not used: %s", self.address, error)
                continue
            if stored is not None:
                self.counts.add("bytes_in", len(stored.value))
                envelope = self._checked(sealer, key, stored.value)
                if envelope is not None:
                    return which, envelope
        return None

    def _checked(self, sealer: Sealer, key: str, sealed: bytes) -> bytes | None:
        """Return the envelope if its signature is right and it is sound; otherwise count that."""
        try:
            envelope = sealer.unseal(sealed)
            _entry(envelope, key)
        except SealError as error:
            self.counts.add("unsigned")
            log.warning("%s: %s is not used: %s", self.address, key, error)
        except CorruptEntryError as error:
            self.counts.add("damaged")
            log.warning("%s: %s is not used: %s", self.address, key, error)
        else:
            return envelope
        return None

    # -- uploads ---------------------------------------------------------------------------------

    def put(self, key: str, envelope: bytes) -> bool:
        """Store an envelope; tell whether it is stored."""
        return self._write(envelope, lambda client, sealer: client.put(key, sealer.seal(envelope)))

    def merge(self, key: str, envelope: bytes) -> bool:
        """Merge the manifest in an envelope into the stored one; tell whether that succeeded."""
        return self._write(
            envelope, lambda client, sealer: self._merge(client, sealer, key, envelope)
        )

    def _merge(self, client: Storage, sealer: Sealer, key: str, envelope: bytes) -> None:
        """Replace a manifest by one with the header sets of both, so that no other one is lost.

        Raises:
            RemoteError: it is not stored.
        """
        for attempt in range(_TRIES):
            if attempt:  # random, so that writers do not collide again
                time.sleep(random.uniform(0, 0.02 * 2**attempt))
            old = client.get(key, self.address.max_entry + SEAL_ROOM)
            known = None if old is None else self._checked(sealer, key, old.value)
            both = envelope if known is None else self._merged(key, known, envelope)
            if both is None or client.replace(key, sealer.seal(both), old):
                return
        raise RemoteError("others write the same value all the time")

    def _merged(self, key: str, known: bytes, envelope: bytes) -> bytes | None:
        """Return the manifest of both, or None if the known one has all of the new one."""
        old, new = _entry(known, key), _entry(envelope, key)
        both = merged(old, new, self.address.max_entry)
        return None if both is None else encode(key, both, producer=producer_of(envelope))

    def _write(self, envelope: bytes, write: Callable[[Storage, Sealer], None]) -> bool:
        size, address = len(envelope), self.address
        if not address.writable:
            return False
        pauses = self._is_left_alone() or (self.writing.is_open and not self._tries(self.writing))
        if size > address.max_entry or pauses:
            self.counts.add("dropped")
            return False
        try:
            client, sealer = self._open()
            if not sealer.can_seal:
                return False
            self._limit.call(address.seconds(size), lambda: write(client, sealer))
        except RemoteTooLong as error:  # other kernels may be short enough
            self.counts.add("dropped")
            self._too_long = _printable(str(error))
            return False
        except Exception as error:
            self.counts.add("dropped")
            self._failed(self.writing, "put", error)
            return False
        self.counts.add("uploads")
        self.counts.add("bytes_out", size)
        self.writing.succeeded()
        return True

    # -- leases ----------------------------------------------------------------------------------

    def ask_leases(self, ask: Callable[[Leases], bool]) -> bool | None:
        """Return the answer to a question about a lease, or None if there is none."""
        if self._is_left_alone():
            return None
        try:
            client, _ = self._open()
            if not isinstance(client, Leases):
                return None
            return self._limit.call(self.address.seconds(), lambda: ask(client))
        except Exception as error:
            self._failed(self.reading, "lease", error)
            return None

    # -- the client and its failures ---------------------------------------------------------------

    def _open(self) -> tuple[Storage, Sealer]:
        """Return the remote's client, and the sealer: without its keys, nothing is trusted.

        Raises:
            ConfigError: this machine lacks something for it.
        """
        with self._opening:
            if self._opened is None:
                self._opened = self._make(self.address), self._make_sealer()
            return self._opened

    def close(self) -> None:
        """Close the connections. The next question makes new ones."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(Exception):
                opened[0].close()

    def _failed(self, breaker: Breaker, operation: str, error: Exception) -> RemoteError:
        """Count and log a failure, and return it as a RemoteError."""
        text = _printable(str(error) or type(error).__name__)
        self.counts.add("timeouts" if isinstance(error, RemoteTimeout) else "errors")
        known = isinstance(error, (RemoteError, ConfigError))
        log.debug("%s: %s failed: %s", self.address, operation, text if known else repr(error))
        breaker.failed(text)
        return RemoteError(text)

    def _tries(self, breaker: Breaker) -> bool:
        """Tell whether this caller makes the trial; it reads credentials and keys again."""
        tries = breaker.try_again()
        if tries:
            self.close()
        return tries

    def _is_left_alone(self) -> bool:
        """Tell whether nobody asks now; if a pause is over, make a trial without waiting for it.

        While a question hangs in spite of all limits, there is no other one.
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
            self._ask([secrets.token_hex(32)])

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking again; 0.0 if it may be asked now."""
        return max(self.reading.wait, SOON if self._limit.is_late else 0.0)

    @property
    def trouble(self) -> str:
        """What a user should know: why the remote is of no use; empty if it works."""
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


def _entry(envelope: bytes, key: str) -> Entry:
    """Return the entry in an envelope of any producer; raises CorruptEntryError."""
    return decode(envelope, key, producer=producer_of(envelope))


def _printable(text: str) -> str:
    """Return a server's text in one line, without characters that could control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MOST_TEXT])


# -- limits ---------------------------------------------------------------------------------------

#: This many failures in a row open the breaker. One failure may be a lost packet. Each costs a
#: program a time-out.
FAILURES = 3
#: Seconds until the remote is tried again. Each trial that fails doubles them, up to the larger
#: value. A restarted Redis is back within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: Least seconds until a program asks again while the breaker is open.
SOON = 0.05


class Breaker:
    """Counts failures in a row. After `FAILURES` of them it is open until something succeeds.

    While it is open, one trial may be made after each pause.

    Threads: safe to share. Lives in the service, so all programs with its settings share it.

    Args:
        clock: monotonic seconds, for tests.

    Attributes:
        reason: why the last operation failed; empty after one that succeeded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._trying = False
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether nobody should ask."""
        return self._failures >= FAILURES

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking again; 0.0 if it is closed."""
        return max(SOON, self._until - self._clock()) if self.is_open else 0.0

    def try_again(self) -> bool:
        """Tell whether this caller should try now; the caller then reports how that ended."""
        with self._lock:
            if not self.is_open or self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """Close it."""
        with self._lock:
            self._failures = 0
            self._pause = FIRST_PAUSE
            self._trying = False
            self.reason = ""

    def failed(self, reason: str, *, minor: bool = False) -> None:
        """Count a failure, with the reason in words.

        A minor one (a slow answer) is no reason to warn anybody until there are enough in a row.
        """
        with self._lock:
            self._failures += 1
            self._trying = False
            self.reason = "" if minor and not self.is_open else reason
            now = self._clock()
            # Operations that were under way when it opened say nothing new.
            if self.is_open and now >= self._until:
                self._until = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)


class TimeLimit:
    """Calls functions, each in a thread of its own, and waits for them as long as is allowed.

    A client of a protocol limits each wait for bytes. A server that sends a byte a second, a name
    server that does not answer, and a client with a defect have no such limit.

    Threads: safe to share. A call that takes longer goes on in its thread; its result is dropped.
    """

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_late(self) -> bool:
        """Whether a call that took too long still runs."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return bool(self._late)

    def call(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Return the result of `work`.

        Raises:
            RemoteTimeout: it takes longer than `seconds`.
            RemoteError: it has raised something that is no Exception.
            RuntimeError: the machine has no more threads.
            Exception: whatever `work` raises.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # a panic of Rust is no Exception
                future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not future.done():
            self._late.append(thread)
            raise RemoteTimeout(f"no answer within {seconds:g} s")
        error = future.exception()
        if error is None or isinstance(error, Exception):
            return future.result()
        raise RemoteError(repr(error)) from error


# -- manifests -------------------------------------------------------------------------------------

#: The same as `kcache.nvrtc.manifest.MAX_SETS`, the limit of the readers.
MAX_SETS = 16
#: Bytes of an entry beside its header sets, at most.
_ROOM = 2048


def _sets(entry: Entry) -> list[bytes]:
    found: list[bytes] = []
    while (raw := entry.payload.get(f"set{len(found)}")) is not None:
        found.append(raw)
    return found


def merged(old: Entry, new: Entry, most: int | None = None) -> Entry | None:
    """Return a manifest with the header sets of both, the new ones first; None if all are in `old`.

    If there are more than `MAX_SETS`, or more than `most` bytes of them, the oldest are dropped.
    The first one stays.
    """
    known, added = _sets(old), _sets(new)
    missing = [raw for raw in added if raw not in known]
    if not missing:
        return None
    sets = missing + known
    while most is not None and len(sets) > 1 and sum(map(len, sets)) + _ROOM > most:
        sets.pop()
    payload = {f"set{number}": raw for number, raw in enumerate(sets[:MAX_SETS])}
    return Entry(payload, {"kind": "manifest"})
