"""Compiles sources with options of automatic precompiled headers, and without; prints as JSON.

    python precompiled.py LIBRARY SEED COUNT [FOLDER...]

It compiles the benchmark kernels whose headers are in the given folders, and `COUNT` random ones. The
answer has a row for each kernel and set of options: the kernel, the set, and what differs from a
compile without: nothing, or the names of outputs.
"""

import ctypes as c
import json
import os
import random
import sys
import tempfile
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "bench" / "kernels"
NAMES = {
    "trivial": b"axpy<float>",
    "cub_reduce": b"block_sum<float, 256, 4>",
    "cub_radix_sort": b"block_sort<unsigned int, int, 128, 8>",
    "attention": b"attention<64, 64, 64, true>",
    "cutlass_gemm": b"gemm<128, 128, 32, 64, 64, 3>",
}
ARCH = [b"-arch=sm_90", b"-std=c++17"]
SETS = {
    "pch": ["--pch"],
    "folder": ["--pch", "--pch-dir={folder}"],
    "quiet": ["-pch", "--pch-messages=false"],
    "instantiated": ["--pch", "--instantiate-templates-in-pch=true"],
    "lazy": ["--pch", "--pch-dir={folder}", "--instantiate-templates-in-pch=false"],
    "idle": ["--pch-messages=true", "--pch-dir={folder}"],
}
#: Tried with the kernels of the benchmarks, of which one takes four seconds.
LARGE = ("pch", "folder", "lazy")
HEADERS = ("a.h", "b.h", "c.h", "d.h")
PIECES = (
    "template <class T> __device__ T twice_{n}(T x) {{ return x + x * {k}; }}",
    "static __device__ __noinline__ float slow_{n}(float x) {{ return x * {k}.5f + sqrtf(x); }}",
    "namespace {{ __device__ int hidden_{n} = {k}; }}",
    "__constant__ float table_{n}[4] = {{ 1, {k}, 3, 4 }};",
    (
        "template <int N> struct Box_{n} {{ float v[N]; __device__ float sum() const {{ float s = 0;"
        " for (float e : v) s += e; return s; }} }};"
    ),
    "inline __device__ float root_{n}(float x) {{ return rsqrtf(x + {k}); }}",
    "enum class Kind_{n} {{ one = {k}, two }};",
    "#define SCALE_{n} {k}",
    (
        "template <class T> struct Traits_{n} {{ static constexpr T value = {k}; }};"
        " template <> struct Traits_{n}<float> {{ static constexpr float value = {k}.25f; }};"
    ),
    "typedef float (*call_{n})(float);",
    (
        "static __device__ float lookup_{n}(int i) {{ static const float t[] = {{ {k}, 2, 3 }};"
        " return t[i % 3]; }}"
    ),
    "__device__ const char* where_{n}() {{ return __FILE__; }}",
)
USES = (
    "twice_{n}(x)",
    "slow_{n}(x)",
    "(float)hidden_{n}",
    "table_{n}[threadIdx.x % 4]",
    "Box_{n}<5>{{{{x, x, 1, 2, 3}}}}.sum()",
    "root_{n}(x)",
    "(float)(int)Kind_{n}::two",
    "SCALE_{n} * x",
    "Traits_{n}<float>::value + Traits_{n}<int>::value",
    "(call_{n})nullptr == nullptr ? x : 1.0f",
    "lookup_{n}(threadIdx.x)",
    "(float)where_{n}()[0]",
)


