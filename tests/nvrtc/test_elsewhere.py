"""A child that is forked while another thread of its parent compiles can compile, and never hangs.

Its compiles run in new processes, whose outcome is that of the compiler in this one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import fork, wait
from nvrtc.reference import ARCH, KERNEL, compile_fresh, python, working_directory, write

import kcache
from kcache import CompileError, CompileOptionError, KernelCache
from kcache.errors import CompilerNotFoundError
from kcache.nvrtc import compiler, elsewhere, library

pytestmark = [
    pytest.mark.usefixtures("nvrtc"),
    pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork"),
]

FLAGS = ARCH.flags()


def slow(count: int) -> str:
    """Returns a source that the compiler's frontend works on for `count / 20` seconds."""
    return "\n".join(
        f"template<int N> struct S{n} {{ static constexpr int v = S{n}<N-1>::v + 1; }};\n"
        f"template<> struct S{n}<0> {{ static constexpr int v = 0; }};\n"
        f"static_assert(S{n}<190>::v == 190);"
        for n in range(count)
    )


@contextmanager
def another_compiles() -> Iterator[None]:
    """Has a thread in mid-compile: it has used more processor time than anything before takes."""
    compiler.version()
    made: list[compiler.Compiled] = []
    thread = threading.Thread(
        target=lambda: made.append(compiler.compile_program(slow(30), FLAGS, source_name="slow.cu"))
    )
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    while time.clock_gettime(clock) < 0.2:
        time.sleep(0)
    yield
    thread.join()
    assert made


def in_child(work: Callable[[], object]) -> None:
    """Runs `work` in a child that is forked in the middle of a compile; it has to succeed."""

    def checked() -> None:
        assert compiler._forked_inside
        work()
        with pytest.raises(ChildProcessError):  # no process is left, not even a dead one
            os.waitpid(-1, os.WNOHANG)

    with another_compiles():
        pid = fork(checked)
    assert wait(pid) == 0
    assert not compiler._forked_inside
    assert not compiler._uses


# -- the child -----------------------------------------------------------------------------------


def test_the_child_compiles_and_the_parent_finds_it(cache: KernelCache) -> None:
    source = "template<int N> __global__ void k(int* out) { *out = N; }"
    in_child(lambda: cache.get_or_compile(source, "k<3>", ARCH))
    kernel = cache.get_or_compile(source, "k<3>", ARCH)
    fresh = compile_fresh(source, FLAGS, names=["k<3>"])
    assert kernel.cached
    assert (kernel.ptx, kernel.cubin) == (fresh.ptx, fresh.cubin)
    assert kernel.lowered_names == fresh.lowered_names


def test_the_child_tracks_headers(cache: KernelCache, tmp_path: Path) -> None:
    write(tmp_path / "inc/x.h", '#define NEXT "y.h"\n#include NEXT\n')
    write(tmp_path / "inc/y.h", "#define V 1\n")
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    source = "#include <x.h>\n" + KERNEL

    def work() -> None:
        before = len(os.listdir("/proc/self/fd"))
        assert not cache.get_or_compile(source, (), options).cached
        write(tmp_path / "inc/y.h", "#define V 2\n")
        assert not cache.get_or_compile(source, (), options).cached
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the cache's own

    in_child(work)
    for value in (2, 1):
        write(tmp_path / "inc/y.h", f"#define V {value}\n")
        kernel = cache.get_or_compile(source, (), options)
        assert kernel.cached
        assert kernel.ptx == compile_fresh(source, options.flags()).ptx
        assert sorted(map(os.path.basename, kernel.dependencies)) == ["x.h", "y.h"]
    write(tmp_path / "inc/y.h", "#define V 3\n")
    assert not cache.get_or_compile(source, (), options).cached


