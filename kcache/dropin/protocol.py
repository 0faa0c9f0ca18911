"""Protocol: messages between the interface library and the daemon, as fields.

The messages are those of `kcache.util.wire`, and their first field is their kind. Numbers are
decimal text. `native/compile.c`, `native/about.c` and `native/bytes.c` are the other end.

=============  ===================================================================================
question       fields
=============  ===================================================================================
``compile``    NVRTC's major version; the numbers of variables, headers, options and name
               expressions; the library's path, the working directory; ``NAME=value`` of each
               variable, or ``NAME`` if it is not set; source and its name; the names and then the
               texts of the headers; options, name expressions; the client's standing (see
               `standing`)
``query``      the library's path; the client's standing
``nvcc``       the client's standing, and a start of nvcc; see `kcache.nvcc.request`
``note``       why the program asked the real NVRTC
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
    """kcache can't answer exactly, and the real NVRTC has to; the message is the reason."""


def standing() -> bytes:
    """Return this process's standing: its user, root directory and mount namespace.

    `native/server.c` has the same form. If client and daemon have the same standing, a path leads
    to the same file for both, with the same rights. A program may change its standing after it has
    connected (chroot(2), `unshare -m`, setuid(2)).
    """
    root = os.stat("/")
    space = (0, 0)
    with suppress(OSError):
        status = os.stat("/proc/thread-self/ns/mnt")
        space = status.st_dev, status.st_ino
    numbers = (os.geteuid(), os.getegid(), root.st_dev, root.st_ino, *space)
    return " ".join(map(str, numbers)).encode()


class Program(NamedTuple):
    """A program as it was given to NVRTC, with what the compile needs to know about the client.

    Attributes:
        major: NVRTC's major version.
        library: path of the NVRTC that the program would have used.
        directory: working directory of the client.
        standing: the client's user, root directory and mount namespace; see `standing`.
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
    """Return the program in the fields after `COMPILE`.

    Raises:
        WireError: the fields are not a program.
    """
    if len(fields) < 10:
        raise WireError("no program")
    major, variables, headers, options, expressions = map(number_in, fields[:5])
    if len(fields) != 10 + variables + 2 * headers + options + expressions:
        raise WireError("the number of fields differs from the announced one")
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
    """Return the fields of an answer; names get a NUL at their end."""
    names = [name + b"\0" for pair in answer.lowered for name in pair]
    outputs = (answer.ptx, answer.cubin, answer.ltoir, answer.log)
    return [b"%d" % answer.result, *outputs, *names]
