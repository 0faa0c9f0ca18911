"""RemoteTier: gets kernels from remotes, and uploads compiled kernels, through the daemon."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kcache.entry import Entry, encode
from kcache.errors import ConfigError
from kcache.kernels.lookup import Lookup, SharedTier, Tiers, find_in
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.remote.daemon_client import Lease
from kcache.remote.daemon_protocol import Upload
from kcache.remote.storage import RemoteError

if TYPE_CHECKING:
    from kcache.nvrtc.request import Request
    from kcache.remote.daemon_client import DaemonClient

#: Seconds between two lookups while another machine compiles. The pause grows from the first value
#: to the second.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
#: Seconds that a program waits at its end for uploads. A nearby server takes milliseconds.
PARTING = 0.2


class RemoteTier:
    """Looks up kernels in remotes before a compile, and uploads compiled kernels.

    After any failure, the kernel is compiled.

    Threads: safe to share. Fork: as `DaemonClient`.

    Args:
        tiers: of the cache; keep the kernels that are found, and count hits.
        client: of the daemon; `close` closes it.
        wait: seconds to wait at most while another machine has the lease.
    """

    def __init__(self, tiers: Tiers, client: DaemonClient, *, wait: float) -> None:
        self._engine = tiers.engine
        self._tiers = tiers
        self.client = client
        self._tier = SharedTier(tiers.local, client, "remote")
        self._writes = client.writable and not tiers.engine.read_only
        self._wait = wait
        self._has_put = False

    def lookup(self, request: Request) -> Lookup | None:
        """Return what the remotes have for a request; None if one of them did not answer."""
        try:
            found = find_in(self._tier, request)
        except RemoteError:  # its reason was logged
            self._engine.counters.add("remote_errors")
            return None
        except OSError as error:
            self._engine.report("remote", error)
            return None
        if found.kernel is None:
            self._engine.counters.add("remote_misses")
        return found

    @contextmanager
    def found_or_leased(self, request: Request) -> Generator[tuple[Lookup | None, Lease | None]]:
        """Yield the kernel of a remote, counted as a hit; otherwise a lease if remotes grant them.

        With a lease, this is the only machine that compiles the request. If another machine has the
        lease, this waits for its kernel. After a timeout, or without leases, both are None, and the
        request is compiled. The lease is released at the end of the block, unless it was uploaded
        with the kernel.
        """
        found, lease = self._counted(request), None
        try:
            if found is None and self.client.leases and self._writes:
                found, lease = self._wait_for_lease(request)
            yield found, lease
        finally:
            if lease is not None and not lease.ended:
                self.client.release(lease)

    def _counted(self, request: Request) -> Lookup | None:
        """Look up a request; return the result if it has a kernel, counted as a hit, else None."""
        started = time.perf_counter()
        found = self.lookup(request)
        if found is None or self._tiers.hit(request, started, found=found) is None:
            return None
        return found

    def _wait_for_lease(self, request: Request) -> tuple[Lookup | None, Lease | None]:
        deadline = time.monotonic() + self._wait
        pause = FIRST_PAUSE
        while True:
            lease = self.client.lease(request.key)
            if lease is False:
                return None, None
            if lease is True:
                if time.monotonic() >= deadline:
                    self._engine.counters.add("wait_timeouts")
                    return None, None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            # Another machine may have uploaded the kernel since the lookup before this.
            found = self._counted(request)
            if isinstance(lease, Lease):
                if found is None:
                    return None, lease
                self.client.release(lease)
            if found is not None:
                return found, None

    def upload(
        self,
        request: Request,
        dependency_set: DependencySet | None,
        key: str,
        entry: Entry,
        lease: Lease | None,
    ) -> None:
        """Send a compiled kernel to every writable remote, without waiting for the end of that.

        If the circuits of all remotes are open, nothing is sent.

        Args:
            request: the request.
            dependency_set: leads to the kernel; None if the source reads no file.
            key: of the kernel.
            entry: of the kernel.
            lease: of the compile, which the upload releases; None without one.
        """
        if not self._writes or not self.client.worth_asking:
            return
        try:
            kernel = self._enveloped(key, entry)
            manifest = None
            if dependency_set is not None:  # without this machine's stamps of files
                only = Manifest([DependencySet(dependency_set.raw)])
                manifest = self._enveloped(request.key, only.to_entry())
        except ConfigError as error:
            self._engine.report("upload", error)
            return
        held = None if lease is None else (lease.key, lease.token)
        self._has_put = True
        if self.client.put(Upload(kernel, manifest, held), lease):
            self._engine.counters.add("remote_puts")

    def _enveloped(self, key: str, entry: Entry) -> tuple[str, bytes]:
        return key, encode(key, entry, producer=self._engine.producer.encode())

    def close(self) -> None:
        """Disconnect; the daemon finishes the uploads. Idempotent.

        This waits for the uploads for up to `PARTING` seconds, so that a short program still gets
        their results.
        """
        if self._has_put:
            self._has_put = False
            self.client.flush(PARTING)
        self.client.close()
