"""Handler: answers starts of nvcc, in the daemon of `kcache run`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kcache.daemons.sockets import DONE, NO
from kcache.errors import CompileError, MissError
from kcache.nvcc.artifact import fields, read
from kcache.nvcc.recording import Recording, RefusedError
from kcache.nvcc.request import STREAMS, TERMINAL, Start
from kcache.nvrtc.artifact import Artifact
from kcache.nvrtc.compiler import Compiled
from kcache.nvrtc.manifest import DependencySet
from kcache.nvrtc.places import LENGTH, NESTED, SHOWN, WITHIN, questions
from kcache.util.wire import WireError

if TYPE_CHECKING:
    from kcache.daemons.daemon_server import Client
    from kcache.kernel_cache import KernelCache
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.request import Request

#: The first field of the message that a client sends after a compile.
MADE = b"nvcc-made"
#: The answer's reason if nvcc itself failed. The user has already seen nvcc's output.
FAILED = b"nvcc failed"


class NotStoredError(Exception):
    """Nothing may be written to the cache, so the client does not have to record the compile."""


class NvccHandler:
    """Answers starts of nvcc from a cache.

    Threads: may be called from several threads at the same time.

    Args:
        cache: the cache.
        recorder: path of the library that nvcc's tools preload to be recorded.
    """

    def __init__(self, cache: KernelCache, recorder: str) -> None:
        self._cache = cache
        self._recorder = recorder

    def answer(self, question: Sequence[bytes], client: Client) -> Sequence[bytes]:
        """Return the answer to a client that was started in place of nvcc.

        On a miss, this tells the client to compile, waits for the message that the client sends
        after the compile, and returns the answer to that message.

        Args:
            question: the fields of the question, without its kind and the client's standing (user,
                root directory and mount namespace).
            client: the connection to the client.

        Raises:
            WireError, OSError: either the question is malformed, or the client has exited.
        """

        def compiles(start: Start, digests: FileDigests) -> tuple[Compiled, DependencySet | None]:
            if self._cache.config.disable.value or self._cache.engine.read_only:
                raise NotStoredError
            return self._compiled(start, client, digests)

        start = Start.of(question)._replace(compiles=compiles)
        try:
            request = start.request
            self._cache._requests.note(request)
            kernel = self._cache._answer(request, time.perf_counter())
        except NotStoredError:
            return [NO, b"nothing may be stored"]
        except MissError as error:  # a subclass of CompileError
            return [DONE, b"refused", f"kcache: {error}\n".encode(errors="replace")]
        except CompileError:
            return [NO, FAILED]
        if not kernel.cached:
            return [DONE]
        return [DONE, b"hit", *fields(kernel.files, start.roots)]

    def _compiled(
        self, start: Start, client: Client, digests: FileDigests
    ) -> tuple[Compiled, DependencySet | None]:
        """Make the client compile; return the result, and what the result depends on."""
        roots = b"".join(os.fsencode(path) + b"\0" for path in start.roots.directories)
        began = time.perf_counter()
        preloaded = [self._recorder, *filter(None, [start.environment.get("LD_PRELOAD")])]
        client.answer([DONE, b"compile", os.fsencode(":".join(preloaded)), roots])
        artifact, dependency_set, problem = Artifact(), None, ""
        try:
            made = client.next()
        except (WireError, OSError, ValueError) as end:
            raise CompileError("nvcc failed or was killed") from end
        try:
            kind, reason, out, error, raw = made
            seconds = time.perf_counter() - began
            client.waits_since = time.monotonic()
            if kind != MADE:
                raise WireError("the client did not send a recording")
            if reason:
                raise RefusedError(reason.decode())
            recording = Recording(start, raw)
            recording.bound |= self._cache.config.relocation.value == "off"
            artifact, dependency_set = _stored(start, (out, error), recording, seconds, digests)
        except (WireError, OSError, ValueError, RefusedError) as refusal:
            problem = str(refusal)
        return Compiled(artifact, "", (), None, problem), dependency_set


def _stored(
    start: Start,
    texts: Sequence[bytes],
    recording: Recording,
    seconds: float,
    digests: FileDigests,
) -> tuple[Artifact, DependencySet]:
    """Return what a compile made, and the dependency set under which it can be stored.

    Raises:
        RefusedError, OSError, ValueError: the result must not be stored.
    """
    if start.terminal and any(texts):
        raise RefusedError("nvcc wrote text to a terminal")
    if not (recording.outputs or any(texts)):
        raise RefusedError("nvcc wrote nothing")
    made = read(start.roots, recording.outputs, texts, has_lines=recording.has_lines)
    prefixes = start.roots.prefixes
    shown = recording.shown | made.shown
    # A path in an output may come from a source text, which is the same at every location. So if a
    # source text contains the path of a root, the root must have the same path at every location.
    if made.numbered:
        spelled = {root: os.fsencode(start.roots.directories[root - 1]) for root in made.numbered}
        shown |= {
            root for text in recording.texts() for root, path in spelled.items() if path in text
        }
    if recording.bound or made.may_hide:
        shown |= set(range(1, len(prefixes)))
    if any(texts):
        needed = STREAMS if start.one_stream or all(texts) else (TERMINAL,)
        recording.variables.update(needed)
    conditions = [f"{SHOWN} {root} {prefixes[root]}" for root in sorted(shown)]
    conditions += _within(start.request, recording)
    conditions += (f"{LENGTH} {root} {prefixes[root]}" for root in sorted(made.placed))
    answers = recording.answers(digests)._replace(
        conditions=conditions, home=start.request.location
    )
    found = DependencySet(answers.encode())
    if not found.holds(start.request, digests):
        difference = next(found.differences(start.request, digests, []), ("", "something"))
        raise RefusedError(f"{difference[1]} changed during the compile")
    return Artifact(seconds=seconds, files=tuple(made.files)), found


def _within(request: Request, recording: Recording) -> Iterator[str]:
    """Yield a condition for each root below which a text may name a file; see `nvrtc.places`."""
    asked = {name: words for name, words in questions(request).items() if name.startswith(WITHIN)}
    missing = {os.fsencode(word) for words in asked.values() for word in words}
    for text in recording.texts():
        missing = {word for word in missing if word not in text}
        if not missing:
            break
    for condition, words in asked.items():
        if missing.isdisjoint(map(os.fsencode, words)):
            yield condition.replace(WITHIN, NESTED, 1)
