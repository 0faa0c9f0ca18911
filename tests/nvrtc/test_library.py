"""The compiler's identity: a kernel is served only to the compiler that would make it."""

import mmap
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from core.helpers import output_of

from kcache.nvrtc import library
from kcache.nvrtc.workers.nvrtc import Nvrtc

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture(scope="module")
def installed(nvrtc) -> library.Library:
    found = library.find()
    assert found is not None
    return found


def _copy(installed: library.Library, folder: Path) -> Path:
    """Copy NVRTC to where a wheel would put it below `folder`, and change its build id."""
    lib = folder / Path(*Path(installed.path).parts[-4:-1])
    lib.mkdir(parents=True)
    for name in os.listdir(Path(installed.path).parent):
        if name.startswith(("libnvrtc.so", "libnvrtc-builtins.so")):
            shutil.copy(Path(installed.path).parent / name, lib)
    path = lib / Path(installed.path).name
    _change_build_id(path)
    return path


def _change_build_id(path: Path) -> None:
    identity = library.build_id(str(path))
    assert identity is not None
    old = bytes.fromhex(identity)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        image[image.find(old)] ^= 1
    assert library.build_id(str(path)) != identity


_WITHOUT_BUILD_ID = """
import sys
from kcache.nvrtc import library
print(library.at(sys.argv[1]).identity)
assert not {"hashlib", "ssl"} & set(sys.modules)
"""


def test_builtins_without_a_build_id_are_known_by_their_content(tmp_path):
    """NVRTC 13.5 for AArch64 has such a library. The first hit of each process reads it."""
    path, builtins = tmp_path / "libnvrtc.so.13", tmp_path / "libnvrtc-builtins.so.13.5"
    path.write_bytes(b"")
    found = []
    for content in (b"some", b"other"):
        builtins.write_bytes(content * 1_000_000)
        found.append(output_of(_WITHOUT_BUILD_ID, path))
    assert len(set(found)) == 2
    builtins.write_bytes(b"some" * 1_000_000)
    assert output_of(_WITHOUT_BUILD_ID, path) == found[0]


@pytest.fixture(scope="module")
def other(installed, tmp_path_factory) -> Path:
    """A site-packages folder with the same compiler under another build id."""
    folder = tmp_path_factory.mktemp("other")
    _copy(installed, folder)
    return folder


#: Requests a kernel with the compiler of a site-packages folder, and prints whether it was cached.
_ASK = """
import os, site, sys
folder, directory = sys.argv[1:]
if folder:
    site.getsitepackages = lambda: [folder]
    site.ENABLE_USER_SITE = False
import kcache
from nvrtc.reference import *

with kcache.KernelCache(directory) as cache:
    first = cache.lookup(KERNEL.replace("V", "3 * out[1]"), (), ARCH)
    assert not any("libnvrtc" in line for line in open("/proc/self/maps"))
    kernel = agreed(cache, KERNEL.replace("V", "3 * out[1]"))
    assert kernel.cached == (first is not None)
    mapped = [line.split()[-1] for line in open("/proc/self/maps") if "libnvrtc.so" in line]
    assert not folder or mapped[0].startswith(folder), mapped[0]
    print(kernel.cached)
"""


def test_the_compiler_is_swapped_and_swapped_back(tmp_path, other):
    hits = [output_of(_ASK, folder, tmp_path / "c").strip() for folder in ("", other, "")]
    assert hits == ["False", "False", "True"]


_LOADED_ELSEWHERE = """
import ctypes, sys
when, path, directory = sys.argv[1:]
if when == "before":
    ctypes.CDLL(path)
import kcache
from nvrtc.reference import *

cache = kcache.KernelCache(directory)
source = KERNEL.replace("V", "3 * out[1]")
if when == "after":
    agreed(cache, source + "// another")
    ctypes.CDLL(path)
    cache = kcache.KernelCache(directory)
print(agreed(cache, source).cached)
"""


def test_another_package_loads_another_compiler(tmp_path, installed, other):
    path = next(other.rglob("libnvrtc.so.*"))
    directory = tmp_path / "c"
    assert output_of(_LOADED_ELSEWHERE, "no", path, directory).strip() == "False"
    # If the other compiler is loaded before kcache looks for one, the other one is used.
    assert output_of(_LOADED_ELSEWHERE, "before", path, directory).strip() == "False"
    assert output_of(_LOADED_ELSEWHERE, "before", path, directory).strip() == "True"
    # If it is loaded afterwards, it is not used.
    assert output_of(_LOADED_ELSEWHERE, "after", path, directory).strip() == "True"


_REPLACED = """
import ctypes, os, shutil, sys
from pathlib import Path
how, path, new, directory = sys.argv[1:]
ctypes.CDLL(path)
import kcache
from nvrtc.reference import *

source = KERNEL.replace("V", "3 * out[1]")
cache = kcache.KernelCache(directory)
if how == "later":
    agreed(cache, source + "// another")
if new:
    os.unlink(path)
    shutil.move(new, path)
else:
    shutil.rmtree(Path(path).parent)
agreed(cache, source) if how == "later" else None
agreed(kcache.KernelCache(directory), source + "// new")
"""


@pytest.mark.parametrize("how", ["at once", "later"])
def test_the_compiler_is_upgraded_while_it_is_loaded(tmp_path, installed, how):
    """A kernel that the old compiler makes is not stored as a kernel of the new one.

    The program still has the old compiler in memory, but a worker that is started now loads the new
    one.
    """
    path = _copy(installed, tmp_path / "site")
    new = tmp_path / "new.so"
    shutil.copy(path, new)
    before = library.build_id(str(path))
    _change_build_id(new)
    output_of(_REPLACED, how, path, new, tmp_path / "c")
    assert library.build_id(str(path)) != before
    made_by_new = str(how == "at once")
    lookup = _ASK.replace('"3 * out[1]")', '"3 * out[1]") + "// new"')
    assert output_of(lookup, tmp_path / "site", tmp_path / "c").strip() == made_by_new
    assert output_of(_ASK, tmp_path / "site", tmp_path / "c").strip() == "False"


def test_a_compiler_that_is_replaced_while_it_is_loaded_is_not_used(
    tmp_path, installed, monkeypatch
):
    path = _copy(installed, tmp_path / "site")
    new = tmp_path / "new.so"
    shutil.copy(path, new)
    _change_build_id(new)

    def load(name: str) -> SimpleNamespace:
        if name == str(path):
            new.replace(path)
        return SimpleNamespace(nvrtcGetErrorString=SimpleNamespace())

    monkeypatch.setattr("ctypes.CDLL", load)
    with pytest.raises(OSError, match="was replaced while it was being loaded"):
        Nvrtc(str(path))
