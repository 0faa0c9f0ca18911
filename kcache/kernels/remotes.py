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
#: Seconds that a program waits for its uploads when it closes the cache. An upload to a nearby
#: server takes milliseconds.
PARTING = 0.2


class RemoteTier:
    """Looks up kernels in remotes before a compile, and uploads compiled kernels.

    If a remote or the daemon fails, kernels are compiled as if there were no remotes.

    Threads: may be called from several threads at the same time. Fork: a forked child may use it,
    with new connections to the daemon.

    Args:
        tiers: the tiers of the cache, which store kernels that remotes have, and count hits.
        client: the client of the daemon; `close` closes it.
        wait: maximum number of seconds to wait while another machine has the lease.
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
        """Return what the remotes have for a request, or None if the lookup failed.

        The lookup fails if a remote or the daemon did not answer, unless another remote has the
        kernel.
        """
        try:
            found = find_in((self._tier,), request)
        except RemoteError:  # the client has warned about the reason
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
        """Yield a pair: the result of a lookup that found a kernel, and a lease for the compile.

        Each of the two may be None. A kernel is counted as a hit. While this machine has the lease,
        no other machine compiles the request. If another machine has the lease, this method waits
        for that machine's kernel.
        After a timeout, or if the remotes grant no leases, both are None, and the request is to be
        compiled without a lease. The lease is released at the end of the block, unless `upload` has
        passed it to the daemon.
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
        """Look up a request; return the result and count a hit, or return None without a kernel."""
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
            # Another machine may have uploaded the kernel since the previous lookup.
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
        """Queue the upload of a compiled kernel to every writable remote, and return at once.

        If no remote can be asked at present (`DaemonClient.worth_asking`), nothing is uploaded.

        Args:
            request: the request that the kernel was compiled for.
            dependency_set: what the kernel depends on; None if the source reads no file.
            key: the key of the kernel.
            entry: the entry that contains the kernel.
            lease: the lease of the compile, which is released when the upload has ended; None if
                the kernel was compiled without a lease.
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
        """Disconnect from the daemon, which finishes the uploads. Idempotent.

        This method waits for the uploads for up to `PARTING` seconds, so that even a short program
        can warn that an upload has failed.
        """
        if self._has_put:
            self._has_put = False
            self.client.flush(PARTING)
        self.client.close()


# -- by the settings -------------------------------------------------------------------------------


def open_remotes(
    config: Config, warn: Callable[[str], object] = log.warning_once
) -> DaemonClient | None:
    """Return a client of the daemon for the remotes that the settings name.

    The result is None if the settings name no remotes, or disable the cache.
    """
    setup = _setup(config)
    if setup is None or config.disable.value:
        return None
    variables = without_dropin(environment.variables())
    variables.pop("KCACHE_REMOTE", None)  # the daemon gets the addresses through a pipe
    return DaemonClient(setup, lambda: path_of(setup.daemon(), variables), variables, warn=warn)


def report_remotes(
    config: Config, group: int, report: Callable[[str], object]
) -> DaemonClient | None:
    """Try the layers and remotes that the settings name, and report those that can't be used.

    While the returned client is open, the daemon does not warn `group` about these remotes again.

    Args:
        config: the settings.
        group: the process group that the daemon warns once about each remote.
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
    """Return the path of the daemon's socket, or None if the settings name no remotes.

    Raises:
        OSError: there is no folder for the socket.
    """
    setup = _setup(config)
    return None if setup is None else path_of(setup.daemon(), environment.variables())


def remote_status(config: Config) -> list[dict[str, Any]]:
    """Return the status of each remote that the settings name, as the daemon reports it.

    The daemon exits a few seconds after the last program that uses it. This function does not start
    it. If it is not running, each status has only the address of the remote, and `unknown` for the
    state of its breaker.
    """
    running: dict[str, Any] = {}
    with suppress(OSError):
        path = remotes_socket(config)
        running = (path and status(path)) or {}
    found = {str(each["address"]): each for each in running.get("remotes", [])}
    shown = [address.redacted() for address in config.remotes]
    return [found.get(address, {"address": address, "breaker": "unknown"}) for address in shown]


def _setup(config: Config) -> Setup | None:
    """Return the daemon's setup for the remotes that the settings name; None without remotes."""
    if not config.remotes:
        return None
    return Setup(config.remotes, _followed(config), environment.remote_variables())


def _followed(config: Config) -> dict[str, str]:
    """Return the settings that the daemon uses.

    They include the version of the file of signing keys, so that a changed file is used by a new
    daemon.
    """
    path = config.signing_key_file.value
    if path is None:
        return {}
    try:
        found = os.stat(path)
    except OSError:  # the daemon logs the problem
        return {"signing_key_file": path}
    return {"signing_key_file": path, "version": f"{found.st_mtime_ns} {found.st_ino}"}
