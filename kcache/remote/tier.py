"""Tier: one remote in the agent. It seals and counts, and skips a failing remote for a while."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.entry import decode, encode, producer_of
from kcache.errors import ConfigError, CorruptEntryError
from kcache.remote.breaker import DOWN, LACKING, REFUSED, Breaker
from kcache.remote.manifests import merged
from kcache.remote.seal import DAMAGED, OTHER_KEY, SealError
from kcache.remote.store import (
    Leases,
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteStore,
    RemoteTimeout,
    RemoteTooLong,
    Several,
    open_store,
)
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kcache.remote.address import Address
    from kcache.remote.counts import Counts
    from kcache.remote.seal import Sealer

__all__ = ["SEAL_ROOM", "Tier"]

#: Bytes that a seal adds at most.
SEAL_ROOM = 4096
#: Most characters of an error that are shown.
_MOST_TEXT = 500
#: A question that takes this many seconds longer than its time-outs counts as hanging: a name
#: server or a client of a protocol does not return. It is this long because a loaded machine is
#: slow.
_GRACE = 1.0
#: Seconds without uploads after a remote has refused one. Rights to write change rarely. A replica
#: of a Redis refuses, too, until it becomes the primary.
READ_ONLY_PAUSE = 600.0


class Tier:
    """One remote. Its failures raise no exception here; they are counted and logged.

    If this machine lacks something that the remote needs (a package, a file of keys), a question
    checks again after a second, so that it notices the repair.

    Threads: safe to share; the store is made once, by the first thread that needs it.

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
        make: Callable[[Address], RemoteStore] = open_store,
    ) -> None:
        self.address = address
        self.counts = counts
        self.breaker = Breaker(address.slow)
        self._make_sealer = make_sealer
        self._make = make
        self._store: RemoteStore | None = None
        self._opening = threading.Lock()
        self._read_only_until = 0.0
        self._said_too_long = False
        #: Thread -> time since which it waits for an answer.
        self._waiting: dict[int, float] = {}

    # -- questions -------------------------------------------------------------------------------

    def get(self, *keys: str) -> tuple[int, bytes] | None:
        """Return the index of the first key that has a value, and its envelope with a good seal.

        All keys count as one question. They are asked for together if the protocol can do this.
        """
        if self._is_left_alone():
            self.counts.add("skipped")
            return None
        started = self._waiting[threading.get_ident()] = time.monotonic()
        try:
            found = self._first(keys)
        except RemoteTooLong as error:  # a machine that takes more has stored it
            log.debug("%s: a value is not used: %s", self.address, error)
            found = None
        except Exception as error:
            self._count_failure("get", error)
            return None
        finally:
            del self._waiting[threading.get_ident()]
        self.counts.add("misses" if found is None else "hits")
        self.breaker.succeeded(time.monotonic() - started, hit=found is not None)
        return found

    def _first(self, keys: Sequence[str]) -> tuple[int, bytes] | None:
        store, limit = self._opened(), self.address.max_entry + SEAL_ROOM
        values = (
            store.get_several(keys, limit)
            if len(keys) > 1 and isinstance(store, Several)
            else (store.get(key, limit) for key in keys)
        )
        for which, sealed in enumerate(values):
            if sealed is not None:
                self.counts.add("bytes_in", len(sealed))
                value = self._unsealed(keys[which], sealed)
                if value is not None:
                    return which, value
        return None

    def put(self, key: str, value: bytes) -> bool:
        """Store an envelope; tell whether it is stored."""
        if len(value) > self.address.max_entry:
            self.counts.add("dropped")
            return False
        return self._write(lambda store, sealed: store.put(key, sealed), key, value)

    def merge(self, key: str, value: bytes) -> bool:
        """Merge the manifest in an envelope into the stored one; tell whether that succeeded."""

        def change(old: bytes | None) -> bytes | None:
            known = None if old is None else self._unsealed(key, old)
            return self._merged(key, known, value)

        if len(value) > self.address.max_entry:
            self.counts.add("dropped")
            return False
        limit = self.address.max_entry + SEAL_ROOM
        return self._write(lambda store, _: store.merge(key, change, limit), key, value)

    def _merged(self, key: str, known: bytes | None, value: bytes) -> bytes | None:
        """Return the sealed manifest of both, or None if the old one has all of the new one."""
        if known is None:
            return self._sealer.seal(key, value)
        producer = producer_of(value)
        try:
            both = merged(
                decode(known, key, producer=producer),
                decode(value, key, producer=producer),
                self.address.max_entry,
            )
        except CorruptEntryError:
            return self._sealer.seal(key, value)
        return (
            None if both is None else self._sealer.seal(key, encode(key, both, producer=producer))
        )

    def _write(self, write: Callable[[RemoteStore, bytes], object], key: str, value: bytes) -> bool:
        if not self.address.writable:
            return False
        if self._is_left_alone() or time.monotonic() < self._read_only_until:
            self.counts.add("dropped")
            return False
        started = time.monotonic()
        try:
            store = self._opened()
            if not self._sealer.can_seal:
                return False
            sealed = self._sealer.seal(key, value)
            write(store, sealed)
        except RemoteReadOnly as error:  # it may let us read, so we go on to ask it
            self._read_only_until = time.monotonic() + READ_ONLY_PAUSE
            self.counts.add("refused")
            self.counts.add("dropped")
            log.warning(
                "%s: kcache stores nothing there for a while: %s", self.address, _told(error)[0]
            )
            return False
        except RemoteTooLong as error:  # for the server, or what is there, which others use
            level = log.debug if self._said_too_long else log.warning
            level("%s: some values are not stored: %s", self.address, _told(error)[0])
            self._said_too_long = True
            self.counts.add("dropped")
            return False
        except Exception as error:
            self._count_failure("put", error)
            self.counts.add("dropped")
            return False
        self.counts.add("uploads")
        self.counts.add("bytes_out", len(sealed))
        self.breaker.succeeded(time.monotonic() - started, hit=True)
        return True

    # -- leases ----------------------------------------------------------------------------------

    @property
    def leases(self) -> bool:
        """Whether compiles are done under a lease of this remote."""
        return self.address.kind == "redis" and self.address.flag("leases")

    def lease(self, key: str, token: str, seconds: float) -> bool | None:
        """Take a lease; return whether it was free, or None if that can't be known."""
        return self._ask_lease(lambda store: store.lease(key, token, seconds))

    def renew(self, key: str, token: str, seconds: float) -> bool | None:
        """Extend a lease; tell whether the token still had it, or None likewise."""
        return self._ask_lease(lambda store: store.renew(key, token, seconds))

    def release(self, key: str, token: str) -> None:
        """Release a lease."""

        def give_back(store: Leases) -> bool:
            store.release(key, token)
            return True

        self._ask_lease(give_back)

    def _ask_lease(self, ask: Callable[[Leases], bool]) -> bool | None:
        if self._is_left_alone():
            return None
        try:
            store = self._opened()
            return ask(store) if isinstance(store, Leases) else None
        except Exception as error:
            self._count_failure("lease", error)
            return None

    # -- the store and its failures ----------------------------------------------------------------

    @property
    def _sealer(self) -> Sealer:
        """The sealer. Raises ConfigError."""
        return self._make_sealer()

    def _opened(self) -> RemoteStore:
        """Return the remote's client, if the keys can be read, too: without, nothing is trusted.

        Raises:
            ConfigError: this machine lacks something for it.
        """
        with self._opening:
            if self._store is None:
                self._make_sealer()
                self._store = self._make(self.address)
            return self._store

    def _reopen(self) -> None:
        """Make a new client, because the files with its credentials may have changed."""
        with self._opening:
            store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):
                store.close()

    def _unsealed(self, key: str, sealed: bytes) -> bytes | None:
        """Return the envelope if its seal is right; otherwise count and log it, and return None."""
        try:
            return self._sealer.unseal(key, sealed)
        except SealError as error:
            damaged = error.reason in (DAMAGED, OTHER_KEY)
            self.counts.add("damaged" if damaged else "unsigned")
            log.warning("%s: %s is not used: %s", self.address, key, error)
            return None

    def _count_failure(self, operation: str, error: Exception) -> None:
        text, cause = _told(error)
        down = "timeouts" if isinstance(error, RemoteTimeout) else "errors"
        self.counts.add(down if cause == DOWN else "refused")
        self.breaker.failed(f"{operation}: {text}", cause)
        if not isinstance(error, (RemoteError, ConfigError)):
            log.warning("%s: %s failed: %r", self.address, operation, error)
        else:
            log.debug("%s: %s failed: %s", self.address, operation, text)

    def _is_left_alone(self) -> bool:
        """Tell whether the breaker is open; if its pause is over, start a probe without waiting.

        It checks at once whether this machine still lacks something. While a question hangs in
        spite of the time-outs, it lets no other one through.
        """
        if not self.breaker.is_open:
            return bool(self._waiting) and self._hangs()
        if self.breaker.begin_probe():
            if self.breaker.cause == LACKING:
                self._look_again()
                return self.breaker.is_open
            try:
                threading.Thread(target=self._probe, daemon=True).start()
            except RuntimeError as error:  # the machine has no more threads
                self.breaker.end_probe(str(error))
        return True

    def _hangs(self) -> bool:
        limit = self.address.connect_timeout + self.address.timeout + _GRACE
        return time.monotonic() - min([*self._waiting.values()], default=math.inf) > limit

    def _look_again(self) -> None:
        """Check whether this machine still lacks something, without asking the remote."""
        try:
            self._opened()
        except Exception as error:
            self.breaker.end_probe(*_told(error))
        else:
            self.breaker.end_probe("")

    def _probe(self) -> None:
        """Ask for a key that can't exist."""
        started = time.monotonic()
        failure, cause = "", DOWN
        if self.breaker.cause == REFUSED:
            self._reopen()
        try:
            self._opened().get(secrets.token_hex(32), self.address.max_entry)
        except Exception as error:
            failure, cause = _told(error)
        else:
            seconds = time.monotonic() - started
            if self.breaker.is_slow(seconds):
                failure = f"a miss took {seconds:.2f} s"
        self.breaker.end_probe(failure, cause)

    def as_dict(self) -> dict[str, object]:
        """Return the status of this remote."""
        state = "open" if self.breaker.is_open else "closed"
        counts: Mapping[str, int] = self.counts.as_dict()
        return {
            "address": self.address.redacted(),
            "writable": self.address.writable,
            "breaker": state,
            "reason": self.breaker.reason,
            **counts,
        }

    def close(self) -> None:
        """Close the connections."""
        if self._store is not None:
            self._store.close()


def _told(error: Exception) -> tuple[str, str]:
    """Return why a remote could not be asked, in plain text, and the cause.

    The text may come from a server, so characters that could control a terminal are replaced.
    """
    text = "".join(char if char.isprintable() else "?" for char in str(error)[:_MOST_TEXT])
    text = text or type(error).__name__
    if isinstance(error, ConfigError):
        return text, LACKING
    return text, REFUSED if isinstance(error, RemoteRefused) else DOWN
