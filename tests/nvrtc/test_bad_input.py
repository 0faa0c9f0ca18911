"""Bad input and bad places: a clear error, or the kernel all the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, agree, agreed, python, run_python, write

import kcache
from kcache.errors import ArgumentTypeError, CompileOptionError

SEVEN = KERNEL.replace("V", "7")

if os.name == "nt":
    pytest.skip("needs POSIX permissions", allow_module_level=True)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["", " ", "\n\t\r\n"])
def test_an_empty_source(cache, source):
    with pytest.raises(kcache.ConfigError, match="source is empty"):
        cache.get_or_compile(source, (), ARCH)


@pytest.mark.parametrize("source", [None, b"__global__ void k() {}", 3, ["x"]])
@pytest.mark.parametrize("ask", ["get_or_compile", "lookup"])
def test_a_source_that_is_no_text(cache, ask, source):
    with pytest.raises(ArgumentTypeError, match="source is .*; allowed: text"):
        getattr(cache, ask)(source, (), ARCH)


def test_a_source_with_a_nul(cache):
    """The compiler would stop reading there, and silently compile the first part."""
    with pytest.raises(kcache.ConfigError, match="NUL character at position 53"):
        cache.get_or_compile(SEVEN + "\0 nonsense", (), ARCH)


def test_a_source_that_utf8_can_not_hold(cache):
    with pytest.raises(kcache.ConfigError, match="surrogate"):
        cache.get_or_compile(SEVEN + "// \udcff", (), ARCH)


@pytest.mark.usefixtures("nvrtc")
def test_a_source_in_other_scripts(cache):
    source = f"// größer als 😀\n{SEVEN}"
    agreed(cache, source)
    assert agreed(cache, source).cached


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"names": 3}, "names"),
        ({"names": [3]}, "name expression"),
        ({"names": ["a", ""]}, "name expression is empty"),
        ({"names": ["-use_fast_math"]}, "'-use_fast_math' looks like an option; allowed: "),
        ({"names": "a\0b"}, "NUL"),
        ({"names": b"a"}, "names"),
        ({"names": {"a"}}, "names"),
        ({"options": {"arch": 80}}, "CompileOptions"),
        ({"options": "sm_80"}, "CompileOptions"),
        ({"headers": ["x.h"]}, "headers"),
        ({"headers": {"x.h": b""}}, "headers"),
        ({"headers": {3: ""}}, "headers"),
        ({"headers": {"x.h": "\0"}}, "NUL"),
        ({"extra_key": "text"}, "extra_key"),
        ({"source_name": ""}, "source_name"),
        ({"source_name": Path("kernel.cu")}, "source_name"),
        ({"source_name": "a\0b"}, "NUL"),
    ],
)
def test_arguments_of_the_wrong_kind(cache, arguments, says):
    arguments = {"names": (), "options": ARCH, **arguments}
    for ask in (cache.get_or_compile, cache.lookup):
        with pytest.raises(kcache.ConfigError, match=says):
            ask(SEVEN, **arguments)
        with pytest.raises(kcache.ConfigError, match=says):  # the second time as the first
            ask(SEVEN, **arguments)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_99", "sm_10", "compute_55", "sm_80f", "sm_999"])
def test_an_arch_that_the_compiler_does_not_know(cache, arch):
    with pytest.raises(CompileOptionError) as caught:
        cache.get_or_compile(SEVEN, (), ARCH.replace(arch=arch))
    assert arch in str(caught.value)
    assert isinstance(caught.value, kcache.ConfigError)
    assert cache.entry_count == 0


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "extra", [["--no-such-option"], ["-Ofast"], [""], ["x"], ["--std"], ["-O3"]]
)
def test_an_option_that_the_compiler_does_not_know(cache, extra):
    with pytest.raises(kcache.CompileError) as caught:
        cache.get_or_compile(SEVEN, (), ARCH.replace(extra_options=extra))
    assert extra[0] in str(caught.value)
    assert cache.entry_count == 0


@pytest.mark.usefixtures("nvrtc")
def test_a_source_that_does_not_compile(cache):
    source = "__device__ int a;\n__device__ int b = nothing;\n__device__ int c = neither;\n"
    for _ in range(2):
        with pytest.raises(kcache.CompileError) as caught:
            cache.get_or_compile(source, (), ARCH, source_name="my kernel.cu")
        assert caught.value.source_name == "my kernel.cu"
        assert "my kernel.cu(2)" in str(caught.value)
        assert 'identifier "nothing" is undefined' in str(caught.value)
        assert 'identifier "neither" is undefined' in caught.value.log  # all of it
    assert cache.entry_count == 0
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.errors) == (2, 0, 0)


def test_the_bindings_are_not_installed(tmp_path, nvrtc):
    """They are needed to launch kernels, not to compile them."""
    code = """
    import sys
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "cuda" or name.startswith("cuda."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Missing())
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        del sys.modules[name]
    import kcache
    cache = kcache.KernelCache(sys.argv[1])
    options = kcache.CompileOptions(arch=80)
    print(bool(cache.get_or_compile("__global__ void k() {}", (), options).cubin))
    """
    assert python(code, tmp_path / "c").strip() == "True"


def test_the_library_is_not_installed(tmp_path, nvrtc):
    code = """
    import os, site, sys
    site.getsitepackages = lambda: [sys.argv[1]]
    site.ENABLE_USER_SITE = False
    for name in ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"):
        os.environ.pop(name, None)
    import kcache
    try:
        kcache.KernelCache(sys.argv[1]).get_or_compile(
            "__global__ void k() {}", (), kcache.CompileOptions(arch=80))
    except kcache.KcacheError as error:
        print(type(error).__name__, isinstance(error, ImportError), error)
    """
    said = python(code, tmp_path / "c")
    if not said:
        pytest.skip("there is an NVRTC in the system")
    assert said.startswith("CompilerNotFoundError True")
    assert "[cu13]' (CUDA 12: cu12)" in said


# -- headers and paths -----------------------------------------------------------------------------


@pytest.mark.usefixtures("nvrtc")
class TestHeaders:
    def test_an_include_path_that_appears_later(self, cache, tmp_path):
        write(tmp_path / "second/x.h", "#define V 1\n")
        options = ARCH.replace(include_paths=[tmp_path / "first/deep", tmp_path / "second"])
        source = "#include <x.h>\n" + KERNEL
        assert not agreed(cache, source, options).cached
        assert agreed(cache, source, options).cached
        (tmp_path / "first").mkdir()
        assert agreed(cache, source, options).cached
        (tmp_path / "first/deep").mkdir()
        assert agreed(cache, source, options).cached
        write(tmp_path / "first/deep/x.h", "#define V 2\n")
        assert not agreed(cache, source, options).cached

    def test_an_include_path_that_is_a_file(self, cache, tmp_path):
        write(tmp_path / "first", "no directory")
        write(tmp_path / "second/x.h", "#define V 1\n")
        options = ARCH.replace(include_paths=[tmp_path / "first", tmp_path / "second"])
        source = "#include <x.h>\n" + KERNEL
        agreed(cache, source, options)
        assert agreed(cache, source, options).cached
        (tmp_path / "first").unlink()
        write(tmp_path / "first/x.h", "#define V 2\n")
        assert not agreed(cache, source, options).cached

    def test_all_include_paths_missing(self, cache, tmp_path):
        options = ARCH.replace(include_paths=[tmp_path / "no", "neither"])
        assert not agreed(cache, SEVEN, options).cached
        assert agreed(cache, SEVEN, options).cached
        assert agree(cache, "#include <x.h>\n" + KERNEL, options) is None

    def test_a_header_vanishes_between_compile_and_lookup(self, cache, tmp_path):
        header = write(tmp_path / "inc/x.h", "#define V 1\n")
        options = ARCH.replace(include_paths=[tmp_path / "inc"])
        source = "#include <x.h>\n" + KERNEL
        agreed(cache, source, options)
        for remove in (header.unlink, lambda: shutil.rmtree(tmp_path / "inc")):
            remove()
            assert cache.lookup(source, (), options) is None
            with pytest.raises(kcache.CompileError, match=r"x\.h"):
                cache.get_or_compile(source, (), options)

    def test_a_header_becomes_a_directory(self, cache, tmp_path):
        header = write(tmp_path / "inc/x.h", "#define V 1\n")
        options = ARCH.replace(include_paths=[tmp_path / "inc"])
        source = "#include <x.h>\n" + KERNEL
        agreed(cache, source, options)
        header.unlink()
        header.mkdir()
        assert agree(cache, source, options) is None

    def test_a_header_that_is_no_text(self, cache, tmp_path):
        header = tmp_path / "inc/x.h"
        header.parent.mkdir()
        options = ARCH.replace(include_paths=[tmp_path / "inc"])
        source = "#include <x.h>\n" + KERNEL
        for content in (
            b"// \xff\xfe\n#define V 1\n",
            b"// \xff\xff\n#define V 1\n",
            b"#define V 2\n",
        ):
            header.write_bytes(content)
            assert not agreed(cache, source, options).cached
            assert agreed(cache, source, options).cached

    def test_headers_that_include_each_other(self, cache, tmp_path):
        write(tmp_path / "inc/a.h", "#pragma once\n#include <b.h>\n")
        header = write(tmp_path / "inc/b.h", "#pragma once\n#include <a.h>\n#define V 1\n")
        options = ARCH.replace(include_paths=[tmp_path / "inc"])
        source = "#include <a.h>\n" + KERNEL
        agreed(cache, source, options)
        assert agreed(cache, source, options).cached
        header.write_text("#pragma once\n#include <a.h>\n#define V 2\n")
        assert not agreed(cache, source, options).cached

    def test_the_working_directory_is_gone(self, tmp_path):
        code = """
        import os, sys
        from pathlib import Path
        from nvrtc.reference import *
        tree = Path(sys.argv[1])
        gone = tree / "gone"
        gone.mkdir()
        write(tree / "inc/x.h", "#define V 1\\n")
        os.chdir(gone)
        gone.rmdir()
        cache = kcache.KernelCache(tree / "cache")
        options = ARCH.replace(include_paths=[tree / "inc"])
        for source in (KERNEL.replace("V", "7"), "#include <x.h>\\n" + KERNEL):
            for change in ({}, {"lineinfo": True}):
                kernel = cache.get_or_compile(source, (), options.replace(**change))
                assert kernel.cubin == compile_fresh(source, options.replace(**change).flags()).cubin
        write(tree / "inc/x.h", "#define V 2\\n")
        agreed(cache, "#include <x.h>\\n" + KERNEL, options)
        """
        python(code, tmp_path)


# -- places ----------------------------------------------------------------------------------------

#: Before each: `tree`, a folder of the test. After each: the kernel must come, whatever the place.
_ASK = """
import logging, os, shutil, sys, tempfile
from pathlib import Path
import kcache
from nvrtc.reference import *

