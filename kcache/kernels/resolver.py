"""Resolver: from a request to a kernel, found in the cache, or compiled once and stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kcache.engine.journal import REJECTED, UNCACHEABLE
from kcache.engine.stats import NOTES
from kcache.entry import Entry
from kcache.errors import CompileError, ConfigError, CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc.workers import PROCESS_ID
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kcache.engine.engine import CacheEngine
    from kcache.engine.single_flight import Busy, Flight, Made, Work
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.frontend import Frontend, Outcome
    from kcache.nvrtc.manifest import Manifest, Variant
    from kcache.nvrtc.request import Request

__all__ = ["Answer", "Resolver", "Ways"]

#: A manifest that was decoded takes this many times its size in memory (measured by
#: bench/bench_memory_tier.py), which the memory tier charges for it.
_VIEW_FACTOR = 4
#: Requests whose headers were checked are remembered up to this many, for `header_check="once"`.
_MAX_CHECKED = 4096
#: Kernels are remembered as had up to this many.
_MAX_HAD = 65_536


class _Checked(NamedTuple):
    """The result of a header check: where the kernel is, and the headers it was made from."""

    key: str
    dependencies: tuple[str, ...]


class Answer(NamedTuple):
    """A kernel, and the header set that it was compiled with if it was compiled just now."""

    kernel: CompiledKernel
    variant: Variant | None = None


class Ways(NamedTuple):
    """How a resolver gets at what it needs; each is called when it is first needed.

    Attributes:
        frontend: makes the compiler's frontend.
        flight: makes the single flight.
        for_compiler: returns the request for the compiler that has run, by its identity.
    """

    frontend: Callable[[FileDigests], Frontend]
    flight: Callable[[], Flight[Answer]]
    for_compiler: Callable[[Request, str], Request]


class Resolver:
    """Answers requests from an engine, and fills it through a frontend.

    Threads: safe to share.

    Args:
        engine: where kernels and manifests live.
        ways: to the compiler.
        check_once: check the headers of a request once per process, not on every request.
        reads: whether `get` and `attempt` look into the cache before they compile, and wait for
            others who compile the same.
        writes: whether what was compiled is stored, and misses are counted.
    """

    def __init__(
        self, engine: CacheEngine, ways: Ways, *, check_once: bool, reads: bool, writes: bool
    ) -> None:
        self._engine = engine
        self._ways = ways
        self._check_once = check_once
        self.reads = reads
        self._writes = writes
        self._flight: Flight[Answer] | None = None
        self._checked: dict[tuple[str, str], _Checked] = {}
        #: Kernels that this process has had already, compiled or from the cache.
        self._had: set[str] = set()
        self._digests: FileDigests | None = None
        self._frontend: Frontend | None = None

    def get(self, request: Request, started: float) -> CompiledKernel:
        """Return the kernel, cached or compiled; wait if somebody else compiles it.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        if request.self_contained and self.reads:  # as `look`, without its calls
            kernel = self._load(request.key, (), started, again=False)
        else:
            kernel = self.look(request, started)
        if kernel is not None:
            return kernel
        if not self.reads or request.uncacheable() is not None:
            return self.make(request).value.kernel
        with _Compile(self, request) as compile_:
            return self._flights().run(request.key, compile_.work()).kernel

    def attempt(self, request: Request, busy: Busy | None = None) -> Answer | Busy:
        """Return the answer, or `Busy` if somebody else compiles it; see `Flight.attempt`.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        if not self.reads or request.uncacheable() is not None:
            return self.make(request).value
        with _Compile(self, request) as compile_:
            return self._flights().attempt(request.key, compile_.work(), busy)

    def look(self, request: Request, started: float) -> CompiledKernel | None:
        """Return the cached kernel, counted as a hit, or None, not counted, if it may be read."""
        return self.find(request, started) if self.reads else None

    def find(
        self, request: Request, started: float, *, again: bool = False
    ) -> CompiledKernel | None:
        """Return the cached kernel, counted as a hit, or None, not counted.

        `started` is the `time.perf_counter` value at which the request came. With `again`, what is
        stale or damaged is not counted: it was, a moment ago.
        """
        if request.self_contained:
            return self._load(request.key, (), started, again=again)
        if self._check_once:
            checked = self._checked.get((request.key, request.location))
            if checked is not None:
                return self._load(checked.key, checked.dependencies, started, again=again)
        return self._find_checked(request, started, again=again)

    def checked(self, request: Request) -> str:
        """Return the key of the kernel whose headers need no second look; empty if they do."""
        known = self._checked.get((request.key, request.location)) if self._check_once else None
        return "" if known is None or request.self_contained else known.key

    def count_miss(self, amount: int = 1) -> None:
        """Count a request that the cache could not answer."""
        if self._writes:
            self._engine.counters.add("misses", amount)

    def count_joined(self, kernel: CompiledKernel | None, count: int, *, waited: bool) -> None:
        """Count requests that one answer was for; one of them was counted already.

        `kernel` is None if it was an error; `waited` tells whether somebody compiled meanwhile.
        """
        counters = self._engine.counters
        if waited and kernel is not None:
            counters.add("coalesced", count)
        for _ in range(count - 1):
            if kernel is not None and kernel.cached:
                counters.hit(self._saving(kernel.key, kernel.compile_seconds), 0.0, True)
            else:
                self.count_miss()

    def forget(self) -> None:
        """Forget which headers were checked."""
        self._checked.clear()

    def close(self) -> None:
        """Let go of the lock file. Idempotent."""
        if self._flight is not None:
            self._flight.close()

    # -- compiling -----------------------------------------------------------------------------

    def make(self, request: Request) -> Made[Answer]:
        """Compile a request, counted as a miss, and store the outcome if that is right.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        from kcache.engine.single_flight import Made

        started = time.perf_counter()
        counters = self._engine.counters
        self.count_miss()
        if self._writes and log.debugging():
            self._say_why(request)
        outcome = self._front().compile(request, track=self._writes)
        compiled = outcome.compiled
        request = self._ways.for_compiler(request, outcome.identity)
        with counters.lock:
            counters.compiles += 1
            counters.compile_seconds += compiled.seconds
            counters.uncacheable += self._writes and outcome.uncacheable is not None
        if outcome.uncacheable is not None:
            if self._writes:
                log.debug("%s is not cached: %s", request.source_name, outcome.uncacheable)
                self._engine.journal.note(UNCACHEABLE, request.key, outcome.uncacheable)
            kernel = CompiledKernel.of(compiled, request.key, ())
            return Made(Answer(kernel), reusable=False, stored=False)
        proven = self._proven(request, outcome) if self._writes else None
        if proven is not None:
            outcome = outcome._replace(variant=proven)
        answer, stored = self._store(request, outcome)
        if proven is not None and self.reads:
            # The cached kernel is good for this location: what was compiled just now is the proof.
            # It took the time of a compile, so no time is saved.
            self.count_miss(-1)
            counters.hit(0.0, time.perf_counter() - started, False)
            answer = Answer(answer.kernel.replace(cached=True), proven)
        return Made(answer, reusable=True, stored=stored)

    def _say_why(self, request: Request) -> None:
        """Log why a request is compiled, as far as that is found out quickly."""
        from kcache.admin.explain import explain

        aside = () if self.reads else (("recache", "the cache is not looked into"),)
        digests = self._known_digests()
        try:
            told = explain(self._engine, request, set_aside=aside, compare=False, digests=digests)
        except Exception as error:  # a line in a log must not cost a kernel
            log.debug("why %s is compiled can't be told: %s", request.source_name, error)
        else:
            log.debug("%s is compiled: %s", request.source_name, told.clauses)

    def share(self, request: Request, answer: Answer) -> Answer | None:
        """Return what another thread has compiled meanwhile, if it is good for this request, too.

        It is no good if a header was edited after that compile had read it.
        """
        kernel, variant = answer
        if variant is not None:
            if not variant.holds(request.search, self._known_digests(), request.location):
                return None
            if not variant.good_at(request.location) or (
                variant.result_key(request.key) != kernel.key
            ):
                return None
            paths = variant.dependencies(request.search, request.location)
            kernel = kernel.replace(dependencies=paths)
        elif not request.self_contained:
            return None
        self._engine.counters.hit(self._saving(kernel.key, kernel.compile_seconds), 0.0, True)
        return Answer(kernel.replace(cached=True))

    # -- finding ---------------------------------------------------------------------------------

    def _load(
        self, key: str, dependencies: tuple[str, ...], started: float, *, again: bool
    ) -> CompiledKernel | None:
        """Return the kernel under `key`, counted as a hit, or None."""
        engine = self._engine
        entry, from_memory = engine.fetch(key, again=again)
        if entry is None:
            return None
        kernel = getattr(entry, "view", None)
        saved = 0.0
        if kernel is None or kernel.dependencies is not dependencies:
            try:
                kernel = CompiledKernel.from_entry(entry, key, dependencies)
            except CorruptEntryError as error:
                if not again:
                    engine.refuse(key, error)
                return None
            entry.view = kernel
            saved = self._saving(key, entry.cost)
        counters = engine.counters
        counters.noted.append((saved, time.perf_counter() - started, from_memory))
        if len(counters.noted) >= NOTES:  # as `Counters.hit`, without the call
            counters.values()
        return kernel

    def _saving(self, key: str, cost: float) -> float:
        """Return the compile time that a kernel saves: all of it, once per process that gets it.

        Without a cache the program would have compiled it once, too.
        """
        if key in self._had:
            return 0.0
        if len(self._had) >= _MAX_HAD:
            self._had.clear()
        self._had.add(key)
        return cost

    def _find_checked(
        self, request: Request, started: float, *, again: bool
    ) -> CompiledKernel | None:
        digests = self._known_digests()
        reads = digests.reads
        manifest, from_memory = self._fetch_manifest(request, again=again)
        if manifest is None:
            return None
        variant = manifest.matching(request.search, digests, request.location)
        if variant is None and from_memory:
            # Another process may have compiled what the headers say now.
            self._engine.memory.delete(request.key)
            manifest, _ = self._fetch_manifest(request, again=again)
            if manifest is not None:
                variant = manifest.matching(request.search, digests, request.location)
        if variant is None or manifest is None:
            if not again:
                self._engine.counters.add("stale")
            return None
        dependencies = variant.dependencies(request.search, request.location)
        key = variant.result_key(request.key)
        kernel = self._load(key, dependencies, started, again=again)
        if kernel is not None:
            if self._check_once:
                self._note_checked(request, _Checked(key, dependencies))
            if digests.reads != reads and variant.remember(
                request.search, digests, request.location
            ):
                self._engine.put(request.key, _with_view(manifest))
        return kernel

    def _fetch_manifest(
        self, request: Request, *, again: bool = False
    ) -> tuple[Manifest | None, bool]:
        """Return (manifest or None, whether it came from memory)."""
        entry, from_memory = self._engine.fetch(request.key, again=again)
        manifest = None if entry is None else self._manifest(request.key, entry, again=again)
        return manifest, from_memory

    def _manifest(self, key: str, entry: Entry, *, again: bool) -> Manifest | None:
        from kcache.nvrtc.manifest import Manifest

        manifest = getattr(entry, "view", None)
        if manifest is None:
            try:
                manifest = Manifest.from_entry(entry)
            except CorruptEntryError as error:
                if not again:
                    self._engine.refuse(key, error)
                return None
            entry.view = manifest
            if self._engine.memory.max_size:
                self._engine.memory.put(key, entry, _VIEW_FACTOR * entry.size)
        return manifest

    def _note_checked(self, request: Request, checked: _Checked) -> None:
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[request.key, request.location] = checked

    # -- storing ---------------------------------------------------------------------------------

    def _store(self, request: Request, outcome: Outcome) -> tuple[Answer, bool]:
        """Store what was compiled; return it, and whether it will be found."""
        from kcache.nvrtc.metadata import metadata_of

        key = request.key
        dependencies: tuple[str, ...] = ()
        variant = outcome.variant
        if variant is not None:
            key = variant.result_key(request.key)
            dependencies = variant.dependencies(request.search, request.location)
        kernel = CompiledKernel.of(outcome.compiled, key, dependencies)
        self._saving(key, 0.0)
        stored = False
        rejected = self._engine.counters.rejected
        try:
            entry = kernel.to_entry(metadata_of(request, key))
            # The kernel first: a manifest must not promise what is not there.
            stored = self._engine.put(key, entry)
            if stored and variant is not None:
                stored = self._store_manifest(request, variant)
        except (ConfigError, OSError) as error:
            self._engine.report("store", error)
        if not stored and key != request.key and self._engine.counters.rejected > rejected:
            self._engine.journal.note(REJECTED, request.key)  # by which it is asked for again
        return Answer(kernel, variant), stored

    def _proven(self, request: Request, outcome: Outcome) -> Variant | None:
        """Return the variant of a compile, good for every location, if that is proven now.

        It is where the same answers led to the same bytes under other paths before.
        """
        variant = outcome.variant
        if variant is None or not variant.may_be_good_elsewhere:
            return None
        manifest, _ = self._fetch_manifest(request, again=True)
        other = None if manifest is None else manifest.bound_elsewhere(variant)
        if other is None:
            return None
        entry, _ = self._engine.fetch(other.result_key(request.key), again=True)
        if entry is None or not _equal(entry, outcome.compiled):
            return None
        return variant.unbound()

    def _store_manifest(self, request: Request, variant: Variant) -> bool:
        """Put a header set first in the request's manifest; tell whether it will be found."""
        from kcache.nvrtc.manifest import Manifest

        variant.remember(request.search, self._known_digests(), request.location)
        # From the backend, to take along what another process has added.
        self._engine.memory.delete(request.key)
        manifest, _ = self._fetch_manifest(request, again=True)
        merged = Manifest(list(manifest.variants) if manifest is not None else [])
        merged.add(variant)
        stored = self._engine.put(request.key, _with_view(merged))
        if self._check_once:
            key = variant.result_key(request.key)
            paths = variant.dependencies(request.search, request.location)
            self._note_checked(request, _Checked(key, paths))
        return stored

    # -- made when needed --------------------------------------------------------------------------

    def _known_digests(self) -> FileDigests:
        if self._digests is None:
            from kcache.nvrtc.files import FileDigests

            self._digests = FileDigests()
        return self._digests

    def _front(self) -> Frontend:
        if self._frontend is None:
            self._frontend = self._ways.frontend(self._known_digests())
        return self._frontend

    def _flights(self) -> Flight[Answer]:
        if self._flight is None:
            with self._engine.counters.lock:
                if self._flight is None:
                    self._flight = self._ways.flight()
        return self._flight


