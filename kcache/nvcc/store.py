"""Store: where artifacts are in the cache; the only module here that knows the engine.

A request's key has a manifest: an entry with its evidence, up to `MAX_SETS` of them, most recent
first. The key of an artifact is made of the request's key and its evidence. The commands know the
two as the manifest and the kernel of a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kcache.entry import JSON, Entry
from kcache.errors import CorruptEntryError
from kcache.nvcc.artifact import Artifact, about
from kcache.nvcc.evidence import Check, Evidence
from kcache.nvrtc.entries import MANIFEST
from kcache.nvrtc.files import NO_STAMP, FileDigests, Stamp, lasting
from kcache.nvrtc.request import digest_fields

if TYPE_CHECKING:
    from kcache.kernel_cache import KernelCache
    from kcache.nvcc.request import Request

T = TypeVar("T")

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

    def lookup(self, request: Request, key: str, *, again: bool = False) -> Artifact | str:
        """Return the artifact of a request, counted as a hit; or why there is none."""
        if not self.reads:
            return "the settings let the cache not be read"
        started = time.perf_counter()
        reason = "no such command was compiled"
        for raw in self._sets(key, again=again):
            try:
                difference = self._check(raw, request).difference(request, self.digests)
                if difference is not None:
                    reason = difference
                    continue
                entry, from_memory = self._fetch(_result_key(key, raw), again=again)
                if entry is None:
                    reason = "the artifact was evicted"
                    continue
                artifact = Artifact.from_entry(entry)
            except (CorruptEntryError, LookupError, OSError, TypeError, ValueError) as error:
                reason = f"an entry that can't be used: {error}"
                continue
            if not artifact.suits(request):
                reason = "its text was written to other streams"
                continue
            seconds = time.perf_counter() - started
            self._engine.counters.hit(artifact.seconds, seconds, from_memory)
            self.remember_tools()
            return artifact
        return reason

    def put(self, request: Request, key: str, evidence: Evidence, artifact: Artifact) -> str:
        """Store an artifact; return why it is not stored, empty if it is."""
        raw = evidence.encode()
        difference = self._check(raw, request).difference(request, self.digests)
        if difference is not None:
            return f"this changed during the compile: {difference}"
        if not self._engine.put(_result_key(key, raw), artifact.to_entry(about(request))):
            return "the cache has no room"
        sets = [raw, *(old for old in self._sets(key, again=True) if old != raw)][:MAX_SETS]
        payload = {f"{_SECTION}{number}": each for number, each in enumerate(sets)}
        stored = self._engine.put(key, Entry(payload, {"kind": MANIFEST}))
        self.remember_tools()
        return "" if stored else "the cache has no room"

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
        entry, _ = self._fetch(_TOOLS_KEY, again=True)
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

    def _fetch(self, key: str, *, again: bool) -> tuple[Entry | None, bool]:
        damaged: list[tuple[str, CorruptEntryError]] = []
        found = self._engine.fetch(key, damaged)
        for problem in () if again else damaged:
            self._engine.refuse(*problem)
        return found

    def _sets(self, key: str, *, again: bool) -> Sequence[bytes]:
        entry, _ = self._fetch(key, again=again)
        payload = {} if entry is None else entry.payload
        return [payload[name] for name in sorted(payload) if name.startswith(_SECTION)]

    def _check(self, raw: bytes, request: Request) -> Check:
        place = raw, request.roots.paths
        check = self._checks.get(place)
        if check is None:
            check = Check(Evidence.decode(raw), request.roots)
            if len(self._checks) >= _MAX_CHECKS:
                self._checks.pop(next(iter(self._checks)), None)
            self._checks[place] = check
        return check


def _result_key(key: str, raw: bytes) -> str:
    return digest_fields("kcache-nvcc-result/1", [("request", key.encode()), ("evidence", raw)])
