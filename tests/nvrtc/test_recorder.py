"""The record: what it lists is what strace lists of a bare compile, for real kernels."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from nvrtc.real_kernels import KERNELS
from nvrtc.reference import ARCH, KERNEL, Fresh, compile_clean, write
from nvrtc.talk import ask, fresh_of, worker

from kcache import CompileError, KernelCache
from kcache.nvrtc import compiler
from kcache.nvrtc.manifest import MAX_SETS
from kcache.nvrtc.workers.messages import Record, Status

pytestmark = [
    pytest.mark.usefixtures("nvrtc"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no record"),
]

#: Compiles by `ctypes` alone, between two looks at paths that nothing else looks at.
_BARE = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from kcache.nvrtc.workers.nvrtc import Nvrtc
library, source, name, flags, names = json.loads(sys.stdin.read())
nvrtc = Nvrtc(library)
nvrtc.version(), nvrtc.supported_archs()
os.path.exists("/(begin)")
nvrtc.compile(source.encode(), name.encode(), [f.encode() for f in flags],
              names=[n.encode() for n in names], headers={})
os.path.exists("/(end)")
"""
_CALL = re.compile(
    r'(?P<call>\w+)\((?:AT_FDCWD, |\d+, )?"(?P<path>[^"]*)".*\)\s+= (?P<result>-?\d+)(?: (?P<error>E\w+))?'
)
#: What the loader, the C library and the compiler's threads ask, and no text of a kernel can change.
_LOADER = re.compile(r"\.so|/(tls|glibc-hwcaps|haswell|avx512_1|x86_64|aarch64|atomics)(/|$)")
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/localtime", "/usr/share/zoneinfo")


class Seen(NamedTuple):
    """Paths that were opened, and paths at which nothing was."""

    opened: set[str]
    absent: set[str]


