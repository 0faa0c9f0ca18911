"""RemoteDaemon: asks remotes, for all programs of a user that have the same configuration.

The daemon exits after the last program has disconnected. It first continues pending uploads, for up
to a minute.
"""

from __future__ import annotations

import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from operator import methodcaller

from kcache.daemons.daemon_server import LINGER, Client, limit
from kcache.daemons.sockets import DONE
from kcache.remote import daemon_protocol as protocol
from kcache.remote.daemon_protocol import GetReply, Setup, Upload, key_in
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.signing import make_sealer
from kcache.remote.storage import RemoteError
from kcache.util.wire import WireError, number_in

#: The key and the token of a lease.
Lease = tuple[str, bytes]
#: A lease is renewed this many times in the time after which it would expire, so that a late
#: renewal does no harm.
RENEWALS = 6
#: The limit in bytes of the daemon's memory, to which the size of a few of the largest entries is
#: added. Mapped files do not count. The queues and values of a large job need only a part of this.
#: The limit holds even if a client library reads an answer without an end into memory.
MEMORY = 1 << 30
#: The largest number of uploads that may be pending for one remote, and their largest total size in
#: bytes. Further uploads are dropped. A run of CUTLASS examples makes some hundred kernels of up to
#: 10 MB.
MAX_WAITING = 1024
MAX_BYTES = 256 << 20
#: The number of threads that upload to one remote at the same time, so that their waits overlap.
THREADS = 4
#: The size in bytes of a thread's stack. A small one is enough because no code here recurses. All
#: of it counts towards `MEMORY`.
_STACK = 512 << 10


def make(packed_setup: bytes, _group: int, stderr_fd: int) -> RemoteDaemon:
    """Return the handlers of the daemon with the setup in `packed_setup`; see `daemon_server.main`.

    The descriptor `stderr_fd` is closed, because programs get warnings with the daemon's answers.
    """
    os.close(stderr_fd)
    os.chdir("/")
    setup = Setup.unpack(packed_setup)
    limit_memory(MEMORY + 4 * max(address.max_entry for address in setup.addresses))
    sealer = partial(make_sealer, setup.settings.get("signing_key_file"))
    return RemoteDaemon([GuardedStorage(address, sealer) for address in setup.addresses])


def limit_memory(most: int) -> None:
    """Limit this process's memory to `most` bytes; disable core dumps, which hold credentials."""
    threading.stack_size(_STACK)
    limit(resource.RLIMIT_DATA, most)
    limit(resource.RLIMIT_CORE, 0)


