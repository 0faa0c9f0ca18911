"""RemoteKernels: gets kernels from remotes, and sends compiled ones there, by the agent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kcache.engine.single_flight import Made
from kcache.entry import Entry, encode, open_envelope
from kcache.errors import ConfigError, CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.kernels.find import Checked
from kcache.kernels.resolver import Answer
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
from kcache.remote.client import Lease
from kcache.remote.protocol import Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kcache.kernels.find import Finder
    from kcache.nvrtc.request import Request
    from kcache.remote.client import Client

__all__ = ["RemoteKernels"]

#: Seconds between two looks while another machine compiles. The pause grows from the first value to
#: the second.
FIRST_LOOK, LAST_LOOK = 0.02, 0.5


class RemoteKernels:
    """Asks remotes before a compile, and sends them compiled kernels.

    An entry from a remote is checked like every entry, and headers are compared here, so a remote
    can only offer kernels. If anything fails, the kernel is compiled.

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
        self._writes = writes and client.writable
        self._wait = wait

    @property
    def nothing_until(self) -> float:
        """Time of `time.perf_counter` until which asking is useless."""
        return self._client.nothing_until

    # -- finding ---------------------------------------------------------------------------------

    def find(self, request: Request, started: float) -> Made[Answer] | None:
        """Return the kernel of a request from a remote, kept here and counted as a hit, or None."""
        client = self._client
        if not client.worth_asking:
            return None
        failures = client.failures
        counters = self._finder.engine.counters
        try:
            found = self._find(request)
        except OSError as error:
            self._finder.engine.report("remote", error)
            found = None
        if client.failures != failures:
            counters.add("remote_errors")
        elif found is None:
            counters.add("remote_misses")
        if found is None:
            return None
        kernel = found.value.kernel
        saved = self._finder.counts.saved(kernel.key, kernel.compile_seconds)
        counters.hit(saved, time.perf_counter() - started, False)
        counters.add("remote_hits")
        return found

    def _find(self, request: Request) -> Made[Answer] | None:
        if request.self_contained:
            keys = (request.key, request.named_key) if request.named_key else (request.key,)
            return self._kernel(keys, (), None)
        for manifest, keep in self._manifests(request.key):
            digests = self._finder.headers.digests
            header_set = manifest.matching(request.search, digests, request.location)
            if header_set is None:
                continue
            key = header_set.result_key(request.key)
            paths = header_set.dependencies(request.search, request.location)
            found = self._kernel((key,), paths, header_set)
            if found is not None:
                kept = keep and self._keep_manifest(request, manifest, header_set)
                self._finder.headers.note(request, Checked(key, paths))
                return found._replace(stored=found.stored and kept)
        return None

    def _entries(self, *keys: str) -> Iterator[tuple[str, Entry, bool]]:
        """Yield the remotes' entries under some keys in order, and whether to keep each.

        Each remote yields the entry under the first of the keys that it has.
        """
        addresses = self._client.addresses
        first = 0
        while first < len(addresses):
            found = self._client.get(*keys, first=first)
            if found is None or found.value is None or not first <= found.tier < len(addresses):
                return
            first, key = found.tier + 1, keys[found.which]
            try:
                producer = self._finder.engine.producer.encode()
                entry = open_envelope(found.value, key, producer)
                entry.payload  # noqa: B018  is all of it sound?
            except CorruptEntryError as error:
                self._finder.engine.refuse(key, error)
            else:
                yield key, entry, addresses[found.tier].keep

    def _manifests(self, key: str) -> Iterator[tuple[Manifest, bool]]:
        for _, entry, keep in self._entries(key):
            try:
                manifest = Manifest.from_entry(entry)
            except CorruptEntryError as error:
                self._finder.engine.refuse(key, error)
            else:  # another machine's notes about its own files say nothing about files here
                yield (
                    Manifest(
                        [StoredHeaderSet(header_set.raw) for header_set in manifest.header_sets]
                    ),
                    keep,
                )

    def _kernel(
        self, keys: Sequence[str], dependencies: tuple[str, ...], header_set: StoredHeaderSet | None
    ) -> Made[Answer] | None:
        engine = self._finder.engine
        for key, entry, keep in self._entries(*keys):
            try:
                kernel = _with_code(CompiledKernel.from_entry(entry, key, dependencies))
            except CorruptEntryError as error:
                engine.refuse(key, error)
                continue
            entry.view = kernel
            kept = keep and engine.put(key, entry)
            if not kept and engine.memory.max_size:
                engine.memory.put(key, entry, entry.size)
            return Made(Answer(kernel, header_set), reusable=True, stored=kept)
        return None

    def _keep_manifest(
        self, request: Request, manifest: Manifest, holding: StoredHeaderSet
    ) -> bool:
        """Merge the header sets into those of the local cache, the one that holds first."""
        headers = self._finder.headers
        here, _ = headers.manifest(request, again=True)
        known = [] if here is None else list(here.header_sets)
        present = {header_set.raw for header_set in known}
        others = [v for v in manifest.header_sets if v.raw not in present and v is not holding]
        both = Manifest([*known, *others])
        holding.remember(request.search, headers.digests, request.location)
        both.add(holding)
        return headers.put(request, both)

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
        """Send a compiled kernel to every writable remote; return before that is done."""
        if not self._writes:
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
        counters, failures = self._finder.engine.counters, self._client.failures
        if not self._client.put(upload, lease):
            if self._client.failures != failures:
                counters.add("remote_errors")
        elif upload.kernel is not None:
            counters.add("remote_puts")

    def _portable(self, request: Request, header_set: StoredHeaderSet) -> tuple[str, bytes]:
        """Return the key and the envelope of a header set, without this machine's file stamps."""
        only = Manifest([StoredHeaderSet(header_set.raw)]).to_entry()
        producer = self._finder.engine.producer.encode()
        return request.key, encode(request.key, only, producer=producer)

    def close(self) -> None:
        """Disconnect; the agent goes on with the uploads. Idempotent."""
        self._client.close()


def _with_code(kernel: CompiledKernel) -> CompiledKernel:
    """Return a kernel that contains code.

    Raises:
        CorruptEntryError: it has none: the entry holds something else.
    """
    if kernel.ptx is None and kernel.cubin is None and kernel.ltoir is None:
        raise CorruptEntryError("the entry holds no kernel")
    return kernel
