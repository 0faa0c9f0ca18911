"""Odd systems: even without descriptors or /proc, there is a right kernel or a clear error.

Each test runs a program in a new process, and fails if the program fails.
"""

import subprocess
from pathlib import Path

import pytest
from core.helpers import output_of, python, run

pytestmark = pytest.mark.usefixtures("nvrtc")

#: Makes `tree`, `options`, `source` and `cache`; `check()` asserts right kernels, hits and misses.
_SETUP = """
import os, resource, shutil, sys, tempfile
from pathlib import Path
import kcache
from nvrtc.reference import *

tree = Path(sys.argv[1])
write(tree / "inc/x.h", '#include "y.h"\\n')
write(tree / "inc/y.h", "#define V 1\\n")
options = PTX.replace(include_paths=[tree / "inc"])
source = "#include <x.h>\\n" + KERNEL
cache = kcache.KernelCache(tree / "cache")

def check():
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    write(tree / "inc/y.h", "#define V 2\\n")
    assert not agreed(cache, source, options).cached
    write(tree / "inc/y.h", "#define V 1\\n")
    assert agreed(cache, source, options).cached
    assert cache.stats().errors == 0, cache.stats()
"""


def survives(tmp_path: Path, code: str) -> str:
    return output_of(_SETUP + code, tmp_path)


def test_nothing_is_left_behind(tmp_path):
    (tmp_path / "tmp").mkdir()
    code = """
before = len(os.listdir("/proc/self/fd"))
check()
cache.engine.flush()  # on a slow machine, the file of counts is opened meanwhile
after = len(os.listdir("/proc/self/fd"))
for number in range(2):
    agreed(cache, source + f"// {number}", options)
assert len(os.listdir("/proc/self/fd")) <= after
if os.fork() == 0:
    agreed(cache, source + "// child", options)
    sys.exit()  # and runs what the parent wants to be run at its end
os.wait()
agreed(cache, source + "// parent", options)
"""
    output_of(_SETUP + code, tmp_path, environ={"TMPDIR": str(tmp_path / "tmp")})
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("free", [1, 4])
def test_few_descriptors_are_left_before_the_first_use(tmp_path, free):
    """Once, an import in kcache raised OSError, and a half-started worker IndexError."""
    code = f"""
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
for fd in taken[:{free}]:
    os.close(fd)
try:
    kernel = cache.get_or_compile(source, (), options)
except kcache.KcacheError as error:
    assert {free} < 2 and "no file descriptors left" in str(error), error
    kernel = None
for fd in taken[{free}:]:
    os.close(fd)
assert kernel is None or kernel.ptx == compile_fresh(source, options.flags()).ptx
agreed(cache, source, options)
"""
    survives(tmp_path, code)


def test_a_path_of_the_process_itself(tmp_path):
    """A worker has other files at such a path, or none. The kernel is returned, but not cached."""
    code = """
held = os.open(tree / "inc", os.O_RDONLY)
by_option = source, PTX.replace(include_paths=[f"/proc/self/fd/{held}"])
by_source = f'#include "/dev/fd/{held}/x.h"\\n' + KERNEL, options
for source, options in (by_option, by_source):
    kernel = cache.get_or_compile(source, (), options)
    assert not kernel.cached
    assert b".entry k" in kernel.ptx
    assert cache.lookup(source, (), options) is None
assert cache.stats().uncacheable == 2
"""
    survives(tmp_path, code)


def _unshared(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run code in its own mount namespace, or skip the test if that is not possible."""
    probe = run("unshare", "--mount", "true")
    if probe.returncode:
        pytest.skip(f"no mount namespace: {probe.stderr.strip()}")
    wrapped = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(kind, target, flags=0, data=""):
    if libc.mount(kind.encode(), str(target).encode(), kind.encode(), flags, data.encode()):
        sys.exit(77)
os.unshare(0x20000) if hasattr(os, "unshare") else libc.unshare(0x20000)
libc.mount(b"none", b"/", None, 0x44000, None)  # private
{code}
"""
    done = python(wrapped, *args)
    if done.returncode == 77:
        pytest.skip("mounting is not possible here")
    return done


def test_no_proc(tmp_path):
    """Without /proc the compiler's import table can't be found, so nothing is cached."""
    code = f"""{_SETUP}
mount('tmpfs', '/proc')
assert not os.listdir('/proc')
for value in (1, 2):
    write(tree / "inc/y.h", f"#define V {{value}}\\n")
    for _ in range(2):
        assert not agreed(cache, source, options).cached
assert cache.stats().uncacheable == 4
"""
    done = _unshared(code, tmp_path)
    assert done.returncode == 0, done.stderr


_READ = """
import sys
import kcache
from kcache.nvrtc import files
from nvrtc.reference import ARCH, KERNEL

files.FRESH_NS = -(10**12)  # a file that was written just now is trusted, too
opened = []
sys.addaudithook(lambda name, given: opened.append(given[0]) if name == "open" else None)
options = ARCH.replace(include_paths=[f"{sys.argv[1]}/image"])
with kcache.KernelCache(f"{sys.argv[1]}/cache-{sys.argv[2]}") as cache:
    kernel = cache.get_or_compile("#include <y.h>\\n" + KERNEL, (), options)
print(kernel.cached, f"{sys.argv[1]}/image/y.h" in opened)
"""


def test_threads_with_different_headers(tmp_path):
    """No trace has a header of another thread, even while other compiles fail inside a header."""
    code = """
import threading
for n in range(4):
    write(tree / f"inc/a{n}.h", f'#include "b{n}.h"\\n')
    write(tree / f"inc/b{n}.h", f"#define V {n}\\n")
write(tree / "inc/bad.h", "#error no\\n")
wrong = []
def work(n):
    for again in range(2):
        try:
            cache.get_or_compile(f"#include <bad.h>\\n// {n} {again}" + KERNEL, (), options)
        except kcache.CompileError:
            pass
        mine = f"#include <a{n}.h>\\n// {again}\\n" + KERNEL
        kernel = cache.get_or_compile(mine, (), options)
        names = [os.path.basename(path) for path in kernel.dependencies]
        if names != [f"a{n}.h", f"b{n}.h"]:
            wrong.append((n, names))
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
for n in range(4):
    mine = f"#include <a{n}.h>\\n// 1\\n" + KERNEL
    assert agreed(cache, mine, options).cached
    write(tree / f"inc/b{n}.h", f"#define V {n + 100}\\n")
    assert not agreed(cache, mine, options).cached
"""
    survives(tmp_path, code)


def test_headers_on_read_only_images_are_read_again(tmp_path):
    """Another image may later have a file with the same times, inode and device at that path."""
    (tmp_path / "image").mkdir()
    code = f"""
import subprocess
image = sys.argv[1] + "/image"
mount("tmpfs", image)
with open(image + "/y.h", "w") as file:
    file.write("#define V 1\\n")
for flags in (32, 32 | 1):  # MS_REMOUNT, MS_RDONLY
    libc.mount(b"none", image.encode(), b"none", flags, None)
    for _ in range(2):
        each = [sys.executable, "-c", {_READ!r}, sys.argv[1], str(flags)]
        subprocess.run(each, check=True)
"""
    done = _unshared(code, tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert [cached for cached, _ in told] == ["False", "True"] * 2
    assert [opened for _, opened in told] == [*["False"] * 3, "True"]