class RemoteDaemon:
    """Looks up kernels in remotes, uploads kernels, and renews leases, for all programs.

    Threads: Several threads may use one object. The object starts threads of its own for uploads
    and for the renewal of leases.

    Args:
        remotes: the remotes, in the order in which they are asked.
    """

    patient = False

    def __init__(self, remotes: Sequence[GuardedStorage]) -> None:
        self._remotes = remotes
        self._queues = [UploadQueue(remote, self._release) for remote in remotes]
        self._lock = threading.Lock()
        #: Maps each connected program to its process group, and each process group to the remotes
        #: that the group was warned about.
        self._groups: dict[Client, int] = {}
        self._warned: dict[int, set[GuardedStorage]] = {}
        #: Maps each lease to the program that holds it, or to None while the kernel that was
        #: compiled under the lease is being uploaded.
        self._leases: dict[Lease, Client | None] = {}
        self._leasing = next((n for n, each in enumerate(remotes) if each.address.leases), None)
        self._closed = threading.Event()
        if self._leasing is not None:
            threading.Thread(
                target=self._renew, args=(remotes[self._leasing],), daemon=True
            ).start()

    def answer(self, question: Sequence[bytes], client: Client) -> list[bytes]:
        """Return the answer to `question`, which the program `client` has sent.

        Raises:
            WireError: the question is malformed, or there is no question of its kind.
        """
        if len(question) < 2:
            raise WireError(f"expected a question of 2 or more fields, got {len(question)}")
        kind, group, *arguments = question
        if client not in self._groups:
            with self._lock:
                self._groups[client] = number_in(group)
        result = self._result(kind, arguments, client)
        return [DONE, "\n".join(self._warnings(self._groups[client])).encode(), *result]

    def _result(self, kind: bytes, arguments: Sequence[bytes], client: Client) -> list[bytes]:
        match kind, len(arguments):
            case protocol.GET, count if 2 <= count <= 1 + protocol.MOST_KEYS:
                return self._get(list(map(key_in, arguments[1:])), number_in(arguments[0])).pack()
            case protocol.PUT, _:
                self._put(Upload.unpack(arguments))
                return []
            case protocol.LEASE, 1:
                return self._lease(key_in(arguments[0]), client)
            case protocol.RELEASE, 2:
                self._release((key_in(arguments[0]), arguments[1]))
                return []
            case protocol.FLUSH, 1:
                return [b"%d" % self.flush(number_in(arguments[0]) / 1000)]
            case _:
                raise WireError(f"unknown question {kind[:20]!r} with {len(arguments)} arguments")

    def leave(self, client: Client) -> None:
        """Forget the program `client`, which has disconnected, and release its leases."""
        with self._lock:
            group = self._groups.pop(client, 0)
            if group not in self._groups.values():
                self._warned.pop(group, None)
            leases = [lease for lease, holder in list(self._leases.items()) if holder is client]
        for lease in leases:
            self._release(lease)

    @property
    def pending(self) -> int:
        """The number of uploads that are queued or in progress."""
        return sum(queue.pending for queue in self._queues)

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until the pending uploads end; return whether all have ended."""
        deadline = time.monotonic() + seconds
        return all(each.flush(max(0.0, deadline - time.monotonic())) for each in self._queues)

    def close(self) -> None:
        """Wait for pending uploads up to `LINGER` seconds, release all leases, and disconnect.

        Uploads that have not begun by then are dropped.
        """
        self.flush(LINGER)
        self._closed.set()
        for queue in self._queues:
            queue.close()
        for lease in list(self._leases):
            self._release(lease)
        for remote in self._remotes:
            remote.close()

    def status(self) -> dict[str, object]:
        """Return the number of pending uploads, and the state and counts of each remote.

        The result contains no credentials.
        """
        remotes = [remote.as_dict() for remote in self._remotes]
        return {"pending": self.pending, "remotes": remotes}

    def _warnings(self, group: int) -> list[str]:
        """Return a warning for each failing remote that the process group was not warned about.

        A process group is warned once about each remote, as long as one of its programs is
        connected.
        """
        with self._lock:
            warned = self._warned.setdefault(group, set())
            new = {each: each.trouble for each in self._remotes if each not in warned}
            warned.update(filter(new.get, new))
        return list(filter(None, new.values()))

    # -- kernels -----------------------------------------------------------------------------------

    def _get(self, keys: Sequence[str], first: int) -> GetReply:
        """Return the reply with the first entry that a remote has under one of `keys`, if any.

        The remotes are asked in order, beginning with index `first`. A remote that does not answer
        is counted and skipped.
        """
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
                return GetReply(value, index, 0.0, which, unanswered)
        pause = min((remote.wait for remote in self._remotes), default=0.0)
        return GetReply(None, len(self._remotes), pause, 0, unanswered)

    def _keep_above(self, index: int, key: str, value: bytes) -> None:
        """Queue uploads of an entry of the remote at `index` to the writable remotes before it.

        This happens only if the address of the remote at `index` has `keep`. A manifest is merged
        into the one that a remote has. A kernel is stored only in a remote that does not have it.
        """
        if self._remotes[index].address.keep:
            for remote, queue in zip(self._remotes[:index], self._queues, strict=False):
                if remote.address.writable:
                    queue.add(Upload(None, (key, value)))

    # -- leases and uploads ------------------------------------------------------------------------

    def _put(self, upload: Upload) -> None:
        """Queue `upload` for every writable remote.

        Its lease is released at the end of the upload to the remote that grants leases, or at once
        if that remote is not writable.
        """
        with self._lock:
            if upload.lease in self._leases:
                self._leases[upload.lease] = None
        leased = False
        for index, remote in enumerate(self._remotes):
            if remote.address.writable:
                mine = index == self._leasing
                self._queues[index].add(upload if mine else upload._replace(lease=None))
                leased |= mine
        if not leased:
            self._release(upload.lease)

    def _lease(self, key: str, client: Client) -> list[bytes]:
        """Try to acquire the lease of `key` for the program `client`, and return the answer.

        The answer is `taken` and a token, `busy` if another program holds the lease, or `none` if
        no remote grants leases or the remote that does so can't be asked.
        """
        if self._leasing is None:
            return [b"none"]
        remote = self._remotes[self._leasing]
        token = secrets.token_hex(32).encode()
        seconds = remote.address.lease_seconds
        acquired = remote.ask_leases(methodcaller("lease", key, token, seconds))
        if not acquired:
            return [b"none" if acquired is None else b"busy"]
        with self._lock:
            self._leases[key, token] = client
        return [b"taken", token]

    def _release(self, lease: Lease | None) -> None:
        if lease is None or self._leasing is None:
            return
        with self._lock:
            holder = self._leases.pop(lease, False)
        if holder is not False:
            self._remotes[self._leasing].ask_leases(methodcaller("release", *lease))

    def _renew(self, remote: GuardedStorage) -> None:
        """Renew the leases of all programs at `remote` until this object is closed.

        A lease that has expired, because it was renewed too late, is forgotten.
        """
        seconds = remote.address.lease_seconds
        while not self._closed.wait(seconds / RENEWALS):
            for key, token in list(self._leases):
                if remote.ask_leases(methodcaller("renew", key, token, seconds)) is False:
                    # At worst, another program also compiles the kernel.
                    self._leases.pop((key, token), None)


class UploadQueue:
    """A queue of uploads to one remote.

    Threads: Several threads may use one object. It uploads in up to `THREADS` threads of its own.

    Args:
        remote: the remote to which the entries are uploaded.
        release: a function that is called with the lease of each upload (None if it has none) when
            the upload has succeeded, failed or been dropped.
    """

    def __init__(self, remote: GuardedStorage, release: Callable[[Lease | None], object]) -> None:
        self._remote = remote
        self._release = release
        self._pool = ThreadPoolExecutor(THREADS)
        self._adding = threading.Lock()
        #: Maps each pending upload to its size in bytes.
        self._sizes: dict[Future[None], int] = {}

    @property
    def pending(self) -> int:
        """The number of uploads that are queued or in progress."""
        return len(self._sizes)

    def add(self, upload: Upload) -> None:
        """Queue `upload`.

        If the queue is full or no thread can start, the upload is dropped and counted.
        """
        with self._adding, suppress(RuntimeError):  # no thread can start
            size = upload.size + sum(list(self._sizes.values()))
            if self.pending < MAX_WAITING and size <= MAX_BYTES:
                future = self._pool.submit(self._upload, upload)
                self._sizes[future] = upload.size
                future.add_done_callback(self._sizes.pop)
                return
        self._remote.counts.add("dropped")
        self._release(upload.lease)

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until the pending uploads end; return whether all have ended."""
        return not wait(list(self._sizes), seconds).not_done

    def close(self) -> None:
        """Drop the uploads that have not begun. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _upload(self, upload: Upload) -> None:
        """Store the kernel and then the manifest of `upload`, and release its lease.

        If the kernel can't be stored, the manifest is not stored, because a manifest must not lead
        to a missing kernel.
        """
        try:
            there = upload.kernel is None or self._remote.put(*upload.kernel)
            if there and upload.manifest is not None:
                self._remote.merge(*upload.manifest)
        finally:
            self._release(upload.lease)