def straced(folder: Path, source: str, flags: tuple[str, ...], names: tuple[str, ...]) -> Seen:
    """Return what strace sees of a bare compile in a process of its own."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    out = folder / "strace"
    calls = "trace=open,openat,stat,lstat,newfstatat,access,faccessat,faccessat2,readlink,statx"
    request = [compiler.find().path, source, "kernel.cu", list(flags), list(names)]
    tracing = ("strace", "-f", "-s", "4096", "-e", calls, "-o", str(out))
    done = subprocess.run(
        [*tracing, sys.executable, "-c", _BARE, json.dumps(sys.path)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
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
        if _LOADER.search(match["path"]):  # of libcuda, for NVRTC's own cache
            continue
        if match["error"] in ("ENOENT", "ENOTDIR"):
            seen.absent.add(match["path"])
        elif match["call"].startswith("open") and int(match["result"]) >= 0:
            seen.opened.add(match["path"])
    return seen


def recorded(record: Record) -> Seen:
    absent = {path for path, answer in record.files.items() if answer.kind in "-a"}
    return Seen({path for path, answer in record.files.items() if answer.opened}, absent)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_record_is_what_strace_sees(tmp_path: Path, name: str) -> None:
    kernel = KERNELS[name]
    flags = kernel.flags()
    if flags is None:
        pytest.skip(f"the headers of {name} are not installed")
    clean = compile_clean(kernel.source, flags, names=kernel.names)
    if clean.failed:
        pytest.skip(f"{name} does not compile here: {clean.log[:300]}")
    with worker() as process:
        reply = process.ask(ask(kernel.source, flags, names=kernel.names), None)
    assert reply.status == Status.COMPILED
    made = fresh_of(reply)
    assert made.ptx is not None
    assert clean.ptx is not None
    assert _same_names(made.ptx) == _same_names(clean.ptx)
    assert made.log == clean.log
    assert reply.record is not None
    assert reply.record.unfollowed == ""
    mine = recorded(reply.record)
    theirs = straced(tmp_path, kernel.source, flags, kernel.names)
    assert len(mine.opened) > 1
    there = {path for path, answer in reply.record.files.items() if answer.kind == "f"}
    assert mine.opened <= theirs.opened <= there  # some are opened, and nothing of them is read
    assert mine.absent == theirs.absent


#: Names of what has internal linkage: a number of the compile, the process id, and what follows.
_INTERNAL = re.compile(rb"_kernel_cu_([0-9a-f]{8})_(\d+)")


def _same_names(ptx: bytes) -> bytes:
    """Return PTX in which the names that differ from compile to compile are alike."""
    found = set(_INTERNAL.findall(ptx))
    for each in {number for number, _ in found}:
        digits = os.path.commonprefix([after for n, after in found if n == each])  # noqa: RUF071
        ptx = ptx.replace(each + b"_" + digits, b"ID")
    # The lengths of such names are written before them.
    return re.sub(rb"\d+(?=_INTERNAL_|_GLOBAL__N_)", b"", ptx)


def test_small_sources_too(tmp_path: Path, tree: Path) -> None:
    write(tree / "inc/x.h", '#pragma once\n#include "y.h"\n#include "../inc/x.h"\n')
    write(tree / "inc/y.h", '#if __has_include(<z.h>) || __has_include("w.h")\n#endif\n')
    source = '#include "x.h"\n#include <y.h>\n' + KERNEL.replace("V", "1")
    flags = (*ARCH.flags(), "-Ifirst", "-Iinc", "-include", "y.h")
    with worker() as process:
        reply = process.ask(ask(source, flags), None)
    assert reply.record is not None
    theirs = straced(tmp_path, source, flags, ())
    mine = recorded(reply.record)
    assert mine.opened == theirs.opened
    assert mine.absent == theirs.absent


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KERNELS)
def test_a_real_kernel_hits_and_follows(
    cache: KernelCache, tmp_path: Path, name: str, long: bool
) -> None:
    """Headers of the kernel are shadowed and edited in a directory before the others."""
    from kcache import CompileOptions

    if not long and name not in ("cub reduce", "cute", "cooperative groups", "std"):
        pytest.skip("with --long")
    kernel = KERNELS[name]
    flags = kernel.flags()
    if flags is None or compile_clean(kernel.source, flags, names=kernel.names).failed:
        pytest.skip(f"{name} does not compile here")
    first = tmp_path / "first"
    first.mkdir()
    paths = [f.removeprefix("--include-path=") for f in flags if f.startswith("--include-path=")]
    options = CompileOptions(
        arch="sm_90", std=17, include_paths=[first, *paths], extra_options=kernel.extra
    )

    def fresh() -> Fresh:
        return compile_clean(source, options.flags(), names=kernel.names)

    def check(expected: Fresh) -> bool:
        if expected.failed:  # a header that has no guard was edited
            with pytest.raises(CompileError):
                cache.get_or_compile(source, kernel.names, options)
            return False
        made = cache.get_or_compile(source, kernel.names, options)
        assert made.ptx is not None
        assert expected.ptx is not None
        assert _same_names(made.ptx) == _same_names(expected.ptx)
        if not _INTERNAL.search(expected.ptx):  # no two compiles of it are equal
            assert made.cubin == expected.cubin
        return made.cached

    source = kernel.source
    plain = fresh()
    assert not check(plain)
    assert check(plain)
    dependencies = cache.get_or_compile(source, kernel.names, options).dependencies
    steps = 40 if long else 3
    chosen = list(dependencies[:: max(1, len(dependencies) // steps)])
    chosen += random.Random(name).choices(dependencies, k=max(0, steps - len(chosen)))
    for number, path in enumerate(chosen):
        folder = next((p for p in paths if path.startswith(f"{p}/")), None)
        if folder is None:
            continue
        if number % MAX_SETS == MAX_SETS - 1:  # a request keeps no more header sets
            source += "// another request\n"
            assert not check(plain)
        text = Path(path).read_text()
        if number % 2:  # the code differs where the header has no guard, or is read at all
            text += f"\n__device__ int edited_{number};\n"
        shadow = write(first / path.removeprefix(f"{folder}/"), text)
        check(fresh())
        shadow.unlink()
        assert check(plain)
