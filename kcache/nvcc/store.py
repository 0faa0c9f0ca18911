"""Store: where artifacts are in the cache; the only module here that knows the engine.

A request's key has a manifest: an entry with its evidence, up to `MAX_SETS` of them, most recent
first. The key of an artifact is made of the request's key and its evidence. The commands know the
two as the manifest and the kernel of a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from kcache.entry import JSON, Entry, encode
from kcache.errors import CorruptEntryError
from kcache.kernels.lookup import LocalTier, SharedTier
from kcache.kernels.tiers import open_read_only_tier, open_remotes
from kcache.nvcc.artifact import Artifact, about
from kcache.nvcc.evidence import Check, Evidence
from kcache.nvrtc.entries import MANIFEST
from kcache.nvrtc.files import NO_STAMP, FileDigests, Stamp, lasting
from kcache.nvrtc.request import digest_fields
from kcache.remote.daemon_protocol import Upload
from kcache.remote.storage import RemoteError

if TYPE_CHECKING:
    from kcache.kernel_cache import KernelCache
    from kcache.nvcc.request import Request

T = TypeVar("T")
#: Returns the entries of a tier under a key, and whether each is to be kept in the own cache.
_Entries: TypeAlias = "Callable[[str], Iterable[tuple[Entry, bool]]]"
#: An artifact, its evidence, its entry, and whether it is to be kept.
_Found: TypeAlias = "tuple[Artifact, bytes, Entry, bool]"

#: What the sections of a manifest begin with; those of NVRTC's have other names.
_SECTION = "evidence"
#: How many different answers of the system are kept for one request.
MAX_SETS = 8
#: How many checks are kept in memory: one takes 1 MB.
_MAX_CHECKS = 256
#: Digests of files with at least so many bytes are stored, with the status under which they hold.
_LARGE = 1 << 20
_TOOLS_KEY = digest_fields("kcache-nvcc-tools/1", [])


class Store:
    """Artifacts in a cache.

    Threads: safe to share.

    Args:
        cache: an open cache, whose settings hold.
        clock: see `FileDigests`.

    Attributes:
        digests: of the files that evidence names.
        reads, writes: whether the cache is to be read, and whether anything may be stored.
    """

    def __init__(self, cache: KernelCache, *, clock: Callable[[], int] | None = None) -> None:
        self._engine, config = cache.engine, cache.config
        self.digests = FileDigests(clock)
        self.writes = not (config.disable.value or self._engine.read_only)
        self.reads = not (config.disable.value or config.recache.value)
        self._checks: dict[tuple[bytes, tuple[str, ...]], Check] = {}
        self._reads = 0
        self._load_tools()
        local = LocalTier(self._engine)
        read_only = open_read_only_tier(local, config) if self.reads else None
        self._remotes = open_remotes(config)
        remote = None if self._remotes is None else SharedTier(local, self._remotes, "remote")
        tiers = ("layer_hits", read_only), ("remote_hits", remote if self.reads else None)
        self._shared = [(count, tier) for count, tier in tiers if tier is not None]

    def close(self) -> None:
        """Close the read-only tiers and the remotes. Idempotent."""
        for _, tier in self._shared:
            tier.close()
        if self._remotes is not None:
            self._remotes.close()

    def lookup(self, request: Request, key: str, *, again: bool = False) -> Artifact | str:
        """Return the artifact of a request, counted as a hit; or why there is none.

        With `again`, only the user's own cache is asked.
        """
        if not self.reads:
            return "the settings let the cache not be read"
        started = time.perf_counter()
        found = self._find(request, key, lambda each: self._own(each, again=again))
        for count, tier in () if again else self._shared:
            if isinstance(found, str):
                with suppress(RemoteError, OSError):  # a warning was logged
                    shared = self._find(request, key, partial(tier.entries, damaged=[]))
                    if not isinstance(shared, str):
                        found = shared
                        self._engine.counters.add(count)
        if isinstance(found, str):
            return found
        artifact, raw, entry, keep = found
        if keep:
            self._put(key, raw, entry)
        self._engine.counters.hit(artifact.seconds, time.perf_counter() - started, False)
        self.remember_tools()
        return artifact

    def _find(self, request: Request, key: str, entries: _Entries) -> _Found | str:
        """Return the first artifact in a tier whose evidence holds; or why there is none."""
        reason = "this command has not compiled this source before"
        for manifest, _ in entries(key):
            for raw in _sets_in(manifest):
                try:
                    difference = self._check(raw, request).difference(request, self.digests)
                    if difference is not None:
                        reason = difference
                        continue
                    reason = "the artifact was evicted"
                    for entry, keep in entries(_result_key(key, raw)):
                        artifact = Artifact.from_entry(entry)
                        if artifact.suits(request):
                            return artifact, raw, entry, keep
                        reason = "its text was written to other streams"
                except (CorruptEntryError, LookupError, TypeError, ValueError) as error:
                    reason = f"an entry that can't be used: {error}"
        return reason

    def put(self, request: Request, key: str, evidence: Evidence, artifact: Artifact) -> str:
        """Store an artifact; return why it is not stored, empty if it is."""
        raw = evidence.encode()
        difference = self._check(raw, request).difference(request, self.digests)
        if difference is not None:
            return f"during the compile, {difference}"
        entry = artifact.to_entry(about(request))
        if self._remotes is not None and self._remotes.writable:
            producer = self._engine.producer.encode()
            for each, content in ((_result_key(key, raw), entry), (key, _manifest([raw]))):
                if self._remotes.put(Upload((each, encode(each, content, producer=producer)))):
                    self._engine.counters.add("remote_puts")
        self.remember_tools()
        return "" if self._put(key, raw, entry) else "the cache has no room"

    def _put(self, key: str, raw: bytes, entry: Entry) -> bool:
        """Store an artifact, and then its evidence, so that none is without its artifact."""
        if not self._engine.put(_result_key(key, raw), entry):
            return False
        old = [each for own, _ in self._own(key, again=True) for each in _sets_in(own)]
        sets = [raw, *(each for each in old if each != raw)][:MAX_SETS]
        return bool(self._engine.put(key, _manifest(sets)))

    def missed(self, seconds: float, *, problem: str) -> None:
        """Count a compile."""
        counters = self._engine.counters
        counters.add("misses")
        counters.add("compiles")
        counters.add("compile_seconds", seconds)
        if problem:
            counters.add("uncacheable")

    def alone(
        self, key: str, find: Callable[[], T | None], make: Callable[[], tuple[T, bool]]
    ) -> T:
        """Return what `make` makes, by one thread of one process at a time, or `find` finds.

        `make` also returns whether others will find it.
        """

        def made() -> tuple[T, bool | None]:
            value, is_stored = make()
            return value, is_stored or None

        scope = f"{time.monotonic_ns()}"  # a client's failure is not the others'
        return self._engine.flight.run(key, find, made, lambda _: None, scope=scope)

    # -- tools -------------------------------------------------------------------------------------

    def _load_tools(self) -> None:
        """Take over the digests of the tools: reading them takes longer than all else."""
        entry = next((entry for entry, _ in self._own(_TOOLS_KEY, again=True)), None)
        rows = None if entry is None else entry.metadata.get("tools")
        now = self.digests.clock()
        for row in rows if isinstance(rows, list) else ():
            try:
                path, digest, *numbers = cast("list[Any]", row)
                stamp = cast("Stamp", tuple(map(int, numbers)))
                if len(stamp) == 5 and lasting([path], [stamp]) == [stamp]:
                    self.digests.remember(path, stamp, bytes.fromhex(digest), now)
            except (TypeError, ValueError):  # no version of kcache wrote it
                continue

    def remember_tools(self) -> None:
        """Store the digests of large files, if any file was read."""
        if self._reads == self.digests.reads or not self.writes:
            return
        self._reads = self.digests.reads
        tools = self.digests.large(_LARGE)
        stamps = lasting(tools, [stamp for stamp, _ in tools.values()])
        rows: list[JSON] = [
            [path, digest.hex(), *stamp]
            for (path, (_, digest)), stamp in zip(tools.items(), stamps, strict=True)
            if stamp != NO_STAMP and path.isascii()
        ]
        self._engine.put(_TOOLS_KEY, Entry({}, {"kind": MANIFEST, "tools": rows}))

    # -- inside ------------------------------------------------------------------------------------

    def _own(self, key: str, *, again: bool) -> Iterator[tuple[Entry, bool]]:
        """Yield the entry under a key in the user's own cache, which has not to be kept."""
        damaged: list[tuple[str, CorruptEntryError]] = []
        entry, _ = self._engine.fetch(key, damaged)
        for problem in () if again else damaged:
            self._engine.refuse(*problem)
        if entry is not None:
            yield entry, False

    def _check(self, raw: bytes, request: Request) -> Check:
        place = raw, request.roots.paths
        check = self._checks.get(place)
        if check is None:
            check = Check(Evidence.decode(raw), request.roots)
            if len(self._checks) >= _MAX_CHECKS:
                self._checks.pop(next(iter(self._checks)), None)
            self._checks[place] = check
        return check


def _manifest(sets: Sequence[bytes]) -> Entry:
    payload = {f"{_SECTION}{number}": raw for number, raw in enumerate(sets)}
    return Entry(payload, {"kind": MANIFEST})


def _sets_in(manifest: Entry) -> list[bytes]:
    payload = manifest.payload
    return [payload[name] for name in sorted(payload) if name.startswith(_SECTION)]


def _result_key(key: str, raw: bytes) -> str:
    return digest_fields("kcache-nvcc-result/1", [("request", key.encode()), ("evidence", raw)])
