"""Messages: what a program asks a worker, and what the worker answers, as lists of byte strings."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kcache.nvrtc.workers.slots import Slots
from kcache.util.wire import WireError, join_texts, split_texts

__all__ = ["BEGUN", "Ask", "FileAnswer", "Hello", "Trace", "Reply", "Status"]

_FILE = struct.Struct("<ci5q16s")
#: The field of a worker's message that the compile begins now. A message without fields says that
#: the worker goes on.
BEGUN = b"begun"


class Status:
    """The kind of a worker's answer, in the first field of its reply."""

    COMPILED = b"compiled"
    REFUSED = b"refused"
    #: The compiler got other variables before: ask a new worker.
    ELSEWHERE = b"elsewhere"
    FAILED = b"failed"


class Hello(NamedTuple):
    """A worker's message after it has loaded the library; `error` if it could not.

    Attributes:
        identity: of the library as it is in memory.
        version: (major, minor).
        archs: architecture numbers that it knows.
        records: whether it can record what the compiler asks.
    """

    identity: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    records: bool
    error: str = ""

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        numbers = struct.pack(f"<2i?{len(self.archs)}i", *self.version, self.records, *self.archs)
        return [self.identity.encode(), numbers, self.error.encode(errors="replace")]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Hello:
        """Return the message in the fields; raises WireError."""
        try:
            identity, numbers, error = fields
            count = (len(numbers) - 9) // 4
            major, minor, records, *archs = struct.unpack(f"<2i?{count}i", numbers)
            known = tuple(archs)
            version = (major, minor)
            return cls(identity.decode(), version, known, records, error.decode())
        except (ValueError, struct.error) as problem:
            raise WireError("the worker's greeting makes no sense") from problem


class Ask(NamedTuple):
    """One compile to do.

    Attributes:
        source, source_name, flags, names, headers: as NVRTC takes them.
        directory: the working directory.
        environment: variables that differ from those the worker was started with; None for one that
            is not set.
        proof: whether the compiler gets another time, another process id and other random numbers;
            with `moved`, headers can't compute with their names, either.
        moved: directories for which the compiler gets other paths, path that it knows -> real path.
        slots: they bound the compiles of all processes together; None if nothing does.
    """

    source: str
    source_name: str
    flags: Sequence[str]
    names: Sequence[str]
    headers: Mapping[str, str]
    directory: str
    environment: Mapping[str, str | None]
    proof: bool = False
    moved: Mapping[str, str] = MappingProxyType({})
    slots: Slots | None = None

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        return [
            self.source.encode(),
            self.source_name.encode(),
            join_texts(self.flags),
            join_texts(self.names),
            join_texts(self.headers),
            join_texts(self.headers.values()),
            self.directory.encode("utf-8", "surrogateescape"),
            _join_variables(self.environment),
            b"proof" * self.proof,
            join_texts(self.moved),
            join_texts(self.moved.values()),
            b"" if self.slots is None else self.slots.pack(),
        ]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Ask:
        """Return the message in the fields; raises WireError."""
        try:
            source, name, flags, names, headers, texts, *rest = fields
            directory, environment, proof, told, real, slots = rest
            return cls(
                source.decode(),
                name.decode(),
                split_texts(flags),
                split_texts(names),
                dict(zip(split_texts(headers), split_texts(texts), strict=True)),
                directory.decode("utf-8", "surrogateescape"),
                _split_variables(environment),
                bool(proof),
                dict(zip(split_texts(told), split_texts(real), strict=True)),
                Slots.unpack(slots) if slots else None,
            )
        except (ValueError, struct.error) as problem:
            raise WireError("the request makes no sense") from problem


class FileAnswer(NamedTuple):
    """The answer to the compiler about one path; see `told.PathAnswer`."""

    kind: str
    error: int
    stamp: tuple[int, int, int, int, int]
    digest: bytes

    @property
    def opened(self) -> bool:
        """Whether the file was read; otherwise its digest is zeros."""
        return any(self.digest)

    @property
    def denied(self) -> bool:
        """Whether stat or open of the path failed for another reason than absence."""
        return self.kind == "e" or (self.kind not in "-a" and self.error != 0)


