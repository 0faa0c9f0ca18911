"""The trace: it lists the same files as strace for a bare compile."""

import ctypes
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from core.helpers import run
from nvrtc.reference import ARCH, KERNEL, write
from nvrtc.talk import ask, worker

from kcache.nvrtc import library
from kcache.nvrtc.options import parse_options
from kcache.nvrtc.search import HeaderSearch
from kcache.nvrtc.workers import virtual_files
from kcache.nvrtc.workers.messages import Trace

pytestmark = [
    pytest.mark.usefixtures("nvrtc"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="traces need Linux"),
]

#: Compiles with `ctypes` alone. A look-up of a unique path marks the begin and the end.
_BARE = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from kcache.nvrtc.workers.messages import Ask
from kcache.nvrtc.workers.nvrtc import Nvrtc
library, source, flags = json.loads(sys.argv[2])
nvrtc = Nvrtc(library)
nvrtc.hello()
os.path.exists("/(begin)")
nvrtc.compile(Ask(source, "kernel.cu", flags, (), {}, "", {}))
os.path.exists("/(end)")
"""
_CALL = re.compile(
    r'(?P<call>\w+)\((?:AT_FDCWD, |\d+, )?"(?P<path>[^"]*)".*\)\s+= (?P<result>-?\d+)(?: (?P<error>E\w+))?'
)
#: Calls of the loader, the C library and the compiler's threads. No text of a kernel can change
#: them.
_LOADER = re.compile(r"\.so|/(tls|glibc-hwcaps|haswell|avx512_1|x86_64|aarch64|atomics)(/|$)")
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/localtime", "/usr/share/zoneinfo")


class Seen(NamedTuple):
    """Paths that were opened, and paths at which no file was found."""

    opened: set[str]
    absent: set[str]


def straced(folder: Path, source: str, flags: tuple[str, ...]) -> Seen:
    """Return the paths that strace shows for a bare compile in a new process."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    out = folder / "strace"
    calls = "trace=open,openat,stat,lstat,newfstatat,access,faccessat,faccessat2,readlink,statx"
    request = [library.require().path, source, flags]
    tracing = ("strace", "-f", "-s", "4096", "-e", calls, "-o", str(out))
    done = run(*tracing, sys.executable, "-c", _BARE, json.dumps(sys.path), json.dumps(request))
    if "PTRACE" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("strace is not allowed here")
    assert done.returncode == 0, done.stderr
    text = out.read_text(errors="surrogateescape")
    part = text[text.index("/(begin)") : text.index("/(end)")]
    seen = Seen(set(), set())
    for line in part.splitlines()[1:]:
        match = _CALL.search(line)
        if match is None or match["path"].startswith(_SYSTEM):
            continue
        if _LOADER.search(match["path"]):  # looked up by libcuda, for NVRTC's own cache
            continue
        if match["error"] in ("ENOENT", "ENOTDIR"):
            seen.absent.add(match["path"])
        elif match["call"].startswith("open") and int(match["result"]) >= 0:
            seen.opened.add(match["path"])
    return seen


def recorded(trace: Trace) -> Seen:
    absent = {path for path, answer in trace.files.items() if answer.kind in "-a"}
    return Seen({path for path, answer in trace.files.items() if answer.opened}, absent)


def test_small_sources_too(tmp_path: Path, tree: Path) -> None:
    write(tree / "inc/x.h", '#pragma once\n#include "y.h"\n#include "../inc/x.h"\n')
    write(tree / "inc/y.h", '#if __has_include(<z.h>) || __has_include("w.h")\n#endif\n')
    source = '#include "x.h"\n#include <y.h>\n' + KERNEL.replace("V", "1")
    flags = (*ARCH.flags(), "-Ifirst", "-Iinc", "-include", "y.h")
    with worker() as process:
        reply = process.ask(ask(source, flags), None)
    assert reply.trace is not None
    theirs = straced(tmp_path, source, flags)
    mine = recorded(reply.trace)
    assert mine.opened == theirs.opened
    assert mine.absent == theirs.absent


_SPELLINGS = [
    *["inc", "./inc/", "inc/../inc", "é", "-a", "a,b", "in\\c", '"inc"', "%s", "a=b", "@o"],
    *("a b", "a\tb", "a\nb", ".", "..", "/tmp/", "\udcff", "-I", "x" * 200, "no/such/folder"),
    *("a//b", "/tmp//", "inc\n", "inc\t", " inc", "inc ", "=inc", "-", ""),
]


def test_the_compiler_looks_into_the_directories_that_are_taken_for_some(tree: Path) -> None:
    """Every spelling that kcache parses as an include directory is one for the compiler, too."""
    with worker() as process:
        for spelling in _SPELLINGS:
            for given in ([f"-I{spelling}"], ["-I", spelling]):
                paths = parse_options(given).include_paths
                search = HeaderSearch("kernel.cu", paths, directory=str(tree))
                asked = ask("#include <x/y.h>\n", ("--gpu-architecture=compute_80", *given))
                trace = process.ask(asked, None).trace
                if paths:
                    assert trace is not None
                    found = [path for path in trace.files if path.endswith("y.h")]
                    asked_for = {os.path.normpath(os.path.join(tree, path)) for path in found}
                    assert asked_for == {os.path.normpath(f"{search.roots[1]}x/y.h")}, given


@pytest.mark.parametrize("changes", [False, True])
def test_changes_while_it_is_read(
    tmp_path: Path, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, looks = write(tmp_path / "x.h", "#define V 1\n"), iter(range(9))
    fstat = os.fstat

    def look(fd: int) -> os.stat_result:
        if changes and next(looks) == 1:  # after it was read
            write(header, "#define V 2 // longer\n")
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", look)
    answer = virtual_files.VirtualFiles([]).open(os.fsencode(header))
    monkeypatch.undo()
    assert answer is not None
    assert answer.content == b"#define V 1\n"
    assert (answer.stamp[:3] == (0, 0, 0)) is changes


# -- what differs from processor to processor --------------------------------------------------------


@pytest.mark.parametrize("path", ["/dev/null", "/", "file"])
def test_the_status_of_a_file_is_laid_out_as_libc_does(path: str, tmp_path: Path) -> None:
    place = tmp_path / path
    if path == "file":
        place.write_bytes(b"123")
        os.utime(place, ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "stat"):
        pytest.skip("glibc before 2.33 exports no stat")
    filled = ctypes.create_string_buffer(256)
    assert libc.stat(os.fsencode(place), filled) == 0
    ours = virtual_files.answer_of(place.stat()).status
    assert ours == filled.raw[: len(ours)]
