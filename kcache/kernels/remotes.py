"""RemoteKernels: gets kernels from remotes, and sends compiled ones there, by the agent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kcache.engine.single_flight import Made
from kcache.entry import Entry, encode
from kcache.errors import ConfigError
from kcache.kernels.resolver import Answer
from kcache.kernels.sources import SourceKernels
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
from kcache.remote.client import Lease
from kcache.remote.protocol import Upload
from kcache.remote.remote_client import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.kernels.find import Finder
    from kcache.nvrtc.request import Request
    from kcache.remote.client import Client

__all__ = ["RemoteKernels"]

#: Seconds between two looks while another machine compiles. The pause grows from the first value to
#: the second.
FIRST_LOOK, LAST_LOOK = 0.02, 0.5
#: Seconds that a program waits at its end for uploads. A nearby server takes milliseconds.
PARTING = 0.2


class RemoteKernels:
    """Asks remotes before a compile, and sends them compiled kernels.

    If anything fails, the kernel is compiled.

    Threads: safe to share. Fork: as `Client`.

    Args:
        finder: of the local cache, which keeps the kernels that are found.
        client: of the agent.
        writes: whether compiled kernels are uploaded.
        wait: seconds to wait at most for a lease of another machine.
    """

    def __init__(self, finder: Finder, client: Client, *, writes: bool, wait: float) -> None:
        self._finder = finder
        self._client = client
        self._kernels = SourceKernels(finder, client, "remote_hits")
        self._writes = writes and client.writable
        self._wait = wait
        self._has_put = False

    @property
    def nothing_until(self) -> float:
        """Time of `time.perf_counter` until which asking is useless."""
        return self._client.nothing_until

    # -- finding ---------------------------------------------------------------------------------

    def find(self, request: Request, started: float) -> Made[Answer] | None:
        """Return the kernel of a request from a remote, kept here and counted as a hit, or None."""
        counters = self._finder.engine.counters
        try:
            taken = self._kernels.find(request, started)
        except RemoteError:  # its reason was logged
            counters.add("remote_errors")
            return None
        except OSError as error:
            self._finder.engine.report("remote", error)
            taken = None
        if taken is None:
            counters.add("remote_misses")
            return None
        answer = Answer(taken.kernel, taken.header_set)
        return Made(answer, reusable=True, stored=taken.stored)

    # -- compiling -------------------------------------------------------------------------------

    def compute(
        self, request: Request, compile_: Callable[[Lease | None], Made[Answer]]
    ) -> Made[Answer]:
        """Return the kernel from a remote; otherwise compile it as the only machine.

        Raises:
            Whatever `compile_` does.
        """
        found = self.find(request, time.perf_counter())
        lease: Lease | None = None
        if found is None and self._client.leases and self._writes:
            found, lease = self._lease(request)
        if found is not None:
            return found
        try:
            return compile_(lease)
        finally:
            if lease is not None and not lease.ended:
                self._client.release(lease)

    def _lease(self, request: Request) -> tuple[Made[Answer] | None, Lease | None]:
        """Take the lease of a request, or wait for the kernel that another machine makes under it.

        It returns neither if there are no leases, or if the wait was too long; then the request is
        compiled.
        """
        deadline = time.monotonic() + self._wait
        pause = FIRST_LOOK
        while True:
            lease = self._client.lease(request.key)
            if lease is False:
                return None, None
            if isinstance(lease, Lease):
                # Another machine may have given back the lease between the look and this request
                # for it.
                found = self.find(request, time.perf_counter())
                if found is not None:
                    self._client.release(lease)
                return found, None if found is not None else lease
            if time.monotonic() >= deadline:
                self._finder.engine.counters.add("wait_timeouts")
                return None, None
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK)
            found = self.find(request, time.perf_counter())
            if found is not None:
                return found, None

    def upload(
        self,
        request: Request,
        key: str,
        entry: Entry,
        header_set: StoredHeaderSet | None,
        lease: Lease | None,
    ) -> None:
        """Send a compiled kernel to every writable remote; return before that is done.

        If all remotes are left alone, none of them would get it.
        """
        if not self._writes or not self._client.worth_asking:
            return
        producer = self._finder.engine.producer.encode()
        try:
            kernel = key, encode(key, entry, producer=producer)
            manifest = None if header_set is None else self._portable(request, header_set)
        except ConfigError as error:
            self._finder.engine.report("upload", error)
            return
        held = None if lease is None else (lease.key, lease.token)
        self._put(Upload(kernel, manifest, held), lease)

    def upload_proven(self, request: Request, header_set: StoredHeaderSet) -> None:
        """Tell the remotes that a kernel they have is good in every location."""
        if self._writes:
            self._put(Upload(None, self._portable(request, header_set)))

    def _put(self, upload: Upload, lease: Lease | None = None) -> None:
        self._has_put = True
        if self._client.put(upload, lease) and upload.kernel is not None:
            self._finder.engine.counters.add("remote_puts")

    def _portable(self, request: Request, header_set: StoredHeaderSet) -> tuple[str, bytes]:
        """Return the key and the envelope of a header set, without this machine's file stamps."""
        only = Manifest([StoredHeaderSet(header_set.raw)]).to_entry()
        producer = self._finder.engine.producer.encode()
        return request.key, encode(request.key, only, producer=producer)

    def close(self) -> None:
        """Disconnect; the agent goes on with the uploads. Idempotent.

        A short program has not heard how its uploads ended, so it waits a moment for that.
        """
        if self._has_put:
            self._has_put = False
            self._client.flush(PARTING)
        self._client.close()