tree = Path(sys.argv[1])
write(tree / "inc/x.h", "#define V 1\\n")
(tree / "place").mkdir(exist_ok=True)
options = ARCH.replace(include_paths=[tree / "inc"])
sources = [KERNEL.replace("V", "7"), "#include <x.h>\\n" + KERNEL]

def become_user():
    with kcache.KernelCache(tree / "warm") as cache:
        kernels(cache)  # loads what the other user may not be allowed to read
    tempfile.tempdir = None
    os.setgid(65534)
    os.setuid(65534)
    if not (os.access(kcache.__file__, os.R_OK) and os.access(sys.executable, os.X_OK)):
        sys.exit(77)  # what is installed here is closed to other users

def kernels(cache):
    return [agreed(cache, source, options).cached for source in sources for _ in range(2)]
"""


def _mounting(code: str) -> str:
    return f"""
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(kind, target, flags=0, data=""):
    if libc.mount(kind.encode(), str(target).encode(), kind.encode(), flags, data.encode()):
        sys.exit(77)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(77)
{_ASK}
{code}
"""


def _in(tmp_path: Path, code: str, *, mounting: bool = False) -> str:
    # Not tmp_path itself: its parents are closed to the other user that some of these become.
    with tempfile.TemporaryDirectory(prefix=tmp_path.name) as folder:
        os.chmod(folder, 0o755)
        done = run_python(_mounting(code) if mounting else _ASK + code, folder)
    if done.returncode == 77:
        pytest.skip("not possible here: not root, no mount namespaces, or a closed environment")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_the_directory_is_a_file(tmp_path):
    write(tmp_path / "file", "")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(kcache.ConfigError, match="file"):
            kcache.KernelCache(place)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.usefixtures("nvrtc")
class TestPlaces:
    def test_read_only(self, tmp_path):
        code = """
