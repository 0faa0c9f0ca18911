"""Real kernels whose headers are edited: the cache equals a bare compile, and an undo is a hit."""

import os
import random
import re
import site
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypedDict

import pytest
from nvrtc.reference import Fresh, compile_clean, write
from nvrtc.talk import ask, worker

from kcache import CompileError, CompileOptions, KernelCache
from kcache.entry import MAX_SETS
from kcache.nvrtc.workers.messages import Trace

#: Include directories below a site-packages directory, and a header that has to be in each.
_FOLDERS = {
    "cccl": ("nvidia/cu13/include/cccl", "cub/cub.cuh"),
    "root": ("nvidia/cu13/include", "cccl/cuda/std/cstdint"),
    "cuda": ("nvidia/cu13/include", "cuda_fp16.h"),
    "crt": ("nvidia/cu13/include", "crt/mma.h"),
    "cutlass": ("cutlass_library/source/include", "cutlass/cutlass.h"),
    "groups": ("nvidia/cu13/include", "cooperative_groups.h"),
}
#: Names with internal linkage contain a number of the compile, then the process id and more digits.
INTERNAL = re.compile(rb"_kernel_cu_([0-9a-f]{8})_(\d+)")
_BENCH = Path(__file__).parents[2] / "bench/kernels"


class Kernel(NamedTuple):
    """A kernel to compile; `folders` are names of the include folders that it needs.

    Attributes:
        edits_at_once: number of edits between two compiles; four for a kernel that takes seconds to
            compile.
    """

    source: str
    folders: tuple[str, ...]
    names: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    arch: str = "sm_90"
    std: int = 17
    edits_at_once: int = 1


def flags_of(kernel: Kernel) -> tuple[str, ...] | None:
    """Return the flags to compile `kernel` with, or None if its headers are not installed."""
    found = [folder_of(name) for name in kernel.folders]
    if None in found:
        return None
    paths = dict.fromkeys(f"--include-path={folder}" for folder in found)
    return (f"--gpu-architecture={kernel.arch}", f"--std=c++{kernel.std}", *paths, *kernel.extra)


def folder_of(name: str) -> Path | None:
    path, probe = _FOLDERS[name]
    for entry in dict.fromkeys((*sys.path, *site.getsitepackages())):
        if Path(entry, path, probe).is_file():
            return Path(entry, path)
    return None


class Asked(TypedDict):
    """Keyword arguments of all functions that compile."""

    names: tuple[str, ...]
    headers: Mapping[str, str]


def same_names(ptx: bytes) -> bytes:
    """Return PTX with the names replaced that differ from compile to compile."""
    found = set(INTERNAL.findall(ptx))
    for each in {number for number, _ in found}:
        digits = os.path.commonprefix([after for n, after in found if n == each])  # noqa: RUF071
        ptx = ptx.replace(each + b"_" + digits, b"ID")
    # The lengths of such names are written before them.
    return re.sub(rb"\d+(?=_INTERNAL_|_GLOBAL__N_)", b"", ptx)


def _bench(name: str) -> str:
    return (_BENCH / f"{name}.cu").read_text()


def _made() -> Iterator[tuple[str, Kernel]]:
    yield "cub reduce", Kernel(_bench("cub_reduce"), ("cccl",), ("block_sum<float, 256, 4>",))
    yield (
        "cutlass gemm",
        Kernel(
            _bench("cutlass_gemm"),
            ("cutlass", "cccl", "root", "cuda", "crt"),
            ("gemm<128, 128, 32, 64, 64, 3>",),
            ("--device-as-default-execution-space",),
        ),
    )
    yield (
        "std",
        Kernel(
            "#include <cuda/std/array>\n#include <cuda/std/tuple>\n#include <cuda/std/complex>\n"
            "#include <cuda/std/span>\n"
            'extern "C" __global__ void k(float* o) { cuda::std::complex<float> c(o[0], o[1]); '
            "auto t = cuda::std::make_tuple(1, 2.f); o[2] = (c * c).real() + cuda::std::get<1>(t); }\n",
            ("cccl",),
        ),
    )
    yield (
        "cooperative groups",
        Kernel(
            "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\n"
            "namespace cg = cooperative_groups;\n"
            'extern "C" __global__ void k(int* o) { auto b = cg::this_thread_block(); '
            "auto w = cg::tiled_partition<32>(b); o[0] = cg::reduce(w, o[1], cg::plus<int>()); }\n",
            ("groups", "cccl", "cuda", "crt"),
        ),
    )
    yield (
        "cute",
        Kernel(
            "#include <cute/tensor.hpp>\nusing namespace cute;\n"
            'extern "C" __global__ void k(float* p) { '
            "auto t = make_tensor(make_gmem_ptr(p), make_shape(Int<8>{}, Int<4>{})); "
            "t(threadIdx.x, 1) = t(1, 2); }\n",
            ("cutlass", "cccl", "root", "cuda", "crt"),
            (),
            ("--device-as-default-execution-space",),
        ),
    )


#: Kernels that take more than a second to compile.
_LARGE = ("cub reduce", "cutlass gemm", "cute")
KERNELS = {
    name: kernel._replace(edits_at_once=4) if name in _LARGE else kernel for name, kernel in _made()
}


pytestmark = [
    pytest.mark.usefixtures("nvrtc"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="traces need Linux"),
    pytest.mark.slow,
]

INCLUDE = "--include-path="
LONG_EDITS = 40


