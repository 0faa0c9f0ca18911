"""RemoteTier: gets kernels from remotes, and uploads compiled kernels, through the daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kcache import environment
from kcache.daemons.sockets import status
from kcache.daemons.spawn import path_of
from kcache.entry import Entry, encode
from kcache.errors import ConfigError
from kcache.kernels.lookup import Lookup, SharedTier, Tiers, find_in
from kcache.kernels.tiers import open_layers
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.remote.daemon_client import DaemonClient, Lease
from kcache.remote.daemon_protocol import Setup, Upload
from kcache.remote.storage import RemoteError
from kcache.util import log
from kcache.util.child_process import without_dropin

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.nvrtc.request import Request

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
            found = find_in((self._tier,), request)
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
                return found, lease
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


# -- by the settings -------------------------------------------------------------------------------


def open_remotes(
    config: Config, warn: Callable[[str], object] = log.warning_once
) -> DaemonClient | None:
    """Return a client of the daemon for the remotes that the settings name; None if none."""
    setup = _setup(config)
    if setup is None or config.disable.value:
        return None
    variables = without_dropin(environment.variables())
    variables.pop("KCACHE_REMOTE", None)  # the daemon gets the addresses through a pipe
    return DaemonClient(setup, lambda: path_of(setup.daemon(), variables), variables, warn=warn)


def report_remotes(
    config: Config, group: int, report: Callable[[str], object]
) -> DaemonClient | None:
    """Try the layers and remotes that the settings name; report those that can't be used.

    While the returned client is open, no remote is reported to the group again.

    Args:
        config: the settings.
        group: the process group to which each remote is reported once.
        report: called with a sentence for each problem.
    """
    for layer in open_layers(config, report):
        layer.close()
    client = open_remotes(config, report)
    if client is not None:
        client.group = group
        client.get(os.urandom(32).hex())
    return client


def remotes_socket(config: Config) -> str | None:
    """Return the path of the daemon's socket for the remotes of the settings; None if none.

    Raises:
        OSError: there is no folder for the socket.
    """
    setup = _setup(config)
    return None if setup is None else path_of(setup.daemon(), environment.variables())


def remote_status(config: Config) -> list[dict[str, Any]]:
    """Return the daemon's status of each remote that the settings name; start no daemon.

    The daemon ends a few seconds after its last program. Then the status is only the addresses.
    """
    running: dict[str, Any] = {}
    with suppress(OSError):
        path = remotes_socket(config)
        running = (path and status(path)) or {}
    found = {str(each["address"]): each for each in running.get("remotes", [])}
    shown = [address.redacted() for address in config.remotes]
    return [found.get(address, {"address": address, "breaker": "unknown"}) for address in shown]


def _setup(config: Config) -> Setup | None:
    """Return the setup of the daemon for the remotes that the settings name; None if none."""
    if not config.remotes:
        return None
    return Setup(config.remotes, _followed(config), environment.remote_variables())


def _followed(config: Config) -> dict[str, str]:
    """Return the settings that the daemon uses; another file of keys means another daemon."""
    path = config.signing_key_file.value
    if path is None:
        return {}
    try:
        found = os.stat(path)
    except OSError:  # the daemon logs the problem
        return {"signing_key_file": path}
    return {"signing_key_file": path, "version": f"{found.st_mtime_ns} {found.st_ino}"}