mount("tmpfs", tree / "place")
with kcache.KernelCache(tree / "place/cache") as cache:
    assert kernels(cache) == [False, True] * 2
mount_ro = libc.mount(b"tmpfs", str(tree / "place").encode(), b"tmpfs", 0x21, b"")
assert mount_ro == 0
with kcache.KernelCache(tree / "place/cache") as cache:
    print(kernels(cache))
with kcache.KernelCache(tree / "place/other") as cache:
    print(kernels(cache), cache.stats().hits)
with kcache.KernelCache(tree / "place/cache", read_only=True) as cache:
    print(kernels(cache), cache.stats().errors)
"""
        out = _in(tmp_path, code, mounting=True).splitlines()
        assert out[0] == "[True, True, True, True]"
        assert out[2] == "[True, True, True, True] 0"

    def test_read_only_by_permissions(self, tmp_path):
        code = """
if os.getuid() != 0:
    sys.exit(77)
os.chown(tree / "place", 65534, 65534)
become_user()
with kcache.KernelCache(tree / "place/cache") as cache:
    assert kernels(cache) == [False, True] * 2
for folder, _, names in os.walk(tree / "place", topdown=False):
    for name in names:
        os.chmod(os.path.join(folder, name), 0o400)
    os.chmod(folder, 0o500)