def test_the_child_is_told_what_is_wrong(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "inc").mkdir()
    (tmp_path / "here").mkdir()
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    source = "#include <missing.h>\n" + KERNEL

    def work() -> None:
        with working_directory(tmp_path / "here"):
            for bad, has in ((source, options), ("int f(", ARCH)):
                with pytest.raises(CompileError) as caught:
                    cache.get_or_compile(bad, (), has, source_name="bad.cu")
                fresh = compile_fresh_elsewhere(bad, has)
                assert caught.value.log == fresh
                assert caught.value.source_name == "bad.cu"
            with pytest.raises(CompileOptionError, match="sm_99' is not known"):
                cache.get_or_compile(KERNEL, (), ARCH.replace(arch="sm_99"))
            cache.get_or_compile('extern "C" __global__ void k() {}', (), ARCH)
        assert not list((tmp_path / "here").iterdir())

    in_child(work)


def compile_fresh_elsewhere(source: str, options: kcache.CompileOptions) -> str:
    """Returns the log of plain NVRTC, asked in an interpreter of its own."""
    code = """
import sys
from nvrtc.reference import compile_fresh
print(compile_fresh(sys.argv[1], sys.argv[2:], source_name="bad.cu").log, end="")
"""
    return python(code, source, *options.flags())


def test_the_child_compiles_many_at_once(cache: KernelCache) -> None:
    sources = [f'extern "C" __global__ void k{n}() {{}}' for n in range(4)]

    async def ask() -> list[bool]:
        asked = [cache.aget_or_compile(source + "\n", (), ARCH) for source in sources]
        return [kernel.cached for kernel in await asyncio.gather(*asked)]

    def work() -> None:
        many = cache.compile_many([(source, (), ARCH) for source in (*sources, "junk")], jobs=2)
        assert [isinstance(each, CompileError) for each in many] == [False] * 4 + [True]
        assert asyncio.run(ask()) == [False] * 4

    in_child(work)
    assert all(cache.get_or_compile(source, (), ARCH).cached for source in sources)


def test_a_child_of_the_child(cache: KernelCache) -> None:
    def work() -> None:
        assert wait(fork(lambda: cache.get_or_compile(KERNEL, (), options))) == 0
        assert cache.get_or_compile(KERNEL, (), options).cached

    options = ARCH.replace(defines={"V": "1"})
    in_child(work)


def test_the_child_does_without_precompiled_headers(cache: KernelCache, tmp_path: Path) -> None:
    write(tmp_path / "x.h", "#define V 1\n")
    options = ARCH.replace(include_paths=[tmp_path], precompiled_headers=True)

    def work() -> None:
        for n in range(2):
            source = f"#include <x.h>\n{KERNEL}// {n}"
            kernel = cache.get_or_compile(source, (), options)
            plain = options.replace(precompiled_headers=False)
            assert (
                kernel.cubin
                == elsewhere.compile_program(
                    source, plain.flags(), names=(), headers={}, source_name="kernel.cu"
                ).cubin
            )

    in_child(work)


def test_a_child_forked_between_compiles_uses_its_own_nvrtc() -> None:
    def work() -> None:
        assert not compiler._forked_inside
        sys.executable = ""
        compiler.compile_program("", FLAGS, source_name="kernel.cu")

    compiler.compile_program("", FLAGS, source_name="kernel.cu")
    assert wait(fork(work)) == 0


def test_a_child_forked_while_nvrtc_is_loaded(tmp_path: Path) -> None:
    """Its import would wait for the parent's thread."""
    code = """
import faulthandler, os, sys, threading
from importlib.util import find_spec
import kcache
from nvrtc.reference import ARCH
begun, go = threading.Event(), threading.Event()
class Held:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "cuda.bindings.nvrtc":
            return None
        sys.meta_path.remove(Held)
        spec = find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (begun.set(), go.wait(), load(module))
        return spec
sys.meta_path.insert(0, Held)
cache = kcache.KernelCache(sys.argv[1])
source = 'extern "C" __global__ void k() {}'
thread = threading.Thread(target=cache.get_or_compile, args=(source, (), ARCH), daemon=True)
thread.start()
begun.wait()
import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if pid == 0:
    faulthandler.dump_traceback_later(50, exit=True)
    assert not cache.get_or_compile(source + "//child", (), ARCH).cached
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
go.set()
thread.join()
print(cache.get_or_compile(source + "//child", (), ARCH).cached)
"""
    assert python(code, tmp_path / "cache").strip() == "True"


