"""Protocol: messages between the interface library and the daemon, as fields.

The messages are those of `kcache.util.wire`, and their first field is their kind. Numbers are
decimal text. `native/compile.c`, `native/about.c` and `native/bytes.c` are the program's end.

=============  ===================================================================================
question       fields
=============  ===================================================================================
``compile``    NVRTC's major version; the numbers of variables, headers, options and name
               expressions; NVRTC's path, the working directory; ``NAME=value`` of each variable, or
               ``NAME`` if it is not set; the source and its name; the names and then the texts of
               the headers; options, name expressions; the client's standing (see `standing`)
``query``      NVRTC's path; the client's standing
``nvcc``       the client's standing, and a start of nvcc; see `kcache.nvcc.request`
``note``       why the interface library called the real NVRTC
=============  ===================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from kcache.util.wire import WireError, number_in

COMPILE, QUERY, NOTE, NVCC = b"compile", b"query", b"note", b"nvcc"


class DeclinedError(Exception):
    """kcache can't answer as NVRTC would, so the real NVRTC answers; the message is the reason."""


def standing() -> bytes:
    """Return this process's standing: its user, root directory and mount namespace.

    `native/server.c` makes the same text. If client and daemon have the same standing, a path names
    the same file for both, and they have the same rights to the file. Each question contains the
    standing, because a program may change its standing after it has connected (chroot(2),
    `unshare -m`, setuid(2)).
    """
    root = os.stat("/")
    space = (0, 0)
    with suppress(OSError):
        status = os.stat("/proc/thread-self/ns/mnt")
        space = status.st_dev, status.st_ino
    numbers = (os.geteuid(), os.getegid(), root.st_dev, root.st_ino, *space)
    return " ".join(map(str, numbers)).encode()


class Program(NamedTuple):
    """An NVRTC program as the client passed it, and the client's state that a compile depends on.

    Attributes:
        major: NVRTC's major version.
        library: path of the NVRTC that the client would have used.
        directory: working directory of the client.
        standing: the client's user, root directory and mount namespace; see `standing`.
        environment: the variables of the client that NVRTC reads.
        source, name: as passed to `nvrtcCreateProgram`; the name is empty if there is none.
        headers: pairs of an include name and the header's text, in order.
        options: as passed to `nvrtcCompileProgram`.
        expressions: the name expressions.
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
    """What NVRTC returns for a program that was compiled.

    Attributes:
        result: NVRTC's result code.
        ptx, log: end in a NUL, as NVRTC returns them.
        cubin, ltoir: empty if there is none.
        lowered: pairs of a name expression and its lowered name.
        hit: whether the kernel comes from the cache.
    """

    result: int
    ptx: bytes
    cubin: bytes
    ltoir: bytes
    log: bytes
    lowered: Sequence[tuple[bytes, bytes]]
    hit: bool


def unpack_program(fields: Sequence[bytes]) -> Program:
    """Return the program in the fields of a `COMPILE` message, without the message's first field.

    Raises:
        WireError: the fields are not those of a program.
    """
    if len(fields) < 10:
        raise WireError(f"expected at least 10 fields of a program, got {len(fields)}")
    major, variables, headers, options, expressions = map(number_in, fields[:5])
    if len(fields) != 10 + variables + 2 * headers + options + expressions:
        raise WireError("the number of a program's fields differs from the announced one")
    rest = iter(fields[5:])
    library, directory = islice(rest, 2)
    settings = [text.partition(b"=") for text in islice(rest, variables)]
    source, name = islice(rest, 2)
    names, texts = list(islice(rest, headers)), list(islice(rest, headers))
    return Program(
        major=major,
        library=library,
        directory=directory,
        environment={name: value for name, is_set, value in settings if is_set},
        source=source,
        name=name,
        headers=list(zip(names, texts, strict=True)),
        options=list(islice(rest, options)),
        expressions=list(islice(rest, expressions)),
        standing=next(rest),
    )


def pack_answer(answer: Answer) -> list[bytes]:
    """Return the fields of an answer, in which each name ends in a NUL."""
    names = [name + b"\0" for pair in answer.lowered for name in pair]
    outputs = (answer.ptx, answer.cubin, answer.ltoir, answer.log)
    return [b"%d" % answer.result, *outputs, *names]
