"""RemoteDaemon: asks remotes, for all programs of a user that have the same configuration.

It exits after the last program, but continues uploads for a while.
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

#: A key and a token.
Lease = tuple[str, bytes]
#: A lease is renewed this many times before it would end.
RENEWALS = 6
#: The daemon may allocate this many bytes, in addition to a few of the longest values; files that
#: it maps do not count. The queues and values of a large job need a part of that. A server whose
#: answer has no end can't make it allocate more, whatever a client library does.
MEMORY = 1 << 30
#: Most uploads that may be pending for one remote, and most bytes of them; others are dropped. A
#: run of CUTLASS examples makes some hundred kernels of up to 10 MB.
MAX_WAITING = 1024
MAX_BYTES = 256 << 20
#: Simultaneous uploads to one remote, so that their latencies overlap.
THREADS = 4
#: Bytes of a thread's stack, which count in full against `MEMORY`. No code here recurses.
_STACK = 512 << 10


def make(packed_setup: bytes, _group: int, stderr_fd: int) -> RemoteDaemon:
    """Return the handlers of a daemon with a `Setup`; `daemon_server` calls this."""
    os.close(stderr_fd)
    os.chdir("/")
    setup = Setup.unpack(packed_setup)
    limit_memory(MEMORY + 4 * max(address.max_entry for address in setup.addresses))
    sealer = partial(make_sealer, setup.settings.get("signing_key_file"))
    return RemoteDaemon([GuardedStorage(address, sealer) for address in setup.addresses])


def limit_memory(most: int) -> None:
    """Limit the memory of this process, and disable core dumps: these would have credentials."""
    threading.stack_size(_STACK)
    limit(resource.RLIMIT_DATA, most)
    limit(resource.RLIMIT_CORE, 0)


class RemoteDaemon:
    """Looks up kernels in remotes, uploads kernels, and renews leases, for all programs.

    Threads: may share it. Its own threads upload, and renew the leases.

    Args:
        remotes: in the order in which they are asked.
    """

    patient = False

    def __init__(self, remotes: Sequence[GuardedStorage]) -> None:
        self._remotes = remotes
        self._queues = [UploadQueue(remote, self._release) for remote in remotes]
        self._lock = threading.Lock()
        #: Program -> its process group; process group -> the remotes that it was warned about.
        self._groups: dict[Client, int] = {}
        self._warned: dict[int, set[GuardedStorage]] = {}
        #: Lease -> the program that has it; None while the upload under it is pending.
        self._leases: dict[Lease, Client | None] = {}
        self._leasing = next((n for n, each in enumerate(remotes) if each.address.leases), None)
        self._closed = threading.Event()
        if self._leasing is not None:
            threading.Thread(
                target=self._renew, args=(remotes[self._leasing],), daemon=True
            ).start()

    def answer(self, question: Sequence[bytes], client: Client) -> list[bytes]:
        """Return the answer to a program's question.

        Raises:
            WireError: this version does not know the question.
        """
        if len(question) < 2:
            raise WireError(f"expected a question, got {len(question)} fields")
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
        """Forget a program that has disconnected, and release its leases."""
        with self._lock:
            group = self._groups.pop(client, 0)
            if group not in self._groups.values():
                self._warned.pop(group, None)
            leases = [lease for lease, holder in list(self._leases.items()) if holder is client]
        for lease in leases:
            self._release(lease)

    @property
    def pending(self) -> int:
        """How many uploads wait or are under way."""
        return sum(queue.pending for queue in self._queues)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is pending; return whether that happened in time."""
        deadline = time.monotonic() + seconds
        return all(each.flush(max(0.0, deadline - time.monotonic())) for each in self._queues)

    def close(self) -> None:
        """Upload what waits, release all leases and close the connections."""
        self.flush(LINGER)
        self._closed.set()
        for queue in self._queues:
            queue.close()
        for lease in list(self._leases):
            self._release(lease)
        for remote in self._remotes:
            remote.close()

    def status(self) -> dict[str, object]:
        """Return the counts of the remotes, without credentials."""
        remotes = [remote.as_dict() for remote in self._remotes]
        return {"pending": self.pending, "remotes": remotes}

    def _warnings(self, group: int) -> list[str]:
        """Return the problems of remotes that no running program of the group was warned about."""
        with self._lock:
            warned = self._warned.setdefault(group, set())
            new = {each: each.trouble for each in self._remotes if each not in warned}
            warned.update(filter(new.get, new))
        return list(filter(None, new.values()))

    # -- kernels -----------------------------------------------------------------------------------

    def _get(self, keys: Sequence[str], first: int) -> GetReply:
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
                return GetReply(value, index, 0.0, which, unanswered)
        pause = min((remote.wait for remote in self._remotes), default=0.0)
        return GetReply(None, len(self._remotes), pause, 0, unanswered)

    def _keep_above(self, index: int, key: str, value: bytes) -> None:
        """Store an entry of one remote in the remotes that are asked before it.

        A manifest is merged into theirs, and a kernel is stored only if they have none.
        """
        if self._remotes[index].address.keep:
            for remote, queue in zip(self._remotes[:index], self._queues, strict=False):
                if remote.address.writable:
                    queue.add(Upload(None, (key, value)))

    # -- leases and uploads ------------------------------------------------------------------------

    def _put(self, upload: Upload) -> None:
        """Queue an upload for every writable remote; afterwards, its lease is released."""
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
        """Acquire a lease for a program; the answer is `taken` with a token, `busy` or `none`."""
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
        """Renew the leases of programs as long as they and this process run."""
        seconds = remote.address.lease_seconds
        while not self._closed.wait(seconds / RENEWALS):
            for key, token in list(self._leases):
                if remote.ask_leases(methodcaller("renew", key, token, seconds)) is False:
                    # At worst, another program compiles the kernel, too.
                    self._leases.pop((key, token), None)


class UploadQueue:
    """A queue of uploads to one remote.

    Threads: may share it; it has up to `THREADS` threads of its own.

    Args:
        remote: gets the uploads.
        release: called with the lease of each upload at its end, successful or not.
    """

    def __init__(self, remote: GuardedStorage, release: Callable[[Lease | None], object]) -> None:
        self._remote = remote
        self._release = release
        self._pool = ThreadPoolExecutor(THREADS)
        self._adding = threading.Lock()
        #: What waits or is under way, and its bytes.
        self._sizes: dict[Future[None], int] = {}

    @property
    def pending(self) -> int:
        """How many uploads wait or are under way."""
        return len(self._sizes)

    def add(self, upload: Upload) -> None:
        """Queue an upload; drop and count it if the queue is full."""
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
        """Wait until nothing is pending; return whether that happened in time."""
        return not wait(list(self._sizes), seconds).not_done

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _upload(self, upload: Upload) -> None:
        """Put the kernel first, because a manifest must not name a missing kernel."""
        try:
            there = upload.kernel is None or self._remote.put(*upload.kernel)
            if there and upload.manifest is not None:
                self._remote.merge(*upload.manifest)
        finally:
            self._release(upload.lease)
