"""Remotes: all remotes of an agent, and their answers to the questions of programs."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from kcache.remote import protocol
from kcache.remote.protocol import Found, ProtocolError, Upload, key_in, number_in, seconds_in
from kcache.remote.remote import Remote
from kcache.remote.remote_client import RemoteError
from kcache.remote.uploads import Uploads

__all__ = ["Remotes", "Session"]

#: A lease is renewed this many times before it would end.
RENEWALS = 6


class Session:
    """What one connection has. It ends with the connection. Threads: for one at a time.

    Attributes:
        leases: key and token of each lease.
        group: the process group of the program; None before the first question.
    """

    __slots__ = ("group", "leases")

    def __init__(self) -> None:
        self.leases: set[tuple[str, str]] = set()
        self.group: int | None = None


class Remotes:
    """Answers questions from remotes, and keeps the leases of programs.

    Threads: safe to share; each session belongs to one of them. Its own threads upload, and renew
    the leases.

    Args:
        remotes: in the order in which they are asked.
        stop: called if a program asks for the end of this process.
    """

    def __init__(self, remotes: Sequence[Remote], stop: Callable[[], object]) -> None:
        self._remotes = remotes
        self._stop = stop
        self._uploads = [Uploads(remote, self._uploaded) for remote in remotes]
        self._lock = threading.Lock()
        #: Process group -> how many connections it has, and the remotes that it was warned of.
        self._members: Counter[int] = Counter()
        self._told: dict[int, set[Remote]] = {}
        #: Lease -> number of uploads that must end before it is released.
        self._leases: dict[tuple[str, str], int] = {}
        self._leasing = next((remote for remote in remotes if remote.leases), None)
        self._closed = threading.Event()
        self._started = time.time()
        if self._leasing is not None:
            threading.Thread(target=self._renew, args=(self._leasing,), daemon=True).start()

    def answer(self, question: Sequence[bytes], session: Session) -> list[bytes]:
        """Return the answer to a question.

        Raises:
            ProtocolError: it does not exist in this version.
        """
        if len(question) < 2:
            raise ProtocolError("no question")
        kind, group, *arguments = question
        if session.group is None:
            session.group = number_in(group)
            with self._lock:
                self._members[session.group] += 1
        result = self._result(bytes(kind), arguments, session)
        return ["\n".join(self._warnings(session.group)).encode(), *result]

    def _result(self, kind: bytes, arguments: Sequence[bytes], session: Session) -> list[bytes]:
        match kind, len(arguments):
            case protocol.GET, count if 2 <= count <= 1 + protocol.MOST_KEYS:
                return self._get(list(map(key_in, arguments[1:])), number_in(arguments[0])).pack()
            case protocol.PUT, _:
                self._put(Upload.unpack(arguments), session)
                return []
            case protocol.LEASE, 1:
                return self._lease(key_in(arguments[0]), session)
            case protocol.RELEASE, 2:
                lease = key_in(arguments[0]), key_in(arguments[1])
                session.leases.discard(lease)
                self._give_back(lease)
                return []
            case protocol.FLUSH, 1:
                return [b"%d" % self.flush(seconds_in(arguments[0]))]
            case protocol.STATS, 0:
                return [json.dumps(self._status()).encode()]
            case protocol.STOP, 0:
                self._stop()
                return []
            case _:
                raise ProtocolError(f"a question {kind[:20]!r}")

    def leave(self, session: Session) -> None:
        """Forget a program that has disconnected, and release its leases."""
        if session.group is not None:
            with self._lock:
                self._members[session.group] -= 1
                if not self._members[session.group]:
                    del self._members[session.group]
                    self._told.pop(session.group, None)
        for lease in session.leases:
            self._give_back(lease)

    @property
    def pending(self) -> int:
        """How many uploads wait or are under way."""
        return sum(uploads.pending for uploads in self._uploads)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is pending; tell whether that happened in time."""
        deadline = time.monotonic() + seconds
        return all(each.flush(max(0.0, deadline - time.monotonic())) for each in self._uploads)

    def close(self) -> None:
        """Drop the uploads that wait, release all leases and close the connections."""
        self._closed.set()
        for uploads in self._uploads:
            uploads.close()
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            self._give_back(lease)
        for remote in self._remotes:
            with suppress(Exception):
                remote.close()

    def _status(self) -> dict[str, object]:
        """Return what the remotes have done, without credentials."""
        return {
            "process": os.getpid(),
            "started": self._started,
            "pending": self.pending,
            "remotes": [remote.as_dict() for remote in self._remotes],
        }

    def _warnings(self, group: int) -> list[str]:
        """Return why remotes are of no use, unless a running program of the group was told."""
        found: list[str] = []
        for remote in self._remotes:
            trouble = remote.trouble
            if trouble:
                with self._lock:
                    told = self._told.setdefault(group, set())
                    if remote not in told:
                        told.add(remote)
                        found.append(trouble)
        return found

    # -- kernels -----------------------------------------------------------------------------------

    def _get(self, keys: Sequence[str], first: int) -> Found:
        """Ask the remotes in order, beginning with index `first`."""
        unanswered = 0
        for index in range(first, len(self._remotes)):
            try:
                found = self._remotes[index].get(*keys)
            except RemoteError:
                unanswered += 1
                continue
            if found is not None:
                which, value = found
                self._keep_above(index, keys[which], value)
                return Found(value, index, 0.0, which, unanswered)
        wait = min((remote.wait for remote in self._remotes), default=0.0)
        return Found(None, len(self._remotes), wait, 0, unanswered)

    def _keep_above(self, index: int, key: str, value: bytes) -> None:
        """Put the entry of a remote to those before it, which are asked first.

        A manifest is merged into theirs, and a kernel is stored where they have none.
        """
        if self._remotes[index].address.keep:
            for above in range(index):
                if self._remotes[above].address.writable:
                    self._uploads[above].add(Upload(None, (key, value)))

    def _put(self, upload: Upload, session: Session) -> None:
        """Queue an upload for every writable remote."""
        writable = [n for n, remote in enumerate(self._remotes) if remote.address.writable]
        if upload.lease is not None:
            session.leases.discard(upload.lease)
            with self._lock:
                if upload.lease in self._leases:
                    self._leases[upload.lease] = len(writable)
            if not writable:
                self._give_back(upload.lease)
        for index in writable:
            self._uploads[index].add(upload)

    def _uploaded(self, upload: Upload) -> None:
        """Release a lease after the last upload under it."""
        if upload.lease is None:
            return
        with self._lock:
            left = self._leases.get(upload.lease, 0) - 1
            if left > 0:
                self._leases[upload.lease] = left
        if left <= 0:
            self._give_back(upload.lease)

    # -- leases ------------------------------------------------------------------------------------

    def _lease(self, key: str, session: Session) -> list[bytes]:
        """Take a lease for a program; the answer has its token, or says `busy` or `none`."""
        remote = self._leasing
        if remote is None:
            return [b"none"]
        token = secrets.token_hex(32)
        seconds = remote.address.lease_seconds
        taken = remote.ask_leases(lambda client: client.lease(key, token, seconds))
        if taken is None:
            return [b"none"]
        if not taken:
            return [b"busy"]
        with self._lock:
            self._leases[key, token] = 0
        session.leases.add((key, token))
        return [b"taken", token.encode()]

    def _give_back(self, lease: tuple[str, str]) -> None:
        with self._lock:
            had = self._leases.pop(lease, None) is not None
        if had and self._leasing is not None:
            self._leasing.ask_leases(lambda client: client.release(*lease))

    def _renew(self, remote: Remote) -> None:
        """Renew the leases of programs while they and this process live."""
        seconds = remote.address.lease_seconds
        while not self._closed.wait(seconds / RENEWALS):
            with self._lock:
                leases = list(self._leases)
            for lease in leases:
                if self._renewed(remote, *lease, seconds) is False:
                    with self._lock:  # lost: at worst, another program compiles the kernel, too
                        self._leases.pop(lease, None)

    def _renewed(self, remote: Remote, key: str, token: str, seconds: float) -> bool | None:
        return remote.ask_leases(lambda client: client.renew(key, token, seconds))
