"""RemoteKernels: gets kernels from remotes, and sends compiled ones there, by the service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kcache.entry import Entry, encode
from kcache.errors import ConfigError
from kcache.kernels.sources import SourceKernels
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
from kcache.remote.daemon_client import Lease
from kcache.remote.daemon_protocol import Upload
from kcache.remote.storage import RemoteError

if TYPE_CHECKING:
    from kcache.kernels.find import Finder
    from kcache.kernels.sources import Found
    from kcache.nvrtc.request import Request
    from kcache.remote.daemon_client import DaemonClient

#: Seconds between two looks while another machine compiles. The pause grows from the first value to
#: the second.
FIRST_LOOK, LAST_LOOK = 0.02, 0.5
#: Seconds that a program waits at its end for uploads. A nearby server takes milliseconds.
PARTING = 0.2


class RemoteKernels:
    """Asks remotes before a compile, and sends them compiled kernels.

    If anything fails, the kernel is compiled.

    Threads: safe to share. Fork: as `DaemonClient`.

    Args:
        finder: of the local cache, which keeps the kernels that are found.
        client: of the service.
        wait: seconds to wait at most for a lease of another machine.
    """

    def __init__(self, finder: Finder, client: DaemonClient, *, wait: float) -> None:
        self._finder = finder
        self.client = client
        self._kernels = SourceKernels(finder, client, "remote_hits")
        self._writes = client.writable and not finder.engine.read_only
        self._wait = wait
        self._has_put = False

    # -- finding ---------------------------------------------------------------------------------

    def find(self, request: Request, started: float, here: Manifest | None) -> Found | None:
        """Return the kernel of a request from a remote, kept here and counted as a hit, or None.

        `here` is the manifest of the local cache.
        """
        counters = self._finder.engine.counters
        found = None
        try:
            found = self._kernels.find(request, started, here)
        except RemoteError:  # its reason was logged
            counters.add("remote_errors")
            return None
        except OSError as error:
            self._finder.engine.report("remote", error)
        if found is None:
            counters.add("remote_misses")
        return found

    # -- compiling -------------------------------------------------------------------------------

    def find_or_lease(
        self, request: Request, here: Manifest | None
    ) -> tuple[Found | None, Lease | None]:
        """Return the kernel from a remote; otherwise the right to compile it as the only machine.

        It waits for the kernel that another machine makes. It returns neither if there are no
        leases, or if the wait was too long; then the request is compiled.
        """
        found = self.find(request, time.perf_counter(), here)
        lease: Lease | bool = self.client.leases and self._writes
        deadline = time.monotonic() + self._wait
        pause = FIRST_LOOK
        while found is None and lease:
            lease = self.client.lease(request.key)
            if lease is True:
                if time.monotonic() >= deadline:
                    self._finder.engine.counters.add("wait_timeouts")
                    return None, None
                time.sleep(pause)
                pause = min(2 * pause, LAST_LOOK)
            # Another machine may have given back the lease between the look and this request.
            found = None if lease is False else self.find(request, time.perf_counter(), here)
            if isinstance(lease, Lease):
                if found is None:
                    return None, lease
                self.release(lease)
        return found, None

    def release(self, lease: Lease) -> None:
        """Give back a lease, unless it went with an upload."""
        if not lease.ended:
            self.client.release(lease)

    def upload(
        self,
        request: Request,
        header_set: StoredHeaderSet | None,
        key: str,
        entry: Entry,
        lease: Lease | None = None,
    ) -> None:
        """Send a compiled kernel to every writable remote; return before that is done.

        If all remotes are left alone, none of them would get it.

        Args:
            request: the request.
            header_set: the answers that its kernel depends on; None if there are no headers.
            key: of the kernel.
            entry: of the kernel.
            lease: the right to compile it.
        """
        if not self._writes or not self.client.worth_asking:
            return
        engine = self._finder.engine
        try:
            kernel = self._enveloped(key, entry)
            manifest = None
            if header_set is not None:  # without this machine's stamps of files
                only = Manifest([StoredHeaderSet(header_set.raw)])
                manifest = self._enveloped(request.key, only.to_entry())
        except ConfigError as error:
            engine.report("upload", error)
            return
        held = None if lease is None else (lease.key, lease.token)
        self._has_put = True
        if self.client.put(Upload(kernel, manifest, held), lease):
            engine.counters.add("remote_puts")

    def _enveloped(self, key: str, entry: Entry) -> tuple[str, bytes]:
        return key, encode(key, entry, producer=self._finder.engine.producer.encode())

    def close(self) -> None:
        """Disconnect; the service goes on with the uploads. Idempotent.

        A short program has not heard how its uploads ended, so it waits a moment for that.
        """
        if self._has_put:
            self._has_put = False
            self.client.flush(PARTING)
        self.client.close()