def test_without_standard_streams_there_is_no_trace_but_a_kernel(tmp_path: Path) -> None:
    """The trace's file then has the number of a standard stream."""
    code = """
import os, sys
from pathlib import Path
import kcache
from kcache.nvrtc import compiler
from nvrtc.reference import *
tree = Path(sys.argv[1])
write(tree / "inc/x.h", "#define V 1\\n")
options = ARCH.replace(include_paths=[tree / "inc"])
source = "#include <x.h>\\n" + KERNEL
compiler._forked_inside = True
with kcache.KernelCache(tree / "cache") as cache:
    cache.get_or_compile(source, (), options)
    os.closerange(0, 3)
    kernel = cache.get_or_compile(source + "// 2", (), options)
    (tree / "done").write_text(os.path.basename(kernel.dependencies[0]))
"""
    python(code, tmp_path)
    assert (tmp_path / "done").read_text() == "x.h"


# -- the outcome ---------------------------------------------------------------------------------

_TEMPLATE = '#include "a.h"\ntemplate<int N> __global__ void k(int* out) { *out = N + V; }\n'


@pytest.mark.parametrize(
    "options",
    [
        ARCH,
        ARCH.replace(arch="compute_80"),
        ARCH.replace(lto=True),
        ARCH.replace(debug=True, defines={"W": "a b'c\"d"}),
    ],
    ids=["cubin", "ptx", "lto", "debug"],
)
def test_the_outcome_is_the_same(options: kcache.CompileOptions) -> None:
    # Longer than a pipe holds, and a warning in the log.
    source = _TEMPLATE + "#warning \N{SNOWMAN}\n" + "// filled up\n" * 20_000
    outcomes = [
        each(
            source,
            options.flags(),
            names=["k<1>", "&k<2>"],
            headers={"a.h": "#define V 1\n" + "//\n" * 50_000},
            source_name="a kernel.cu",
        )
        for each in (compiler.compile_program, elsewhere.compile_program)
    ]
    mine, other = ((o.ptx, o.cubin, o.ltoir, o.lowered_names, o.log) for o in outcomes)
    assert mine == other
    assert "\N{SNOWMAN}" in outcomes[1].log
    assert outcomes[1].seconds > 0


def test_the_working_directory_is_the_same(tmp_path: Path) -> None:
    write(tmp_path / "inc/x.h", "#define V 1\n")
    # Nothing here is imported.
    write(tmp_path / "json.py", "raise SystemExit")
    with working_directory(tmp_path):
        flags = (*FLAGS, "--include-path=inc")
        made = elsewhere.compile_program(
            "#include <x.h>\n" + KERNEL, flags, names=(), headers={}, source_name="kernel.cu"
        )
    assert made.cubin


@pytest.mark.parametrize(
    ("source", "flags", "names"),
    [
        ("int f(", FLAGS, ()),
        ("", ("--gpu-architecture=sm_1",), ()),
        ("", (*FLAGS, "--nonsense"), ()),
        ("", FLAGS, ("missing",)),
    ],
    ids=["source", "arch", "option", "name"],
)
def test_the_errors_are_the_same(
    source: str, flags: tuple[str, ...], names: tuple[str, ...]
) -> None:
    caught = []
    for each in (compiler.compile_program, elsewhere.compile_program):
        with pytest.raises(CompileError) as raised:
            each(source, flags, names=names, headers={}, source_name="bad.cu")
        error = raised.value
        caught.append((type(error), str(error), error.log, error.source_name))
    assert caught[0] == caught[1]


