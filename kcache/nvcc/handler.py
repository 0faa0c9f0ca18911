"""Handler: answers the clients of nvcc, in the service of `kcache run`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kcache.daemons.sockets import DONE, NO
from kcache.nvcc import artifact
from kcache.nvcc.artifact import Artifact
from kcache.nvcc.recording import Recording, RefusedError
from kcache.nvcc.request import Request
from kcache.nvcc.store import Store
from kcache.util import log
from kcache.util.wire import WireError

if TYPE_CHECKING:
    from kcache.daemons.daemon_server import Client
    from kcache.kernel_cache import KernelCache

#: The first field of a client's questions: for an artifact; and with what nvcc has made.
ASK, MADE = b"nvcc", b"nvcc-made"


class NvccHandler:
    """Answers starts of nvcc from a cache.

    Threads: safe to share.

    Args:
        cache: the cache.
        recorder: path of the recorder's library.
    """

    def __init__(self, cache: KernelCache, recorder: str) -> None:
        self._cache = cache
        self._store = Store(cache)
        self._recorder = os.fsencode(recorder)

    def close(self) -> None:
        """Send what is to be sent to remotes, and disconnect. Idempotent."""
        self._store.close()

    def answer(self, fields: Sequence[bytes], client: Client) -> Sequence[bytes]:
        """Return the answer to a question, which has these fields after `ASK` and the standing.

        On a miss, the client gets the order to compile, and the answer is that to what it then
        sends.

        Raises:
            WireError, OSError: the client sent something else, or has ended.
        """
        request = Request.of(fields)
        title = _title(request)
        key = request.key
        found = self._store.lookup(request, key)
        if isinstance(found, Artifact):
            log.debug("hit: %s", title)
            return _hit(found, request)
        on_miss, source = self._cache.config.on_miss
        if on_miss == "error":
            text = f"kcache: {title} is not in the cache, and {source}=error allows no compile"
            return [DONE, b"refused", f"{text}: {found}\n".encode(errors="replace")]
        log.debug("miss: %s: %s", title, found)
        if not self._store.writes:
            return [NO, b"nothing may be stored"]

        def find() -> Sequence[bytes] | None:
            again = self._store.lookup(request, key, again=True)
            return _hit(again, request) if isinstance(again, Artifact) else None

        def make() -> tuple[Sequence[bytes], bool]:
            problem = self._compile(request, key, client)
            if problem:
                log.debug("not stored: %s: %s", title, problem)
            return [DONE], not problem

        return self._store.alone(key, find, make)

    def _compile(self, request: Request, key: str, client: Client) -> str:
        """Let the client compile, and store the result; return why it is not stored, or nothing."""
        roots = b"".join(os.fsencode(path) + b"\0" for path in request.roots.paths)
        started = time.perf_counter()
        client.answer([DONE, b"compile", self._recorder, roots])
        try:
            kind, problem, out, error, raw = client.next()
        except (WireError, OSError, ValueError):
            return "nvcc failed, or was ended"
        seconds = time.perf_counter() - started
        client.waits_since = time.monotonic()
        if kind != MADE:
            raise WireError("no recording")
        reason = problem.decode() or self._keep(request, key, (out, error), raw, seconds)
        self._store.missed(seconds, problem=reason)
        return reason

    def _keep(
        self, request: Request, key: str, texts: Sequence[bytes], raw: bytes, seconds: float
    ) -> str:
        if request.terminal and any(texts):
            return "it wrote text to a terminal"
        try:
            recording = Recording(request, raw)
            if not recording.outputs:
                return "it wrote no file"
            made, shown = artifact.read(request, recording.outputs, texts, seconds)
            shown |= recording.shown
            if recording.bound:
                shown |= set(range(len(request.roots.paths)))
            evidence = recording.evidence(self._store.digests, shown)
            return self._store.put(request, key, evidence, made)
        except (RefusedError, OSError, ValueError) as error:
            return str(error)


def _hit(found: Artifact, request: Request) -> Sequence[bytes]:
    return [DONE, b"hit", *found.fields(request.roots)]


def _title(request: Request) -> str:
    return " ".join(("nvcc", *request.arguments[1:]))[:200]