class Trace(NamedTuple):
    """What one compile asked the operating system.

    Attributes:
        files: path as asked -> answer.
        others: (question, path) -> answer, of rarer questions.
        variables: name -> value of environment variables, None for one that is not set.
        unfollowed: what can't be recorded, in words; empty if there is nothing.
        may_ask_time: whether a text may use the time of the compile; see `clock`.
    """

    files: Mapping[str, FileAnswer]
    others: Mapping[tuple[str, str], bytes]
    variables: Mapping[str, str | None]
    unfollowed: str
    may_ask_time: bool

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        return [
            join_texts(self.files),
            b"".join(
                _FILE.pack(each.kind.encode(), each.error, *each.stamp, each.digest)
                for each in self.files.values()
            ),
            join_texts(text for question in self.others for text in question),
            join_texts(answer.hex() for answer in self.others.values()),
            _join_variables(self.variables),
            self.unfollowed.encode("utf-8", "surrogateescape"),
            b"time" * self.may_ask_time,
        ]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Trace:
        """Return the message in the fields; raises WireError."""
        try:
            paths, answers, others, told, variables, unfollowed, time = fields
            files = {
                path: FileAnswer(kind.decode(), error, tuple(stamp), digest)
                for path, (kind, error, *stamp, digest) in zip(
                    split_texts(paths), _FILE.iter_unpack(answers), strict=True
                )
            }
            questions = iter(split_texts(others))
            pairs = zip(questions, questions, strict=True)
            return cls(
                files,
                {
                    pair: bytes.fromhex(answer)
                    for pair, answer in zip(pairs, split_texts(told), strict=True)
                },
                _split_variables(variables),
                unfollowed.decode("utf-8", "surrogateescape"),
                bool(time),
            )
        except (ValueError, struct.error) as problem:
            raise WireError("the trace makes no sense") from problem


class Reply(NamedTuple):
    """A worker's answer to an `Ask`.

    Attributes:
        status: one of `Status`.
        seconds: wall time of the compile.
        peak: most bytes of memory that the worker has taken so far.
        code, doing, text: of a refusal, see `nvrtc.Refused`; `text` of a failure says why.
        log: the compiler's log.
        outputs: PTX, CUBIN, LTOIR; None if there is none.
        lowered_names: in the order of the name expressions.
        trace: what the compile asked.
    """

    status: bytes
    seconds: float = 0.0
    peak: int = 0
    code: int = 0
    doing: str = ""
    text: str = ""
    log: bytes = b""
    outputs: tuple[bytes | None, bytes | None, bytes | None] = (None, None, None)
    lowered_names: Sequence[str] = ()
    trace: Trace | None = None

    def pack(self) -> list[bytes]:
        """Return the fields of the message."""
        present = [output is not None for output in self.outputs]
        return [
            self.status,
            struct.pack("<dQi3?", self.seconds, self.peak, self.code, *present),
            join_texts((self.doing, self.text)),
            self.log,
            *(output or b"" for output in self.outputs),
            join_texts(self.lowered_names),
            *(self.trace.pack() if self.trace is not None else ()),
        ]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Reply:
        """Return the message in the fields; raises WireError."""
        try:
            status, numbers, words, log, ptx, cubin, ltoir, lowered, *trace = fields
            seconds, peak, code, *present = struct.unpack("<dQi3?", numbers)
            doing, text = split_texts(words)
            outputs = tuple(
                output if there else None
                for output, there in zip((ptx, cubin, ltoir), present, strict=True)
            )
        except (ValueError, struct.error) as problem:
            raise WireError("the worker's reply makes no sense") from problem
        return cls(
            status,
            seconds,
            peak,
            code,
            doing,
            text,
            log,
            outputs,  # type: ignore[arg-type]
            split_texts(lowered),
            Trace.unpack(trace) if trace else None,
        )


def _join_variables(variables: Mapping[str, str | None]) -> bytes:
    return join_texts(n if v is None else f"{n}={v}" for n, v in variables.items())


def _split_variables(field: bytes) -> dict[str, str | None]:
    parts = (each.partition("=") for each in split_texts(field))
    return {name: value if equals else None for name, equals, value in parts}
