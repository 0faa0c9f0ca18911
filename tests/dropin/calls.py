"""Calls: makes random calls of NVRTC's interface, and prints what every call returned.

    python calls.py LIBRARY SEED COUNT [threads]

The calls depend only on the seed, never on what a call returned, so that two libraries get the same
calls: in right and wrong order, with null pointers, unknown names and sources that don't compile.

With `threads`, no call uses precompiled headers. They belong to the process: the first thread makes
one that the others use, and which thread is first differs from run to run of NVRTC itself.
"""

import ctypes as c
import hashlib
import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

HEADER = "#pragma once\n__device__ int twice(int i) { return 2 * i; }\n"
SOURCES = [
    b"",
    b"  \n",
    b'extern "C" __global__ void k(float* a) { a[threadIdx.x] = 1; }\n',
    b"template <class T> __global__ void t(T* a) { *a = 1; }\n",
    b"__global__ void w(float* a) { int unused; a[0] = 1; }\n",
    b"__global__ void f(float* a) { a[0] = x; }\n",
    b'#include "twice.h"\n__global__ void h(int* a) { *a = twice(*a); }\n',
    b"#error no\n",
    b"#warning \xc3\xa9\n__global__ void u() {}\n",
    b"// \xe9 is no UTF-8\n__global__ void l() {}\n",
    b"__global__ void s(const char** a) { *a = __FILE__; }\n",
    b"__constant__ int c; __global__ void g(int* a) { *a = c + X; }\n",
]
NAMES = [None, b"k", b"t<float>", b" t<int> ", b"t< double >", b"&c", b"nope", b"", b"f"]
OPTIONS = [
    [],
    [b"-arch=sm_90"],
    [b"--gpu-architecture=compute_80"],
    [b"-arch=sm_90", b"-DX=2"],
    [b"-arch=sm_90", b"-D", b"X=3"],
    [b"-arch=sm_80", b"-dlto"],
    [b"-O3"],
    [b"-arch=sm_12"],
    [b"-arch=sm_90", b"-w"],
    [b"-arch=sm_90", b"--ptxas-options=-v"],
    [b"-arch=sm_90", b"-std=c++14", b"--use_fast_math"],
    [b"-arch=compute_90", b"--pch", b"--pch-verbose=true"],
]
OUTPUTS = ["PTX", "CUBIN", "LTOIR", "OptiXIR", "ProgramLog", "TileIR", "NVVM"]
#: A callback for `nvrtcSetFlowCallback`.
CALLBACK = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)(lambda _payload, _unused: 0)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Caller:
    """Makes the calls of a library, with several programs in turn, and records their results."""

    def __init__(self, library: c.CDLL, seed: int, options: list[list[bytes]] = OPTIONS) -> None:
        self.library = library
        self.options = options
        self.random = random.Random(seed)
        self.programs: list[c.c_void_p] = [c.c_void_p() for _ in range(6)]
        self.told: list[object] = []

    def run(self, count: int) -> None:
        actions = [
            *(self.create,) * 4,
            *(self.compile,) * 6,
            *(self.add_name,) * 4,
            *(self.lowered,) * 5,
            *(self.output,) * 10,
            *(self.size,) * 3,
            self.destroy,
            self.status,
            self.about,
            self.error_string,
            self.callback,
        ]
        for number in range(count):
            action = self.random.choice(actions)
            self.told.append((number, action.__name__, action(self.random.choice(self.programs))))

    def rarely(self, value: object, often: object) -> object:
        return value if self.random.random() < 0.04 else often

    def create(self, program: c.c_void_p) -> object:
        if program.value is not None:
            self.library.nvrtcDestroyProgram(c.byref(program))
            program.value = None
        source = self.rarely(None, self.random.choice(SOURCES))
        name = self.random.choice([None, b"", b"a.cu", b"dir/b.cu", b"/nowhere/d/c.cu"])
        count = self.rarely(-1, self.random.choice([0, 0, 1]))
        texts = self.rarely(None, (c.c_char_p * 1)(HEADER.encode()))
        names = (c.c_char_p * 1)(b"twice.h")
        place = self.rarely(None, c.byref(program))
        return self.library.nvrtcCreateProgram(place, source, name, count, texts, names)

    def compile(self, program: c.c_void_p) -> object:
        options = self.random.choice(self.options)
        given = self.rarely(None, (c.c_char_p * max(1, len(options)))(*options))
        count = self.rarely(-1, len(options))
        return self.library.nvrtcCompileProgram(self.rarely(None, program), count, given)

    def add_name(self, program: c.c_void_p) -> object:
        name = self.random.choice(NAMES[1:5] if self.random.random() < 0.8 else NAMES)
        return self.library.nvrtcAddNameExpression(program, name)

    def lowered(self, program: c.c_void_p) -> object:
        found = c.c_char_p(b"untouched")
        place = self.rarely(None, c.byref(found))
        result = self.library.nvrtcGetLoweredName(program, self.random.choice(NAMES), place)
        return result, repr(found.value)

    def output(self, program: c.c_void_p) -> object:
        what = self.random.choice(OUTPUTS)
        null = self.random.random() < 0.05
        get = getattr(self.library, f"nvrtcGet{what}", None)
        if get is None:
            return "absent"
        size = c.c_size_t(99)
        first = getattr(self.library, f"nvrtcGet{what}Size")(program, c.byref(size))
        if first != 0:
            return first, size.value
        buffer = c.create_string_buffer(b"\xaa" * (size.value + 8), size.value + 8)
        results = [get(program, None)] if null else []
        results.append(get(program, buffer))
        # A log may have the duration of the assembler, or a precompiled header's name with the
        # process's id. The text and the size of such a log differ from run to run.
        told = re.sub(rb"[\d.]+ ms|auto_pch_\d+", b"?", buffer.raw)
        return "?" if told != buffer.raw else size.value, results, _digest(told)

    def size(self, program: c.c_void_p) -> object:
        get = getattr(self.library, f"nvrtcGet{self.random.choice(OUTPUTS)}Size", None)
        given = self.rarely(None, program)
        return "absent" if get is None else get(given, None)

    def destroy(self, program: c.c_void_p) -> object:
        place = self.rarely(None, c.byref(program))
        result = self.library.nvrtcDestroyProgram(place)
        return result, program.value is None

    def status(self, program: c.c_void_p) -> object:
        if not hasattr(self.library, "nvrtcGetPCHCreateStatus"):
            return "absent"
        size = c.c_size_t(99)
        needed = self.library.nvrtcGetPCHHeapSizeRequired(program, c.byref(size))
        return self.library.nvrtcGetPCHCreateStatus(program), needed, size.value

    def about(self, _program: c.c_void_p) -> object:
        major, minor, count = c.c_int(), c.c_int(), c.c_int()
        results = [
            self.library.nvrtcVersion(c.byref(major), self.rarely(None, c.byref(minor))),
            self.library.nvrtcGetNumSupportedArchs(c.byref(count)),
        ]
        archs = (c.c_int * count.value)()
        results.append(self.library.nvrtcGetSupportedArchs(archs))
        return results, major.value, minor.value, list(archs)

    def error_string(self, _program: c.c_void_p) -> object:
        self.library.nvrtcGetErrorString.restype = c.c_char_p
        return repr(self.library.nvrtcGetErrorString(self.random.randrange(-1, 20)))

    def callback(self, program: c.c_void_p) -> object:
        if self.random.random() > 0.2 or not hasattr(self.library, "nvrtcSetFlowCallback"):
            return "not set"
        return self.library.nvrtcSetFlowCallback(program, CALLBACK, None)


def main() -> None:
    path, seed, count, *mode = sys.argv[1:]
    library = c.CDLL(path)
    number = int(count)
    callers = [Caller(library, int(seed))]
    if mode == ["threads"]:
        own = [options for options in OPTIONS if b"--pch" not in options]
        callers = [Caller(library, int(seed) + i, own) for i in range(3)]
        with ThreadPoolExecutor(len(callers)) as pool:
            list(pool.map(lambda each: each.run(number), callers))
    else:
        callers[0].run(number)
    json.dump([call for each in callers for call in each.told], sys.stdout)


main()
