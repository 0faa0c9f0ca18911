"""Protocol: the frames between the interface library and the server, and their contents.

A frame is a head of 16 bytes and a payload. Numbers are little-endian and have 32 bits, unless
stated otherwise. A byte string is its size and then its bytes. A list is its length and then its
items.

Head: magic `KDI1`, version and kind (16 bits each), size of the payload, zero.

These are pure functions without input or output. Whatever a frame claims, they allocate no more
than its own bytes take. `native/server.c` and `native/compile.c` are the other end.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "ANSWER",
    "COMPILE",
    "DECLINED",
    "HEAD_SIZE",
    "INFO",
    "MAX_FRAME",
    "NOTE",
    "QUERY",
    "STATUS",
    "STOP",
    "VERSION",
    "WAIT",
    "Answer",
    "Program",
    "ProtocolError",
    "frame",
    "head",
    "pack_answer",
    "pack_info",
    "pack_program",
    "unpack_answer",
    "unpack_head",
    "unpack_info",
    "unpack_program",
    "unpack_query",
]

MAGIC = b"KDI1"
VERSION = 2
#: Far more than any source or kernel has: the largest kernels of CUTLASS have 10 MB.
MAX_FRAME = 256 << 20

#: Kinds of frames. A program asks with the first three, the command line with the next two.
COMPILE, QUERY, NOTE, STATUS, STOP = 1, 2, 3, 4, 5
#: Kinds of the server's answers. Any number of `WAIT` may come before the answer.
ANSWER, DECLINED, INFO, WAIT = 16, 17, 18, 19

_HEAD = struct.Struct("<4sHHII")
HEAD_SIZE = _HEAD.size
_NUMBER = struct.Struct("<I")
_HIT, _KEEP = 1, 2


class ProtocolError(Exception):
    """The other end sent something that is no frame of this protocol and version."""


class Program(NamedTuple):
    """A program that is to be compiled, as it was given to NVRTC, and where.

    Attributes:
        major: NVRTC's major version.
        library: path of the NVRTC that the program would have used.
        directory: working directory of the client.
        standing: the client's user and file tree; see `answering`.
        environment: the variables of the client that NVRTC reads.
        source, name: as given to `nvrtcCreateProgram`; the name is empty if there is none.
        headers: (include name, text), in order.
        options: as given to `nvrtcCompileProgram`.
        expressions: name expressions.
    """

    major: int
    library: bytes
    directory: bytes
    standing: bytes
    environment: Mapping[bytes, bytes]
    source: bytes
    name: bytes
    headers: Sequence[tuple[bytes, bytes]]
    options: Sequence[bytes]
    expressions: Sequence[bytes]


class Answer(NamedTuple):
    """The answer of NVRTC.

    Attributes:
        result: NVRTC's result code.
        ptx, log: with the NUL that NVRTC ends them with.
        cubin, ltoir: empty if there is none.
        lowered: (name expression, lowered name).
        hit: whether nothing was compiled.
        keep: whether the request alone decides the answer, so that the client may keep it.
        seconds: compile time of the kernel.
    """

    result: int
    ptx: bytes
    cubin: bytes
    ltoir: bytes
    log: bytes
    lowered: Sequence[tuple[bytes, bytes]]
    hit: bool
    keep: bool
    seconds: float = 0.0


# -- frames ----------------------------------------------------------------------------------------


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return head(kind, len(payload)) + payload


def head(kind: int, size: int) -> bytes:
    """Return the head of a frame whose payload has `size` bytes."""
    return _HEAD.pack(MAGIC, VERSION, kind, size, 0)


def unpack_head(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return (kind, size of the payload).

    Raises:
        ProtocolError: this is no head of this protocol and version, or the payload is too large.
    """
    magic, version, kind, size, _ = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not a frame of version {VERSION}: {bytes(data[:8])!r}")
    if size > MAX_FRAME:
        raise ProtocolError(f"a frame of {size} bytes is too large")
    return kind, size


# -- what is in them -------------------------------------------------------------------------------


