"""RemoteDaemon: the service that talks to the remotes of one configuration for a user's programs.

It ends with the last program, but continues uploads for a while.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kcache.remote import daemon_protocol as protocol
from kcache.remote.daemon_protocol import Counts, GetReply, Setup, Upload, key_in
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.signing import Sealer, make_sealer
from kcache.remote.storage import RemoteError
from kcache.remote.upload_queue import UploadQueue
from kcache.service.server import LINGER, limit
from kcache.service.start import DONE
from kcache.util.wire import WireError, number_in

if TYPE_CHECKING:
    from kcache.service.server import Client

#: A lease is renewed this many times before it would end.
RENEWALS = 6
#: Bytes of memory of the service, without files that it maps, beside a few of the longest values.
#: The queues and values of a large job need a part of it. A server whose answer has no end gets no
#: more, whatever a client does.
MEMORY = 1 << 30
#: Bytes of a thread's stack, which count in full. No code here recurses.
_STACK = 512 << 10


def make(told: bytes, _group: int, said: int) -> RemoteDaemon:
    """Return the handlers of a service with a `Setup`; `kcache.service.server` calls this."""
    os.close(said)
    os.chdir("/")
    setup = Setup.unpack(told)
    limit_memory(MEMORY + 4 * max(address.max_entry for address in setup.addresses))

    def sealer() -> Sealer:
        return make_sealer(setup.settings.get("signing_key_file"))

    return RemoteDaemon([GuardedStorage(address, sealer, Counts()) for address in setup.addresses])


def limit_memory(most: int) -> None:
    """Limit the memory of this process; it leaves no core dump, because it knows credentials."""
    if sys.platform == "win32":
        return
    import resource

    threading.stack_size(_STACK)
    limit(resource.RLIMIT_DATA, most)
    limit(resource.RLIMIT_CORE, 0)


class RemoteDaemon:
    """Answers questions from remotes, and keeps the leases of programs.

    Threads: safe to share. Its own threads upload, and renew the leases.

    Args:
        remotes: in the order in which they are asked.
    """

    patient = False

    def __init__(self, remotes: Sequence[GuardedStorage]) -> None:
        self._remotes = remotes
        self._uploads = [UploadQueue(remote, self._uploaded) for remote in remotes]
        self._lock = threading.Lock()
        #: Program -> its process group; and that -> the remotes that it was warned of.
        self._groups: dict[Client, int] = {}
        self._told: dict[int, set[GuardedStorage]] = {}
        #: Lease (key and token) -> the program that has it, or the number of uploads that must end
        #: before it is released.
        self._leases: dict[tuple[str, bytes], Client | int] = {}
        self._leasing = next((each for each in remotes if each.address.leases), None)
        self._closed = threading.Event()
        if self._leasing is not None:
            threading.Thread(target=self._renew, args=(self._leasing,), daemon=True).start()

    def answer(self, question: Sequence[bytes], client: Client) -> list[bytes]:
        """Return the answer to a program's question.

        Raises:
            WireError: it does not exist in this version.
        """
        if len(question) < 2:
            raise WireError("no question")
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
                self._give_back((key_in(arguments[0]), arguments[1]))
                return []
            case protocol.FLUSH, 1:
                return [b"%d" % self.flush(number_in(arguments[0]) / 1000)]
            case _:
                raise WireError(f"a question {kind[:20]!r}")

    def leave(self, client: Client) -> None:
        """Forget a program that has disconnected, and release its leases."""
        with self._lock:
            group = self._groups.pop(client, 0)
            if group not in self._groups.values():
                self._told.pop(group, None)
            leases = [lease for lease, holder in self._leases.items() if holder is client]
        for lease in leases:
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
        """Upload what waits, release all leases and close the connections."""
        self.flush(LINGER)
        self._closed.set()
        for uploads in self._uploads:
            uploads.close()
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            self._give_back(lease)
        for remote in self._remotes:
            remote.close()

    def status(self) -> dict[str, object]:
        """Return what the remotes have done, without credentials."""
        remotes = [remote.as_dict() for remote in self._remotes]
        return {"pending": self.pending, "remotes": remotes}

    def _warnings(self, group: int) -> list[str]:
        """Return why remotes are of no use, unless a running program of the group was told."""
        with self._lock:
            told = self._told.setdefault(group, set())
            new = {each: each.trouble for each in self._remotes if each not in told}
            told.update(filter(new.get, new))
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
        wait = min((remote.wait for remote in self._remotes), default=0.0)
        return GetReply(None, len(self._remotes), wait, 0, unanswered)

    def _keep_above(self, index: int, key: str, value: bytes) -> None:
        """Put the entry of a remote to those before it, which are asked first.

        A manifest is merged into theirs, and a kernel is stored where they have none.
        """
        if self._remotes[index].address.keep:
            for above in range(index):
                if self._remotes[above].address.writable:
                    self._uploads[above].add(Upload(None, (key, value)))

    def _put(self, upload: Upload) -> None:
        """Queue an upload for every writable remote."""
        writable = [n for n, remote in enumerate(self._remotes) if remote.address.writable]
        with self._lock:
            if upload.lease is not None and upload.lease in self._leases:
                self._leases[upload.lease] = 1 + len(writable)
        for index in writable:
            self._uploads[index].add(upload)
        self._uploaded(upload)

    def _uploaded(self, upload: Upload) -> None:
        """Release a lease after the last upload under it."""
        if upload.lease is None:
            return
        with self._lock:
            left = self._leases.get(upload.lease)
            left = left - 1 if isinstance(left, int) else 0
            if left:
                self._leases[upload.lease] = left
        if not left:
            self._give_back(upload.lease)

    # -- leases ------------------------------------------------------------------------------------

    def _lease(self, key: str, client: Client) -> list[bytes]:
        """Take a lease for a program; the answer has its token, or says `busy` or `none`."""
        remote = self._leasing
        if remote is None:
            return [b"none"]
        token = secrets.token_hex(32).encode()
        seconds = remote.address.lease_seconds
        taken = remote.ask_leases(lambda client: client.lease(key, token, seconds))
        if not taken:
            return [b"none" if taken is None else b"busy"]
        with self._lock:
            self._leases[key, token] = client
        return [b"taken", token]

    def _give_back(self, lease: tuple[str, bytes]) -> None:
        with self._lock:
            had = self._leases.pop(lease, None) is not None
        if had and self._leasing is not None:
            self._leasing.ask_leases(lambda client: client.release(*lease))

    def _renew(self, remote: GuardedStorage) -> None:
        """Renew the leases of programs while they and this process live."""
        seconds = remote.address.lease_seconds
        while not self._closed.wait(seconds / RENEWALS):
            with self._lock:
                leases = list(self._leases)
            for lease in leases:
                if self._renewed(remote, *lease, seconds) is False:
                    with self._lock:  # lost: at worst, another program compiles the kernel, too
                        self._leases.pop(lease, None)

    def _renewed(
        self, remote: GuardedStorage, key: str, token: bytes, seconds: float
    ) -> bool | None:
        return remote.ask_leases(lambda client: client.renew(key, token, seconds))