def random_kernel(chance: random.Random, folder: Path) -> bytes:
    """Write random headers into a folder, and return a source that includes some of them."""
    uses: list[str] = []
    for number, name in enumerate(HEADERS):
        lines = (
            ["#pragma once"] if chance.random() < 0.7 else [f"#ifndef H{number}\n#define H{number}"]
        )
        for piece in range(chance.randrange(1, 6)):
            at, n, k = chance.randrange(len(USES)), f"{number}_{piece}", chance.randrange(1, 90)
            lines.append(PIECES[at].format(n=n, k=k))
            uses.append(USES[at].format(n=n))
        if not lines[0].startswith("#pragma"):
            lines.append("#endif")
        (folder / name).write_text("\n".join(lines) + "\n")
    includes = "".join(f'#include "{name}"\n' for name in HEADERS)
    terms = " + ".join(f"({use})" for use in chance.sample(uses, min(len(uses), 4)))
    heads = (
        'extern "C" __global__ void k',
        "__global__ void k",
        "static __device__ int kept; __global__ void k",
    )
    head = chance.choice(heads)
    return f"{includes}{head}(float* out, float x) {{ out[threadIdx.x] = {terms}; }}\n".encode()


class Nvrtc:
    """A library, which compiles and returns every output."""

    def __init__(self, path: str) -> None:
        self.library = c.CDLL(path)
        major, minor = c.c_int(), c.c_int()
        self.library.nvrtcVersion(c.byref(major), c.byref(minor))
        self.version = major.value, minor.value

    def compile(self, source: bytes, name: bytes, options: list[bytes]) -> dict[str, object]:
        nvrtc, program = self.library, c.c_void_p()
        nvrtc.nvrtcCreateProgram(c.byref(program), source, b"k.cu", 0, None, None)
        if name:
            nvrtc.nvrtcAddNameExpression(program, name)
        given = (c.c_char_p * len(options))(*options)
        told: dict[str, object] = {"result": nvrtc.nvrtcCompileProgram(program, len(given), given)}
        for output in ("PTX", "CUBIN", "LTOIR"):
            told[output] = self._output(program, output)
        lowered = c.c_char_p()
        if name:
            nvrtc.nvrtcGetLoweredName(program, name, c.byref(lowered))
        told["lowered"] = lowered.value
        self.status = nvrtc.nvrtcGetPCHCreateStatus(program)
        nvrtc.nvrtcDestroyProgram(c.byref(program))
        return told

    def _output(self, program: c.c_void_p, what: str) -> bytes:
        size = c.c_size_t()
        if getattr(self.library, f"nvrtcGet{what}Size")(program, c.byref(size)) != 0:
            return b""
        buffer = c.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def main(path: str, seed: str, count: str, *folders: str) -> None:
    nvrtc = Nvrtc(path)
    chance = random.Random(int(seed))
    work = Path(tempfile.mkdtemp(prefix="precompiled-"))
    os.chdir(work)
    rows: list[list[object]] = []
    seed_option = [b"--frandom-seed=1"] if nvrtc.version >= (12, 9) else []

    def compare(label: str, source: bytes, name: bytes, options: list[bytes]) -> None:
        plain = nvrtc.compile(source, name, options)
        kinds = SETS if label.startswith("random") else LARGE
        for kind in kinds:
            texts = SETS[kind]
            for turn in ("create", "use"):
                more = [text.format(folder=work).encode() for text in texts]
                other = nvrtc.compile(source, name, [*options, *more])
                differing = sorted(key for key in plain if plain[key] != other[key])
                rows.append([label, kind, turn, nvrtc.status, plain["result"], differing])

    for case, name in NAMES.items() if folders else ():
        more = [b"--device-as-default-execution-space"] * (case == "cutlass_gemm")
        include = [b"-I" + folder.encode() for folder in folders]
        source = (KERNELS / f"{case}.cu").read_bytes()
        compare(case, source, name, [*ARCH, *include, *more, *seed_option])
    for number in range(int(count)):
        folder = work / str(number)
        folder.mkdir()
        options = chance.choice(
            [ARCH, ARCH, [b"-arch=compute_80"], [*ARCH, b"-dlto"], [*ARCH, b"-lineinfo"]]
        )
        source = random_kernel(chance, folder)
        compare(f"random {number}", source, b"", [*options, b"-I" + bytes(folder), *seed_option])
    print(json.dumps({"version": nvrtc.version, "rows": rows}))


main(*sys.argv[1:])