class _Reader:
    """Reads a payload from its beginning to its end."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def number(self) -> int:
        at = self._at
        if at + 4 > len(self._payload):
            raise ProtocolError("a number is cut off")
        self._at = at + 4
        value: int = _NUMBER.unpack_from(self._payload, at)[0]
        return value

    def text(self) -> bytes:
        size = self.number()
        at = self._at
        if size > len(self._payload) - at:
            raise ProtocolError("a byte string is cut off")
        self._at = at + size
        return self._payload[at : at + size]

    def texts(self) -> list[bytes]:
        return [self.text() for _ in range(self.count(4))]

    def count(self, least: int) -> int:
        """Return the length of a list whose items have at least `least` bytes."""
        count = self.number()
        if count * least > len(self._payload) - self._at:
            raise ProtocolError("a list is cut off")
        return count

    def end(self) -> None:
        if self._at != len(self._payload):
            raise ProtocolError("there is more in the frame than belongs there")


def _text(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


def _texts(items: Sequence[bytes]) -> bytes:
    return _NUMBER.pack(len(items)) + b"".join(map(_text, items))


def unpack_program(payload: bytes) -> Program:
    """Return the program in the payload of a `COMPILE` frame.

    Raises:
        ProtocolError: there is none.
    """
    reader = _Reader(payload)
    major = reader.number()
    library, directory = reader.text(), reader.text()
    environment = {reader.text(): reader.text() for _ in range(reader.count(8))}
    source, name = reader.text(), reader.text()
    names, texts, options, expressions = (reader.texts() for _ in range(4))
    standing = reader.text()
    reader.end()
    if len(names) != len(texts):
        raise ProtocolError("there are not as many texts of headers as names")
    headers = list(zip(names, texts, strict=True))
    return Program(
        *(major, library, directory, standing, environment),
        *(source, name, headers, options, expressions),
    )


def pack_program(program: Program) -> bytes:
    """Return the payload of a `COMPILE` frame."""
    variables = b"".join(_text(name) + _text(value) for name, value in program.environment.items())
    return b"".join(
        (
            _NUMBER.pack(program.major),
            _text(program.library),
            _text(program.directory),
            _NUMBER.pack(len(program.environment)) + variables,
            _text(program.source),
            _text(program.name),
            _texts([name for name, _ in program.headers]),
            _texts([text for _, text in program.headers]),
            _texts(program.options),
            _texts(program.expressions),
            _text(program.standing),
        )
    )


def pack_answer(answer: Answer) -> bytes:
    """Return the payload of an `ANSWER` frame; names get a NUL at their end."""
    flags = _HIT * answer.hit | _KEEP * answer.keep
    parts = [_NUMBER.pack(answer.result), _NUMBER.pack(flags)]
    for output in (answer.ptx, answer.cubin, answer.ltoir, answer.log):  # large: copied once
        parts += (_NUMBER.pack(len(output)), output)
    parts.append(_NUMBER.pack(len(answer.lowered)))
    parts += (_text(a + b"\0") + _text(b + b"\0") for a, b in answer.lowered)
    return b"".join(parts)


def unpack_answer(payload: bytes) -> Answer:
    """Return the answer in the payload of an `ANSWER` frame.

    Raises:
        ProtocolError: there is none.
    """
    reader = _Reader(payload)
    result, flags = reader.number(), reader.number()
    ptx, cubin, ltoir, log = (reader.text() for _ in range(4))
    lowered = [(reader.text()[:-1], reader.text()[:-1]) for _ in range(reader.count(8))]
    reader.end()
    hit, keep = bool(flags & _HIT), bool(flags & _KEEP)
    return Answer(result, ptx, cubin, ltoir, log, lowered, hit, keep)


def unpack_query(payload: bytes) -> tuple[bytes, bytes]:
    """Return (path, standing as in `Program`) from the payload of a `QUERY` frame.

    Raises:
        ProtocolError: there is none.
    """
    reader = _Reader(payload)
    path, standing = reader.text(), reader.text()
    reader.end()
    return path, standing


def pack_info(version: tuple[int, int], archs: Sequence[int]) -> bytes:
    """Return the payload of an `INFO` frame: NVRTC's version, and the architectures it knows."""
    return b"".join(map(_NUMBER.pack, (*version, len(archs), *archs)))


def unpack_info(payload: bytes) -> tuple[tuple[int, int], list[int]]:
    """Return (version, architectures) from the payload of an `INFO` frame.

    Raises:
        ProtocolError: there is none.
    """
    reader = _Reader(payload)
    version = reader.number(), reader.number()
    archs = [reader.number() for _ in range(reader.count(4))]
    reader.end()
    return version, archs
