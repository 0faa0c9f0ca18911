"""Messages: what a program and a worker send to each other, as lists of byte strings (fields)."""

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

#: The only field of the message by which a worker reports that the compile begins. A message
#: without fields is a heartbeat.
BEGUN = b"begun"


class Status:
    """The values of `Reply.status`."""

    COMPILED = "compiled"
    #: The compiler rejected the request.
    REJECTED = "rejected"
    #: In an earlier compile, this worker's compiler got other values of variables. Therefore the
    #: request has to be compiled by a new worker.
    ELSEWHERE = "elsewhere"
    #: The result depends on the poisoned clock, so the compile has to run with the true clock.
    POISONED = "poisoned"
    #: The worker could not run the compiler.
    FAILED = "failed"


#: A JSON object with only this name represents bytes. No other object has it, because no name in a
#: request contains a NUL character.
_BYTES = "\0"


def pack(message: tuple[object, ...]) -> list[bytes]:
    """Return `message` as fields: first JSON, then the byte strings that the JSON refers to."""
    strings: list[bytes] = []

    def plain(value: bytes | Mapping[str, object]) -> object:
        if not isinstance(value, bytes):
            return dict(value)
        strings.append(value)
        return {_BYTES: len(strings)}

    return [json.dumps(message, default=plain).encode(), *strings]


@contextmanager
def _items(what: str, fields: Sequence[bytes]) -> Generator[list[Any]]:
    """Yield the items of the message in `fields`.

    An error in the fields, or an error that the block raises, becomes a WireError.
    """
    try:
        yield json.loads(fields[0], object_hook=partial(_restored, fields))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as problem:
        raise WireError(f"malformed {what}") from problem


def _restored(fields: Sequence[bytes], found: dict[str, Any]) -> object:
    return fields[found[_BYTES]] if _BYTES in found else found


class Hello(NamedTuple):
    """A worker's first message, after it has tried to load the library.

    Attributes:
        identity: the identity of the loaded library.
        version: the version of the library, (major, minor).
        archs: the numbers of the architectures that the library supports.
        error: why the library can't be loaded; empty if it is loaded.
    """

    identity: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    error: str = ""

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Hello:
        """Return the message in `fields`; raise WireError if it is malformed."""
        with _items("hello", fields) as (identity, (major, minor), archs, error):
            return cls(identity, (major, minor), tuple(archs), error)


class Ask(NamedTuple):
    """A message that asks a worker to compile.

    Attributes:
        source, source_name, flags, names, headers: the input of the compile, as NVRTC takes it.
        directory: the working directory of the compile.
        environment: those variables that differ from the ones with which the worker was started;
            None for a variable that is not set.
        clock: hexadecimal digits to append to the poisoned clock, see `recorder.POISON`; empty to
            compile with the true clock.
        sought: condition -> words to look for in all texts that the compiler reads; see
            `places.questions`.
        slots: these limit the compiles of all processes together; None for no limit.
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
        """Return the message in `fields`; raise WireError if it is malformed."""
        with _items("request", fields) as (*others, slots):
            return cls._make((*others, slots and Slots(*slots)))


class FileAnswer(NamedTuple):
    """The answer that the compiler got about one path; `virtual_files.PathAnswer` explains it."""

    kind: str
    error: int
    stamp: tuple[int, int, int, int, int]
    digest: bytes

    @property
    def opened(self) -> bool:
        """Whether the compiler has read the file; otherwise `digest` is empty."""
        return bool(self.digest)

    @property
    def denied(self) -> bool:
        """Whether stat or open of the path failed, and not because the path does not exist."""
        is_missing = self.kind in (PathKind.MISSING, PathKind.NOT_OPENED)
        return self.kind == PathKind.ERROR or (self.error != 0 and not is_missing)


class Trace(NamedTuple):
    """What one compile asked the operating system.

    Attributes:
        files: path, as the compiler has spelled it -> answer.
        variables: name of an environment variable -> value; None if it is not set.
        unfollowed: what could not be recorded, in words; empty if everything was recorded.
        found: those conditions in `Ask.sought` whose words all occur in the texts that the compiler
            has read.
    """

    files: Mapping[str, FileAnswer]
    variables: Mapping[str, str | None]
    unfollowed: str
    found: Sequence[str]


class Reply(NamedTuple):
    """A worker's reply to an `Ask`.

    Attributes:
        status: one of the values in `Status`.
        artifact: what the compile produced.
        peak: the most memory that the worker has used so far, in bytes.
        code: NVRTC's error code; 0 if NVRTC has not rejected the request.
        doing: if NVRTC has rejected a step before or after the compile itself, this step in words;
            empty otherwise.
        text: NVRTC's or the worker's error, in words; empty if there is none.
        trace: what the compiler asked the operating system; None if that was not recorded.
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
        """Return the message in `fields`; raise WireError if it is malformed."""
        with _items("reply", fields) as (status, artifact, *about, trace):
            made = Artifact(*artifact)._replace(files=())  # NVRTC writes none
            if trace is None:
                return cls._make((status, made, *about, None))
            answers = {
                path: FileAnswer(kind, error, tuple(stamp), digest)
                for path, (kind, error, stamp, digest) in trace[0].items()
            }
            return cls._make((status, made, *about, Trace(answers, *trace[1:])))
