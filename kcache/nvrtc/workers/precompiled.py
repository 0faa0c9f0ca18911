"""Precompiled headers: parses what sources begin with once, and keeps it in the worker.

A source begins with its *preamble*: the comments and directives before the first other token. The
program finds its end (`kcache.nvrtc.preamble`). The worker compiles the preamble alone with
`--create-pch`. It does this after a plain compile, or before it if many such sources are known to
come. It compiles later sources with an equal preamble with `--use-pch`.

These are the reasons for what is done here, measured on NVRTC 13.5:

*Nothing is revalidated* by the compiler. It uses a precompiled header whatever has become of its
headers. So before each use, the worker asks again for each answer that the precompiled header was
made from. These answers belong to the record of the compile that uses it.

*The outcome* is the same bytes, unless it has debug information (`-G`) or is LTOIR. These name
lambdas by a count of lines that leaves out what was precompiled. They are compiled plainly.

*Packing.* The compiler does not restore what `#pragma pack` has set. If a header names it,
everything is compiled plainly. CUB, CUTLASS and the CUDA headers do not use it.

*The log* lacks warnings of the preamble. They are taken from the compile that made the precompiled
header, up to the line which says so.

*The file* is an image of the compiler's heap, 446 MB for CUTLASS. The compiler maps it, and a
damaged file crashes the process (seen). So it never has a name. On a full disk, the compile that
makes it fails.

*The heap* has one address for each process and size. To set the size moves it, so the size is set
once, before the first precompiled header. The heap is reserved, not taken. If it is too small,
there is no file.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple, TypeAlias

from kcache.nvrtc.workers.answer import Answer
from kcache.nvrtc.workers.messages import Ask
from kcache.nvrtc.workers.nvrtc import Nvrtc, Outputs, Refused
from kcache.nvrtc.workers.recorder import Recorder

__all__ = ["Precompiled"]

#: The size of the compiler's heap in bytes: CUTLASS needs 446 MB.
HEAP = 1 << 30
#: How many are kept at once. One is enough for a worker: requests of a family go to the worker that
#: has theirs.
MAX_KEPT = 2
#: The temporary directory must have this many bytes free.
_ROOM = 2 << 30
_MAX_REFUSED = 256

#: Matches `#pragma pack`, and the words that a macro needs to make one, whatever its value is made
#: of.
_PACK = re.compile(rb"(?:pragma|define)[^\n]*\bpack\b|\bpack\s*(?:\(|/\*)", re.IGNORECASE)
_REMARK = re.compile(rb"^Remark: The warnings can be suppressed with .*\n*", re.MULTILINE)

#: The requests that a precompiled header is good for: the preamble, flags, name of the source,
#: in-memory headers, and working directory.
_Family: TypeAlias = "tuple[bytes, tuple[bytes, ...], bytes, tuple[tuple[bytes, bytes], ...], str]"


class _Kept(NamedTuple):
    """One precompiled header: its file, the log of its compile, and the answers it is made from."""

    file: IO[bytes]
    path: bytes
    log: bytes
    answers: dict[bytes, Answer]


class Precompiled:
    """The precompiled headers of one worker.

    It never makes a compile fail or changes its outcome. If anything is unexpected, it compiles the
    request plainly.
    """

    def __init__(self, nvrtc: Nvrtc, recorder: Recorder) -> None:
        self._nvrtc = nvrtc
        self._recorder = recorder
        self._kept: dict[_Family, _Kept] = {}
        #: Families that can't have one, each with the digest of its headers at that time.
        self._refused: dict[_Family, int] = {}
        self._heap_set = False
        #: Whether the last compile used one.
        self.used = False
        #: How many compiles of a family there were since the last precompiled header was made.
        self._misses: dict[_Family, int] = {}

    def compile(self, ask: Ask) -> Outputs:
        """Compile a request, with the precompiled header of its preamble if that is there.

        Raises:
            Refused: the compiler refused it.
        """
        family, args = _family(ask)
        fails = not ask.misses and family not in (*self._kept, *self._refused)
        fails = fails and not self._keep(family, args)
        outputs = self._use(family, ask, args)
        self.used = outputs is not None
        if outputs is None:
            outputs = self._plain(ask, args)
        if fails:
            self._refuse(family)
        return outputs

    def prepare(self, ask: Ask) -> None:
        """Make the precompiled header of a request that was compiled plainly a moment ago."""
        family, args = _family(ask)
        held = self._contents()
        if family in self._kept or self._refused.get(family) == held:
            return
        self._misses[family] = self._misses.get(family, 0) + 1
        if self._misses[family] < ask.misses:
            return
        self._misses.clear()
        if not self._keep(family, args, again=True):
            self._refuse(family, held)

    def _keep(self, family: _Family, args: _Arguments, *, again: bool = False) -> bool:
        """Make a precompiled header and keep it; tell whether there is one.

        With `again`, every question gets the answer that the last compile got.
        """
        try:
            kept = self._make(family, args, again=again)
        except (Refused, OSError, MemoryError):
            kept = None
        if not again:
            self._recorder.restart()
        if kept is None:
            return False
        while len(self._kept) >= MAX_KEPT:
            self._drop(next(iter(self._kept)))
        self._kept[family] = kept
        return True

    def _refuse(self, family: _Family, held: int | None = None) -> None:
        """Note that a family can have none, until its headers change."""
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused[family] = self._contents() if held is None else held

    def _contents(self) -> int:
        """Return a number that differs if the texts that the last compile read differ."""
        return hash(frozenset((p, each.digest) for p, each in self._recorder.files.items()))

    # -- using -------------------------------------------------------------------------------------

    def _plain(self, ask: Ask, args: _Arguments) -> Outputs:
        return self._nvrtc.compile(
            ask.source.encode(), args.name, args.flags, names=args.names, headers=args.headers
        )

    def _use(self, family: _Family, ask: Ask, args: _Arguments) -> Outputs | None:
        """Return the outputs of a compile with the precompiled header; None if there is none."""
        kept = self._kept.get(family)
        if kept is None:
            return None
        if not self._recorder.resume(kept.answers):
            self._drop(family)
            self._recorder.restart()
            return None
        self._recorder.own.add(kept.path)
        try:
            outputs = self._nvrtc.compile(
                ask.source.encode(),
                args.name,
                (*args.flags, b"--use-pch=" + kept.path),
                names=args.names,
                headers=args.headers,
            )
        except Refused:  # a plain compile tells why
            outputs = None
        around = None if outputs is None else _around(outputs.log, b"using", kept.path)
        if outputs is None or around is None:
            if outputs is not None:
                self._drop(family)
                self._refused[family] = self._contents()
            self._recorder.restart()
            return None
        return outputs._replace(log=_with_warnings(kept.log, b"".join(around)))

    def _drop(self, family: _Family) -> None:
        kept = self._kept.pop(family)
        self._recorder.own.discard(kept.path)
        kept.file.close()

    # -- making ------------------------------------------------------------------------------------

    def _make(self, family: _Family, args: _Arguments, *, again: bool) -> _Kept | None:
        """Make one, with `again` from the answers of the compile before; None if there is none."""
        if shutil.disk_usage(tempfile.gettempdir()).free < _ROOM:
            return None
        if not self._heap_set:
            self._nvrtc.set_heap(HEAP)
            self._heap_set = True
        self._recorder.restart(keep=again)
        file = tempfile.TemporaryFile()  # noqa: SIM115  kept
        path = b"/proc/self/fd/%d" % file.fileno()
        self._recorder.own.add(path)
        kept = None
        with suppress(Refused), self._recorder.heap.used():
            flags = (*args.flags, b"--create-pch=" + path)
            log, _ = self._nvrtc.precompile(family[0], args.name, flags, args.headers)
            around = _around(log, b"creating", path)
            answers = dict(self._recorder.files)
            if around is not None and not self._recorder.effects() and not _packs(answers, args):
                kept = _Kept(file, path, around[0].strip(b" \n\0"), answers)
        if kept is None:
            self._recorder.own.discard(path)
            file.close()
        return kept


class _Arguments(NamedTuple):
    name: bytes
    flags: Sequence[bytes]
    names: Sequence[bytes]
    headers: dict[bytes, bytes]


def _family(ask: Ask) -> tuple[_Family, _Arguments]:
    args = _Arguments(
        ask.source_name.encode(),
        tuple(flag.encode("utf-8", "surrogateescape") for flag in ask.flags),
        [name.encode() for name in ask.names],
        {name.encode(): text.encode() for name, text in ask.headers.items()},
    )
    begin = ask.source[: ask.preamble].encode()
    headers = tuple(args.headers.items())
    return (begin, tuple(args.flags), args.name, headers, ask.directory), args


def _packs(answers: dict[bytes, Answer], args: _Arguments) -> bool:
    """Tell whether a text that was read may set the packing of structures."""
    texts = [answer.content for answer in answers.values() if answer.content]
    texts += args.headers.values()
    joined = (text.replace(b"\\\r\n", b"").replace(b"\\\n", b"") for text in texts)
    return any(b"pack" in text and _PACK.search(text) for text in joined)


def _around(log: bytes, doing: bytes, path: bytes) -> tuple[bytes, bytes] | None:
    """Return a log before and after the line about a precompiled header; None without it."""
    line = rb'^".*": ' + doing + rb' precompiled header file "' + re.escape(path) + rb'"\n*'
    parts = re.split(line, log, maxsplit=1, flags=re.MULTILINE)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _with_warnings(warnings: bytes, log: bytes) -> bytes:
    """Return a log with the preamble's warnings before it; the compiler's remark comes once."""
    if not warnings:
        return log.strip(b" \n")
    if _REMARK.search(warnings):
        log = _REMARK.sub(b"", log, count=1)
    return (warnings + b"\n\n" + log).strip(b" \n")
