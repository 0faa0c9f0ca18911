"""Messages: what a program asks a worker, and what the worker answers, as lists of byte strings.

A field is a value in JSON, with bytes in hexadecimal, or bytes that may be large.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kcache.nvrtc.artifact import Artifact
from kcache.nvrtc.workers.slots import Slots
from kcache.util.wire import WireError

#: The field of a worker's message that the compile begins now. A message without fields is a
#: heartbeat.
BEGUN = b"begun"


class Status:
    """The kind of a worker's answer, in the first field of its reply."""

    COMPILED = "compiled"
    REFUSED = "refused"
    #: The compiler got other variables before: ask a new worker.
    ELSEWHERE = "elsewhere"
    #: The result depends on the poisoned clock: ask again, for the true clock.
    POISONED = "poisoned"
    FAILED = "failed"


def _field(value: object) -> bytes:
    return json.dumps(value, default=_plain).encode()


def _plain(value: bytes | Mapping[str, object]) -> object:
    """Return a value for JSON in place of one that it can't hold."""
    return value.hex() if isinstance(value, bytes) else dict(value)


@contextmanager
def _checked(what: str) -> Generator[None]:
    """Raise WireError for whatever is wrong with the fields of a message."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as problem:
        raise WireError(f"{what} makes no sense") from problem


class Hello(NamedTuple):
    """A worker's message after it has loaded the library; `error` if it could not.

    Attributes:
        identity: of the library as it is in memory.
        version: (major, minor).
        archs: architecture numbers that it knows.
    """

    identity: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    error: str = ""

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        return [_field(self)]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Hello:
        """Return the message in the fields; raises WireError."""
        with _checked("the worker's greeting"):
            (field,) = fields
            identity, (major, minor), archs, error = json.loads(field)
            return cls(identity, (major, minor), tuple(archs), error)


class Ask(NamedTuple):
    """One compile to do.

    Attributes:
        source, source_name, flags, names, headers: as NVRTC takes them.
        directory: the working directory.
        environment: variables that differ from those the worker was started with; None for one that
            is not set.
        clock: hexadecimal digits. If there are any, the compiler gets a poisoned clock with these
            digits; see `recorder.POISON`. Otherwise it gets the true one.
        sought: lists of words to look for in everything that the compiler reads.
        slots: they bound the compiles of all processes together; None if nothing does.
    """

    source: str
    source_name: str
    flags: Sequence[str]
    names: Sequence[str]
    headers: Mapping[str, str]
    directory: str
    environment: Mapping[str, str | None]
    clock: str = ""
    sought: Sequence[Sequence[str]] = ()
    slots: Slots | None = None

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        return [_field(self)]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Ask:
        """Return the message in the fields; raises WireError."""
        with _checked("the request"):
            (field,) = fields
            *values, slots = json.loads(field)
            return cls._make((*values, slots and Slots(*slots)))


class FileAnswer(NamedTuple):
    """The answer to the compiler about one path; see `told.PathAnswer`."""

    kind: str
    error: int
    stamp: tuple[int, int, int, int, int]
    digest: bytes

    @property
    def opened(self) -> bool:
        """Whether the file was read; otherwise its digest is empty."""
        return bool(self.digest)

    @property
    def denied(self) -> bool:
        """Whether stat or open of the path failed for another reason than absence."""
        return self.kind == "e" or (self.kind not in "-a" and self.error != 0)


class Trace(NamedTuple):
    """What one compile asked the operating system.

    Attributes:
        files: path as asked -> answer.
        variables: name -> value of environment variables, None for one that is not set.
        unfollowed: what can't be recorded, in words; empty if there is nothing.
        found: positions in `Ask.sought` of the lists whose words all occur in what the compiler
            has read.
    """

    files: Mapping[str, FileAnswer]
    variables: Mapping[str, str | None]
    unfollowed: str
    found: Sequence[int]

    @classmethod
    def unpack(cls, field: bytes) -> Trace:
        """Return the trace in a field; raises what is wrong with it."""
        files, *others = json.loads(field)
        answers = {
            path: FileAnswer(kind, error, tuple(stamp), bytes.fromhex(digest))
            for path, (kind, error, stamp, digest) in files.items()
        }
        return cls._make((answers, *others))


class Reply(NamedTuple):
    """A worker's answer to an `Ask`.

    Attributes:
        status: one of `Status`.
        artifact: what the compile produced.
        peak: most bytes of memory that the worker has taken so far.
        code: NVRTC's error code of a refusal.
        doing: what the compiler refused to do; empty for the compile itself.
        text: the error in words, of a refusal or a failure.
        trace: what the compile asked.
    """

    status: str
    artifact: Artifact = Artifact()
    peak: int = 0
    code: int = 0
    doing: str = ""
    text: str = ""
    trace: Trace | None = None

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        artifact = self.artifact
        about = (self.status, self.peak, self.code, self.doing, self.text)
        large = (artifact.ptx, artifact.cubin, artifact.ltoir, artifact.raw_log)
        return [
            _field((*about, artifact.lowered_names, artifact.seconds)),
            *(each or b"" for each in large),
            b"" if self.trace is None else _field(self.trace),
        ]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Reply:
        """Return the message in the fields; raises WireError."""
        with _checked("the worker's reply"):
            head, *outputs, raw_log, trace = fields
            status, peak, code, doing, text, lowered_names, seconds = json.loads(head)
            ptx, cubin, ltoir = (output or None for output in outputs)
            artifact = Artifact(ptx, cubin, ltoir, lowered_names, raw_log or None, seconds)
            asked = Trace.unpack(trace) if trace else None
            return cls(status, artifact, peak, code, doing, text, asked)
