"""Proofs: prove that a kernel is good in other places than that of its compile.

A kernel is stored for the place of its compile: its directories, and the name of its source. It is
good elsewhere once a second compile in another place (`nvrtc.relocation`) has given the same bytes.
With the setting `relocation="lazy"`, that happens when somebody asks from a second place. With
`"eager"`, it happens in the background after the first compile. Then a user who gets a copy of the
cache need not compile at all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kcache.entry import Entry
from kcache.errors import ConfigError, KcacheError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc.workers.slots import usable_cores
from kcache.util import log
from kcache.util.forks import after_fork

if TYPE_CHECKING:
    from kcache.kernels.find import Finder
    from kcache.nvrtc.frontend import Frontend, Verdict
    from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
    from kcache.nvrtc.request import Request


class Proof(NamedTuple):
    """A stored kernel, its entry, and whether it is good in other places."""

    kernel: CompiledKernel
    entry: Entry
    verdict: Verdict


def prove(
    finder: Finder, frontend: Frontend, request: Request, header_set: StoredHeaderSet | None
) -> Proof | None:
    """Compile a stored kernel once more in another place.

    Returns None if the kernel is gone or was proven, the headers have changed, or the worker
    crashed.

    Args:
        finder: of the cache that the kernel is in.
        frontend: compiles.
        request: a request whose headers are as `header_set` says.
        header_set: the header set that leads to the kernel; None for a self-contained source.
    """
    key = request.key if header_set is None else header_set.result_key(request.key)
    entry, _ = finder.engine.fetch(key, again=True)
    if entry is None or (header_set is None and "proof" in entry.metadata):
        return None
    try:
        kernel = CompiledKernel.from_entry(entry, key, ())
        verdict = frontend.prove(request, header_set, kernel)
    except KcacheError as error:
        log.debug("no proof that %s is good elsewhere: %s", request.source_name, error)
        return None
    finder.engine.counters.add("proofs")
    return None if verdict is None else Proof(kernel, entry, verdict)


def store_verdict(
    finder: Finder,
    request: Request,
    header_set: StoredHeaderSet | None,
    manifest: Manifest | None,
    proof: Proof,
) -> bool:
    """Note whether a kernel is good in other places, and tell it.

    That is in the manifest, or in the entry that was proven, if there are no headers: whatever else
    is stored under its key by now was not proven. The caller holds the key's lock.
    """
    from kcache.nvrtc.manifest import BAD, GOOD, Manifest  # few resolvers prove anything

    _, entry, verdict = proof
    good = verdict.good
    try:
        if header_set is None:
            about = {**entry.metadata, "proof": GOOD if good else BAD}
            finder.engine.put(request.key, Entry(entry.payload, about))
            return good
        merged = Manifest(list(manifest.header_sets) if manifest is not None else [])
        judged = merged.judge(header_set, verdict.header_set)
        good = judged is verdict.header_set
        judged.remember(request)
        finder.headers.put(request, merged)
    except (ConfigError, OSError) as error:
        finder.engine.report("store", error)
    return good


class ProofQueue:
    """Proofs to be made in the background, while nobody else wants a worker.

    Threads: safe to share; it has threads of its own, which end when no proof is left. Processes:
    two may prove the same kernel, which only costs time. Crash and exit: a kernel that is not
    proven by then stays good for its location. Fork: a child begins with none.
    """

    def __init__(self) -> None:
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Begin with none; a child process leaves everything to its parent."""
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._threads = 0
        #: Whether somebody waits for the proofs.
        self._awaited = False

    def add(self, prove: Callable[[], object]) -> None:
        """Add what proves one kernel, and stores the verdict."""
        with self._changed:
            self._waiting.append(prove)
            self._start_threads()

    def finish(self) -> None:
        """Wait until everything is proven. An interrupt abandons what is left."""
        with self._changed:
            self._awaited = True
            self._start_threads()
            try:
                while self._waiting or self._threads:
                    self._changed.wait()
            except BaseException:
                self._waiting.clear()
                raise

    def _start_threads(self) -> None:
        """Start threads for the waiting proofs; they end by themselves.

        As many as half of the cores, so that a request meanwhile finds a worker; as many as all
        of them once somebody waits for the proofs.
        """
        share = 1 if self._awaited else 2
        while self._waiting and self._threads < max(1, usable_cores() // share):
            thread = threading.Thread(target=self._run, name="kcache-proof", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started, or the interpreter is ending
                self._waiting.clear()
                return
            self._threads += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                # At its end, the interpreter ends the workers first: begin no new work.
                over = not threading.main_thread().is_alive()
                if over or not self._waiting:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                prove = self._waiting.popleft()
            try:
                prove()
            except Exception as error:  # nobody waits for it
                log.debug("a kernel is not proven: %r", error)