with kcache.KernelCache(tree / "place/cache") as cache:
    print(kernels(cache))
    agreed(cache, sources[0] + "// another", options)
with kcache.KernelCache(tree / "place/none") as cache:
    kernels(cache)
for folder, _, _ in os.walk(tree / "place"):
    os.chmod(folder, 0o700)
"""
        assert _in(tmp_path, code) == "[True, True, True, True]"

    def test_unreadable_entries(self, tmp_path):
        code = """
if os.getuid() != 0:
    sys.exit(77)
os.chown(tree / "place", 65534, 65534)
become_user()
with kcache.KernelCache(tree / "place/cache") as cache:
    kernels(cache)
for folder, _, names in os.walk(tree / "place", topdown=False):
    for name in names:
        os.chmod(os.path.join(folder, name), 0)
with kcache.KernelCache(tree / "place/cache") as cache:
    kernels(cache)
    print(cache.stats().errors > 0)
"""
        assert _in(tmp_path, code) == "True"

    def test_somebody_elses(self, tmp_path):
        code = """
if os.getuid() != 0:
    sys.exit(77)
(tree / "place/cache").mkdir(mode=0o777)
os.chmod(tree / "place/cache", 0o777)
become_user()
try:
    kcache.KernelCache(tree / "place/cache")
except kcache.ConfigError as error:
    print(error)
"""
        said = _in(tmp_path, code)
        assert "belongs to user 0, and you are user 65534" in said

    def test_a_default_directory_of_somebody_else(self, tmp_path):
        """Nobody named it, so another one is taken."""
        code = """
if os.getuid() != 0:
    sys.exit(77)