class _Compile:
    """One request on its way through the flight; counts the miss if it leads nowhere."""

    def __init__(self, resolver: Resolver, request: Request) -> None:
        self._resolver = resolver
        self._request = request
        self._made = False

    def work(self) -> Work[Answer]:
        from kcache.engine.single_flight import Work

        request = self._request
        return Work(
            self._look,
            self._make,
            self._share,
            timeless=request.self_contained,
            place=request.location,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The leader's miss is counted where it compiles; here that of a thread which waited for it.
        if kind is not None and issubclass(kind, CompileError) and not self._made:
            self._resolver.count_miss()

    def _look(self) -> Answer | None:
        kernel = self._resolver.find(self._request, time.perf_counter(), again=True)
        return None if kernel is None else Answer(kernel)

    def _make(self) -> Made[Answer]:
        self._made = True
        return self._resolver.make(self._request)

    def _share(self, answer: Answer) -> Answer | None:
        return self._resolver.share(self._request, answer)


def _equal(entry: Entry, compiled: Compiled) -> bool:
    """Tell whether a stored kernel is what was compiled just now."""
    try:
        stored = CompiledKernel.from_entry(entry, "", ())
    except CorruptEntryError:
        return False
    if (stored.log, dict(stored.lowered_names)) != (compiled.log, dict(compiled.lowered_names)):
        return False
    outputs = zip(
        (stored.ptx, stored.cubin, stored.ltoir),
        (compiled.ptx, compiled.cubin, compiled.ltoir),
        strict=True,
    )
    return all(_normal(one) == _normal(other) for one, other in outputs)


def _normal(output: bytes | None) -> bytes | None:
    """Return an output with names of internal symbols that do not tell the working directory.

    They end in eight digits made of that and of the source's name, and the process id. Nothing
    outside the kernel's module can refer to such a symbol.
    """
    if output is None:
        return None
    import re

    return re.sub(rb"_[0-9a-f]{8}_%d" % PROCESS_ID, b"_00000000_%d" % PROCESS_ID, output)


def _with_view(manifest: Manifest) -> Entry:
    entry = manifest.to_entry()
    entry.view = manifest
    return entry