class Project:
    """A kernel with copies of all files that its compile reads, which a test may edit.

    An empty include directory comes before the others.
    """

    def __init__(self, kernel: Kernel, flags: tuple[str, ...], top: Path, seed: str) -> None:
        self.kernel = kernel
        self.source = kernel.source
        self.asked: Asked = {"names": kernel.names, "headers": kernel.headers}
        self.top = top
        self.chance = random.Random(seed)
        self.first = top / "first"
        self.first.mkdir(parents=True)
        trace = self._trace(flags)
        self.read = [self._copy(path) for path, a in trace.files.items() if a.kind == "f"]
        real = [flag.removeprefix(INCLUDE) for flag in flags if flag.startswith(INCLUDE)]
        self.folders = [self.place(path) for path in real]
        self.options = CompileOptions(
            arch=kernel.arch,
            std=kernel.std,
            include_paths=[self.first, *self.folders],
            extra_options=kernel.extra,
        )
        places = map(self.place, (path for path, a in trace.files.items() if a.kind in "-a"))
        self.absent = [p for p in places if self.below(p) is not None and not p.exists()]
        self.chance.shuffle(self.read)
        self.chance.shuffle(self.absent)

    def _trace(self, flags: tuple[str, ...]) -> Trace:
        with worker() as process:
            trace = process.ask(ask(self.source, flags, **self.asked), None).trace
        assert trace is not None
        return trace

    def place(self, path: str) -> Path:
        """Return where the copy of a file is. All copies keep their relative positions."""
        return self.top / path.lstrip("/")

    def _copy(self, path: str) -> Path:
        return write(self.place(path), Path(path).read_text())

    def below(self, path: Path) -> Path | None:
        """Return a path relative to the include directory that it is in."""
        folder = next((folder for folder in self.folders if path.is_relative_to(folder)), None)
        return folder and path.relative_to(folder)

    def edits(self) -> Iterator[Callable[[int], tuple[Path, str]]]:
        """Yield edits without end: functions that return a file and its new text."""
        while True:
            yield lambda n: self.shadow(n, "")
            yield lambda n: self.shadow(n, _addition(n))
            yield self.edit
            yield self.appear

    def shadow(self, number: int, addition: str) -> tuple[Path, str]:
        below = [each for each in self.read if self.below(each) is not None]
        path = below[number % len(below)]
        relative = self.below(path)
        assert relative is not None
        return self.first / relative, path.read_text() + addition

    def edit(self, number: int) -> tuple[Path, str]:
        path = self.read[number % len(self.read)]
        return path, path.read_text() + _addition(number)

    def appear(self, number: int) -> tuple[Path, str]:
        """Return a path at which the compiler found no file, and a text for a new file there."""
        if not self.absent:
            return self.shadow(number, _addition(number))
        place = self.absent[number % len(self.absent)]
        relative = self.below(place)
        assert relative is not None
        found = next((f / relative for f in self.folders if (f / relative).is_file()), None)
        return place, (found.read_text() if found else "") + _addition(number)

    def fresh(self) -> Fresh:
        return compile_clean(self.source, self.options.flags(), **self.asked)

    def check(self, cache: KernelCache, expected: Fresh) -> bool:
        """Assert that cache and compiler agree; return whether it was a hit."""
        arguments = (self.source, self.kernel.names, self.options)
        if expected.failed:  # the edited header has no include guard
            with pytest.raises(CompileError):
                cache.get_or_compile(*arguments, headers=self.kernel.headers)
            return False
        made = cache.get_or_compile(*arguments, headers=self.kernel.headers)
        assert made.ptx is not None
        assert expected.ptx is not None
        assert same_names(made.ptx) == same_names(expected.ptx)
        if not INTERNAL.search(expected.ptx):  # with such names, no two compiles are equal
            assert made.cubin == expected.cubin
        return made.cached


def _addition(number: int) -> str:
    """Return a text that changes the code wherever it is included."""
    guard = f"KCACHE_EDITED_{number}"
    return (
        f"\n#ifndef {guard}\n#define {guard}\n__device__ int edited_{number} = {number};\n#endif\n"
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KERNELS)
def test_a_real_kernel_hits_and_follows(
    cache: KernelCache, tmp_path: Path, name: str, long: bool
) -> None:
    """Headers are shadowed and edited, and new ones appear where the compiler found no file."""
    if not long and name not in ("cub reduce", "cute", "cooperative groups"):
        pytest.skip("runs only with --long")
    kernel = KERNELS[name]
    flags = flags_of(kernel)
    if flags is None:
        pytest.skip(f"the headers of {name} are not installed")
    if compile_clean(kernel.source, flags, names=kernel.names, headers=kernel.headers).failed:
        pytest.skip(f"{name} does not compile here")
    project = Project(kernel, flags, tmp_path / "project", name)
    plain = project.fresh()
    assert not project.check(cache, plain)
    assert project.check(cache, plain)
    counts = {"edits": 0, "compiles": 0, "other code": 0, "refused": 0}
    edits = project.edits()
    for first in range(0, LONG_EDITS if long else 4, kernel.edits_at_once):
        if counts["compiles"] % MAX_SETS == MAX_SETS - 2:  # a manifest keeps no more sets
            project.source += "// another request\n"
            assert not project.check(cache, plain)
        done: list[tuple[Path, str | None]] = []
        for number in range(first, first + kernel.edits_at_once):
            path, text = next(edits)(number)
            done.append((path, path.read_text() if path.exists() else None))
            write(path, text)
        expected = project.fresh()
        project.check(cache, expected)
        for path, before in reversed(done):
            if before is None:
                path.unlink()
            else:
                path.write_text(before)
        assert project.check(cache, plain), f"a miss after this was undone: {done}"
        counts["edits"] += len(done)
        counts["compiles"] += 1
        counts["refused"] += expected.failed
        counts["other code"] += same_names(expected.ptx or b"") != same_names(plain.ptx or b"")
    print(name, counts)
