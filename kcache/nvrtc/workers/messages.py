"""Messages: what a program asks a worker, and what the worker replies, as lists of byte strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from kcache.nvrtc.artifact import Artifact
from kcache.nvrtc.files import PathKind
from kcache.nvrtc.workers.slots import Slots
from kcache.util.wire import WireError

#: The field of a worker's message that the compile begins now. A message without fields is a
#: heartbeat.
BEGUN = b"begun"

_Message = TypeVar("_Message")


class Status:
    """The kind of a worker's answer, in the first field of its reply."""

    COMPILED = "compiled"
    REJECTED = "rejected"
    #: The compiler got other variables before: ask a new worker.
    ELSEWHERE = "elsewhere"
    #: The result depends on the poisoned clock: ask again, for the true clock.
    POISONED = "poisoned"
    FAILED = "failed"


#: The name of the one item of an object that stands for bytes; no name in a request has a NUL.
_BYTES = "\0"


def pack(message: tuple[object, ...]) -> list[bytes]:
    """Return a message as fields: JSON first, then the byte strings that it has numbers for."""
    strings: list[bytes] = []

    def plain(value: bytes | Mapping[str, object]) -> object:
        if not isinstance(value, bytes):
            return dict(value)
        strings.append(value)
        return {_BYTES: len(strings)}

    return [json.dumps(message, default=plain).encode(), *strings]


def _unpack(what: str, fields: Sequence[bytes], make: Callable[..., _Message]) -> _Message:
    """Return the message in fields, made of its items; raises WireError."""
    try:
        return make(*json.loads(fields[0], object_hook=partial(_restored, fields)))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as problem:
        raise WireError(f"malformed {what}") from problem


def _restored(fields: Sequence[bytes], found: dict[str, Any]) -> object:
    return fields[found[_BYTES]] if _BYTES in found else found


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

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Hello:
        """Return the message in the fields; raises WireError."""
        return _unpack(
            "hello",
            fields,
            lambda identity, version, archs, error: cls(
                identity, (version[0], version[1]), tuple(archs), error
            ),
        )


class Ask(NamedTuple):
    """One compile to do.

    Attributes:
        source, source_name, flags, names, headers: as NVRTC takes them.
        directory: the working directory.
        environment: variables that differ from those the worker was started with; None for one that
            is not set.
        clock: hexadecimal digits. If there are any, the compiler gets a poisoned clock with these
            digits; see `recorder.POISON`. Otherwise it gets the true one.
        sought: words to look for in everything that the compiler reads; see `places.questions`.
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
    sought: Mapping[str, Sequence[str]] = MappingProxyType({})
    slots: Slots | None = None

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Ask:
        """Return the message in the fields; raises WireError."""

        def make(*items: Any) -> Ask:  # noqa: ANN401
            *others, slots = items
            return cls._make((*others, slots and Slots(*slots)))

        return _unpack("request", fields, make)


class FileAnswer(NamedTuple):
    """The answer to the compiler about one path; see `virtual_files.PathAnswer`."""

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
        is_missing = self.kind in (PathKind.MISSING, PathKind.NOT_OPENED)
        return self.kind == PathKind.ERROR or (self.error != 0 and not is_missing)


class Trace(NamedTuple):
    """What one compile asked the operating system.

    Attributes:
        files: path as asked -> answer.
        variables: name -> value of environment variables, None for one that is not set.
        unfollowed: what can't be recorded, in words; empty if there is nothing.
        found: names in `Ask.sought` whose words all occur in what the compiler has read.
    """

    files: Mapping[str, FileAnswer]
    variables: Mapping[str, str | None]
    unfollowed: str
    found: Sequence[str]


class Reply(NamedTuple):
    """A worker's answer to an `Ask`.

    Attributes:
        status: one of `Status`.
        artifact: what the compile produced.
        peak: most bytes of memory that the worker has taken so far.
        code: NVRTC's error code of a rejection.
        doing: what the compiler could not do; empty for the compile itself.
        text: the error in words, of a rejection or a failure.
        trace: what the compile asked.
    """

    status: str
    artifact: Artifact = Artifact()
    peak: int = 0
    code: int = 0
    doing: str = ""
    text: str = ""
    trace: Trace | None = None

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Reply:
        """Return the message in the fields; raises WireError."""

        def make(status: str, artifact: Sequence[Any], *others: Any) -> Reply:  # noqa: ANN401
            *about, trace = others
            made = Artifact(*artifact)._replace(files=())  # NVRTC writes none
            return cls._make((status, made, *about, trace and _trace(*trace)))

        return _unpack("reply", fields, make)


def _trace(files: Mapping[str, Any], *others: Any) -> Trace:  # noqa: ANN401
    answers = {
        path: FileAnswer(kind, error, tuple(stamp), digest)
        for path, (kind, error, stamp, digest) in files.items()
    }
    return Trace(answers, *others)
