"""Messages: the requests of a program to a worker, and the replies, as lists of byte strings."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from kcache.nvrtc.artifact import Artifact
from kcache.nvrtc.files import PathKind
from kcache.nvrtc.workers.slots import Slots
from kcache.util.wire import WireError

#: The field of the message by which a worker reports that the compile begins. A message without
#: fields is a heartbeat.
BEGUN = b"begun"


class Status:
    """The kind of a worker's answer, in the first field of its reply."""

    COMPILED = "compiled"
    REJECTED = "rejected"
    #: The compiler got other values of variables before, so a new worker has to compile.
    ELSEWHERE = "elsewhere"
    #: The result depends on the poisoned clock, so the compile has to run with the true clock.
    POISONED = "poisoned"
    FAILED = "failed"


#: The only name in a JSON object that represents bytes; no name in a request has a NUL.
_BYTES = "\0"


def pack(message: tuple[object, ...]) -> list[bytes]:
    """Return a message as fields: JSON, then the byte strings to which it refers by number."""
    strings: list[bytes] = []

    def plain(value: bytes | Mapping[str, object]) -> object:
        if not isinstance(value, bytes):
            return dict(value)
        strings.append(value)
        return {_BYTES: len(strings)}

    return [json.dumps(message, default=plain).encode(), *strings]


@contextmanager
def _items(what: str, fields: Sequence[bytes]) -> Generator[list[Any]]:
    """Return the items of a message; errors in them, or of the block, become a WireError."""
    try:
        yield json.loads(fields[0], object_hook=partial(_restored, fields))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as problem:
        raise WireError(f"malformed {what}") from problem


def _restored(fields: Sequence[bytes], found: dict[str, Any]) -> object:
    return fields[found[_BYTES]] if _BYTES in found else found


class Hello(NamedTuple):
    """A worker's first message, after it has tried to load the library.

    Attributes:
        identity: of the loaded library.
        version: (major, minor).
        archs: the numbers of the architectures that it supports.
        error: why the library can't be loaded; empty if it was.
    """

    identity: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    error: str = ""

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Hello:
        """Return the message in the fields; raises WireError."""
        with _items("hello", fields) as (identity, (major, minor), archs, error):
            return cls(identity, (major, minor), tuple(archs), error)


class Ask(NamedTuple):
    """A request to a worker to compile.

    Attributes:
        source, source_name, flags, names, headers: as NVRTC takes them.
        directory: the working directory.
        environment: variables that differ from those of the worker's start; None for a variable
            that is not set.
        clock: hexadecimal digits for the poisoned clock, see `recorder.POISON`; empty for the true
            clock.
        sought: words to search in everything that the compiler reads; see `places.questions`.
        slots: bound the compiles of all processes together; None for no bound.
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
        with _items("request", fields) as (*others, slots):
            return cls._make((*others, slots and Slots(*slots)))


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
        unfollowed: what could not be recorded, in words; empty if everything was.
        found: names in `Ask.sought` whose words all occur in the texts that the compiler has read.
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
        peak: the largest memory of the worker so far, in bytes.
        code: NVRTC's error code of a rejection.
        doing: which step before or after the compile was rejected; empty for the compile itself.
        text: the error of a rejection or a failure, in words.
        trace: what the compile asked; None if it was not recorded.
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
        with _items("reply", fields) as (status, artifact, *about, trace):
            made = Artifact(*artifact)._replace(files=())  # NVRTC writes none
            if trace is None:
                return cls._make((status, made, *about, None))
            answers = {
                path: FileAnswer(kind, error, tuple(stamp), digest)
                for path, (kind, error, stamp, digest) in trace[0].items()
            }
            return cls._make((status, made, *about, Trace(answers, *trace[1:])))