def test_what_it_tells_of_the_compiler_is_the_same(nvrtc: tuple[int, int]) -> None:
    assert elsewhere.version() == nvrtc
    assert elsewhere.supported_archs() == compiler.supported_archs()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    compile_elsewhere("#warning here\n")
    with pytest.raises(CompileError):
        compile_elsewhere("junk")
    assert capfd.readouterr() == ("", "")


def compile_elsewhere(source: str = "") -> compiler.Compiled:
    return elsewhere.compile_program(source, FLAGS, names=(), headers={}, source_name="kernel.cu")


# -- no such process -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", None, "/usr/sbin/uwsgi"], ids=["empty", "none", "embedding"])
def test_without_an_interpreter(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(CompilerNotFoundError, match=r"forked while another .* sys\.executable"):
        compile_elsewhere()


def test_a_frozen_program_is_not_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(CompilerNotFoundError, match="interpreter"):
        compile_elsewhere()


def test_an_interpreter_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(CompilerNotFoundError, match="can't be started .*No such file"):
        compile_elsewhere()


def test_an_interpreter_that_finds_no_kcache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [os.path.dirname(os.__file__)])
    with pytest.raises(CompilerNotFoundError, match="status 1: ModuleNotFoundError: .*kcache"):
        compile_elsewhere()


def test_a_library_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.find()
    assert found is not None
    monkeypatch.setattr(library, "find", lambda: found._replace(identity="nvrtc other"))
    with pytest.raises(CompilerNotFoundError, match="not what it was"):
        compile_elsewhere()


def interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program in the place of the interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "was killed by signal 9"),
        ("exit 0", "ended with status 0"),
        ("cat > /dev/null; echo out of memory >&2; exit 3", "status 3: out of memory"),
        ("printf '\\000kcache\\000'; exit 3", "ended with status 3 in its answer"),
        ("printf '\\000kcache\\000[{}, [5]]\\nabc'", "ended with status 0 in its answer"),
    ],
)
def test_a_process_that_ends_without_an_answer(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter(tmp_path, monkeypatch, script)
    with pytest.raises(CompilerNotFoundError, match=reason):
        compile_elsewhere("// longer than a pipe holds\n" * 20_000)


def test_what_is_printed_at_an_interpreters_start_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter(tmp_path, monkeypatch, f'echo "[{{}}, []]"; exec "{sys.executable}" "$@"')
    assert compile_elsewhere(KERNEL.replace("V", "1")).cubin


def test_a_pipe_that_somebody_else_holds_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process does that another thread forks while the pipe is made."""
    interpreter(tmp_path, monkeypatch, f"sleep 600 & echo $! > {tmp_path}/pid; kill -9 $$")
    try:
        with pytest.raises(CompilerNotFoundError, match="was killed by signal 9"):
            compile_elsewhere("// longer than a pipe holds\n" * 20_000)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_an_interrupt_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "begun")
    # It has read to the end, so it is being waited for.
    script = f"cat > /dev/null; echo $$ > {tmp_path}/begun; exec sleep 600"
    interpreter(tmp_path, monkeypatch, script)
    pids: list[int] = []

    def interrupt() -> None:
        pids.append(int((tmp_path / "begun").read_text()))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_elsewhere()
    thread.join()
    assert not Path(f"/proc/{pids[0]}").exists()


def test_the_process_ends_with_the_one_that_waits(tmp_path: Path) -> None:
    """It would go on for minutes."""
    with another_compiles():
        pid = fork(lambda: compile_elsewhere(slow(4000)))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    started = ""
    while not started:
        started = children.read_text().strip()
    environment = Path(f"/proc/{started}/status")
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    while _runs(environment):
        time.sleep(0)


def _runs(status: Path) -> bool:
    """Tells whether a process runs; one that has ended may stay until its new parent looks."""
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