(tree / "place/kcache").mkdir(mode=0o777)
(tree / "tmp").mkdir()
os.chmod(tree / "tmp", 0o1777)
become_user()
os.environ.update(XDG_CACHE_HOME=str(tree / "place"), TMPDIR=str(tree / "tmp"))
with kcache.KernelCache() as cache:
    assert kernels(cache) == [False, True] * 2
    assert tree / "tmp" in cache.directory.parents
"""
        _in(tmp_path, code)

    def test_others_can_write_to_it(self, tmp_path):
        place = tmp_path / "place"
        place.mkdir(mode=0o777)
        os.chmod(place, 0o777)
        with pytest.raises(kcache.ConfigError, match="chmod go-w"):
            kcache.KernelCache(place)

    @pytest.mark.parametrize("size", [4, 16, 24, 40, 64])
    def test_a_full_disk(self, tmp_path, size):
        code = f"""
mount("tmpfs", tree / "place", 0, "size={size}k")
with kcache.KernelCache(tree / "place/cache") as cache:
    kernels(cache)
    for number in range(12):
        agreed(cache, sources[number % 2] + f"// {{number}}", options)
    hits = [agreed(cache, sources[n % 2] + f"// {{n}}", options).cached for n in range(12)]
    print(cache.stats().errors > 0, cache.stats().corrupt)
with kcache.KernelCache(tree / "place/cache") as cache:
    for number in range(12):
        agreed(cache, sources[number % 2] + f"// {{number}}", options)
    assert cache.stats().corrupt == 0
"""
        assert _in(tmp_path, code, mounting=True) == "True 0"

    def test_no_inode_is_left(self, tmp_path):
        code = """
mount("tmpfs", tree / "place", 0, "nr_inodes=6")
with kcache.KernelCache(tree / "place/cache") as cache:
    kernels(cache)
    agreed(cache, sources[1] + "// another", options)
"""
        _in(tmp_path, code, mounting=True)

    @pytest.mark.parametrize("put_back", [False, True])
    def test_deleted_while_open(self, tmp_path, put_back):
        code = f"""
with kcache.KernelCache(tree / "place/cache") as cache:
    assert kernels(cache) == [False, True] * 2
    shutil.rmtree(tree / "place/cache")
    if {put_back}:
        (tree / "place/cache").mkdir(mode=0o700)
    cache.clear_memory()
    kernels(cache)
    agreed(cache, sources[1] + "// another", options)
    cache.stats(); cache.total_stats(); cache.print_info(); cache.entry_count; cache.trim(); cache.clear()
    kernels(cache)
kcache.KernelCache(tree / "place/cache").close()
"""
        _in(tmp_path, code)

    def test_replaced_by_a_file_while_open(self, tmp_path):
        code = """
with kcache.KernelCache(tree / "place/cache") as cache:
    kernels(cache)
    shutil.rmtree(tree / "place/cache")
    (tree / "place/cache").write_text("")
    cache.clear_memory()
    kernels(cache)
    agreed(cache, sources[1] + "// another", options)
"""
        _in(tmp_path, code)

    def test_entries_replaced_by_other_things(self, tmp_path):
        code = """
def entries():
    return [p for p in (tree / "place/cache").rglob("*") if p.is_file() and p.stat().st_size > 600
            and p.parent.parent.name != "place"]
kinds = [lambda p: p.mkdir(), lambda p: p.symlink_to(tree / "nowhere"), lambda p: p.symlink_to(p),
         lambda p: os.mkfifo(p), lambda p: p.write_bytes(b""), lambda p: p.symlink_to("/dev/zero")]
for number, kind in enumerate(kinds):
    place = tree / f"place/cache"
    with kcache.KernelCache(place) as cache:
        for source in sources:
            agreed(cache, source, options)
        found = entries()
        assert len(found) >= 3, found
        for path in found:
            path.unlink()
            kind(path)
        cache.clear_memory()
        for source in sources:
            agreed(cache, source, options)
            agreed(cache, source, options)
    shutil.rmtree(place)
"""
        _in(tmp_path, code)
