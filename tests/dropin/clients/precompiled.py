"""Compiles random sources with and without automatic precompiled headers; prints a table as JSON.

    python precompiled.py LIBRARY SEED COUNT

The table has a row for each kernel and set of options: the options, "create" or "use", NVRTC's status
of the precompiled header, the result, and "" if the outputs are the same as without precompiled
headers, else both outputs.
"""

import ctypes as c
import json
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.append(os.path.dirname(__file__))  # needed if PYTHONSAFEPATH is set
import raw

ARCH = ["-arch=sm_90", "-std=c++17"]
SETS = {
    "pch": ["--pch"],
    "folder": ["--pch", "--pch-dir={folder}"],
    "quiet": ["-pch", "--pch-messages=false"],
    "instantiated": ["--pch", "--instantiate-templates-in-pch=true"],
    "lazy": ["--pch", "--pch-dir={folder}", "--instantiate-templates-in-pch=false"],
    "idle": ["--pch-messages=true", "--pch-dir={folder}"],
}
#: Maps what a header may contain to the expression by which a kernel uses it.
PIECES = {
    "template <class T> __device__ T twice_N(T x) { return x + x * VALUE; }": "twice_N(x)",
    "static __device__ __noinline__ float slow_N(float x) { return x * VALUE.5f + sqrtf(x); }": (
        "slow_N(x)"
    ),
    "namespace { __device__ int hidden_N = VALUE; }": "(float)hidden_N",
    "__constant__ float table_N[4] = { 1, VALUE, 3, 4 };": "table_N[threadIdx.x % 4]",
    "template <int I> struct Box_N { float v[I]; __device__ float sum() const { return v[I - 1]; } };": (
        "Box_N<3>{{x, x, VALUE}}.sum()"
    ),
    "enum class Kind_N { one = VALUE, two };": "(float)(int)Kind_N::two",
    "#define SCALE_N VALUE": "SCALE_N * x",
    "template <class T> struct Traits_N { static constexpr T value = VALUE; };"
    " template <> struct Traits_N<float> { static constexpr float value = VALUE.25f; };": (
        "Traits_N<float>::value + Traits_N<int>::value"
    ),
    "__device__ const char* where_N() { return __FILE__; }": "(float)where_N()[0]",
}
HEADS = ('extern "C" __global__ void k', "static __device__ int kept; __global__ void k")


def random_kernel(chance: random.Random, folder: Path) -> bytes:
    """Write random headers into a folder, and return a source that includes them."""
    uses: list[str] = []
    for number in range(4):
        guard = chance.choice(
            ("#pragma once\n%s\n", f"#ifndef H{number}\n#define H{number}\n%s\n#endif\n")
        )
        lines = []
        for piece in range(chance.randrange(1, 6)):
            for text, found in zip(chance.choice(list(PIECES.items())), (lines, uses), strict=True):
                k = str(number * 7 + piece + 2)
                found.append(text.replace("_N", f"_{number}_{piece}").replace("VALUE", k))
        (folder / f"{number}.h").write_text(guard % "\n".join(lines))
    includes = "".join(f'#include "{number}.h"\n' for number in range(4))
    terms = " + ".join(f"({use})" for use in chance.sample(uses, 4))
    head = chance.choice(HEADS)
    return f"{includes}{head}(float* out, float x) {{ out[threadIdx.x] = {terms}; }}\n".encode()


def main(path: str, seed: str, count: str) -> None:
    nvrtc = c.CDLL(path)
    major, minor = c.c_int(), c.c_int()
    nvrtc.nvrtcVersion(c.byref(major), c.byref(minor))
    seed_option = ["--frandom-seed=1"] if (major.value, minor.value) >= (12, 9) else []
    chance = random.Random(int(seed))
    os.chdir(tempfile.mkdtemp(prefix="precompiled-"))
    rows: list[list[object]] = []
    for number in range(int(count)):
        folder = Path(str(number)).absolute()
        folder.mkdir()
        source = random_kernel(chance, folder)
        more = chance.choice(
            [[*ARCH], [*ARCH], ["-arch=compute_80"], [*ARCH, "-dlto"], [*ARCH, "-lineinfo"]]
        )
        options = [*more, f"-I{folder}", *seed_option]

        def outcome(*texts: str, source: bytes = source, options: list[str] = options) -> list[str]:
            given = [text.encode() for text in (*options, *texts)]
            return raw.outcome(nvrtc, source, given, outputs=("PTX", "CUBIN", "LTOIR")).split()

        *plain, _, _ = outcome()
        for kind, texts in SETS.items():
            for turn in ("create", "use"):
                *found, status, _ = outcome(*(text.format(folder=folder) for text in texts))
                different = "" if found == plain else f"{plain} {found}"
                rows.append([kind, turn, int(status), int(plain[1]), different])
    print(json.dumps(rows))


main(*sys.argv[1:])
