"""The chapter about the drop-in: what a hit costs through the socket, and what `kcache run` costs.

    python bench/nvrtc_dropin.py [--json]

Every figure is a median of rounds that take turns, beside what it is compared with. Needs NVRTC, a
C compiler and no GPU.
"""

import argparse
import ctypes as c
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kcache.dropin import libraries
from kcache.nvrtc import library

ROUNDS = 15
PROGRAMS = 64
KCACHE = (sys.executable, "-m", "kcache", "run")
OUTPUTS = ("PTX", "CUBIN", "ProgramLog")
#: Some 100 KiB of machine code and as much PTX.
KERNELS = 8
BODY = "a[threadIdx.x] = " + " + ".join(f"sinf(a[{n}] * {n}.5f)" for n in range(4)) + ";"
SOURCE = "".join(
    f'extern "C" __global__ void k{n}(float* a) {{ {BODY} a[{n}] += {n}; }}\n'
    for n in range(KERNELS)
)
OPTIONS = (b"-arch=sm_90",)


class Interface:
    """NVRTC's interface by ctypes: the real library's or the drop-in's."""

    def __init__(self, path: str) -> None:
        self.library = c.CDLL(path)

    def compile(self, source: bytes) -> dict[str, bytes]:
        """Compile, and read every output, as a program does."""
        program = c.c_void_p()
        options = (c.c_char_p * len(OPTIONS))(*OPTIONS)
        nvrtc = self.library
        _check(nvrtc.nvrtcCreateProgram(c.byref(program), source, b"k.cu", 0, None, None))
        _check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        outputs = {what: self._read(program, what) for what in OUTPUTS}
        _check(nvrtc.nvrtcDestroyProgram(c.byref(program)))
        return outputs

    def _read(self, program: c.c_void_p, what: str) -> bytes:
        size = c.c_size_t()
        _check(getattr(self.library, f"nvrtcGet{what}Size")(program, c.byref(size)))
        buffer = c.create_string_buffer(size.value)
        _check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"NVRTC returned {result}")


def _timed(task: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        task()
    return (time.perf_counter() - start) / times


# -- inside a program under `kcache run` -----------------------------------------------------------


def inside(path: str, directory: str) -> dict[str, float]:
    """Measure hits; this process runs under `kcache run`."""
    import kcache

    interface = Interface(path)
    kept = SOURCE.encode()
    asked = kept + b"// not kept by the client: it might include something\n"
    options = kcache.CompileOptions(extra_options=[option.decode() for option in OPTIONS])
    for source in (kept, asked):
        for _ in range(3):
            outputs = interface.compile(source)
    with kcache.KernelCache(directory) as cache:

        def in_process() -> object:
            return cache.get_or_compile(asked.decode(), (), options, source_name="k.cu")

        in_process()
        rounds = [
            {
                "socket": _timed(lambda: interface.compile(asked), 20),
                "repeated": _timed(lambda: interface.compile(kept), 50),
                "in process": _timed(in_process, 50),
            }
            for _ in range(ROUNDS)
        ]
        found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    sizes = {f"bytes of {what}": float(len(data)) for what, data in outputs.items()}
    return {**found, **sizes}


# -- outside ---------------------------------------------------------------------------------------


@contextmanager
def _folder() -> Iterator[dict[str, str]]:
    folder = tempfile.mkdtemp(prefix="kb-", dir="/tmp")
    try:
        yield {**os.environ, "KCACHE_DIR": f"{folder}/cache", "XDG_RUNTIME_DIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a server may be leaving


def _run(command: tuple[str, ...], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def hits(path: str) -> dict[str, float]:
    """A hit: kept in the program, through the socket, and in process."""
    with _folder() as environment:
        command = (sys.executable, __file__, "--inside", path, environment["KCACHE_DIR"])
        _run((*KCACHE, *command), environment)  # compiles
        found: dict[str, float] = json.loads(_run((*KCACHE, *command), environment))
        return found


def starting() -> dict[str, float]:
    """A program that compiles nothing, with and without `kcache run`."""
    script = shutil.which("kcache", path=os.path.dirname(sys.executable))
    launcher = (script, "run") if script else KCACHE
    program = (sys.executable, "-c", "pass")
    with _folder() as environment:
        _run((*launcher, *program), environment)
        rounds = [
            (
                _timed(lambda: _run(program, environment)),
                _timed(lambda: _run((*launcher, *program), environment)),
            )
            for _ in range(ROUNDS)
        ]
    bare, under = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {"bare": bare, "kcache run": under}


MISSES = """
import sys, time
sys.path.insert(0, sys.argv[1])
from nvrtc_dropin import Interface
interface = Interface(sys.argv[2])
source = b'extern "C" __global__ void k(float* a) { a[%d] = 1; }'
interface.compile(source % 99999)
start = time.perf_counter()
for number in range(20):
    interface.compile(source % (number + int(sys.argv[3])))
print((time.perf_counter() - start) / 20)
"""


def misses(path: str) -> dict[str, float]:
    """A miss of a trivial kernel, with and without `kcache run`."""
    folder = str(Path(__file__).parent)
    with _folder() as environment:
        rounds: list[tuple[float, float]] = []
        for number in range(5):
            program = (sys.executable, "-c", MISSES, folder, path, str(1000 * number))
            pair = _run(program, environment), _run((*KCACHE, *program), environment)
            rounds.append((float(pair[0]), float(pair[1])))
    bare, under = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {"bare": bare, "kcache run": under}


CROWD = """
import sys
sys.path.insert(0, sys.argv[1])
from nvrtc_dropin import SOURCE, Interface
interface = Interface(sys.argv[2])
for number in range(20):
    assert len(interface.compile(SOURCE.encode() + b"// include %d" % number)["CUBIN"]) > 10000
"""


def crowd(path: str) -> dict[str, float]:
    """Many programs at once against one server: 20 hits of 100 KiB each."""
    folder = str(Path(__file__).parent)
    program = (sys.executable, "-c", CROWD, folder, path)
    with _folder() as environment:
        _run((*KCACHE, *program), environment)  # compiles
        count = f'for n in $(seq {PROGRAMS}); do {{ "$@" || echo failed; }} & done; wait'
        command = (*KCACHE, "sh", "-c", count, "sh", *program)
        start = time.perf_counter()
        output = _run(command, environment)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "failed": float(output.count("failed")), "hits": PROGRAMS * 20.0}


def main() -> None:
    """Measure everything, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(inside(*arguments.inside)))
        return
    found = library.find()
    if found is None:
        sys.exit("NVRTC is not installed")
    libraries.find(os.environ)
    figures = {
        "hits": hits(found.path),
        "starting": starting(),
        "misses": misses(found.path),
        "crowd": crowd(found.path),
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        _show(figures)


def _show(figures: dict[str, dict[str, float]]) -> None:
    hit, start, miss, many = (figures[n] for n in ("hits", "starting", "misses", "crowd"))
    beyond = hit["socket"] - hit["in process"]
    size = hit["bytes of PTX"] + hit["bytes of CUBIN"]
    print(f"a hit of {size / 1024:.0f} KiB, through the socket: {hit['socket'] * 1e6:.0f} us,")
    print(f"  {beyond * 1e6:.0f} us beyond the in-process hit (at most 300)")
    print(f"a hit again in one program: {hit['repeated'] * 1e6:.1f} us (at most 20)")
    slower = (start["kcache run"] - start["bare"]) * 1e3
    print(f"a program that compiles nothing: {slower:.1f} ms slower (at most 30)")
    over = (miss["kcache run"] - miss["bare"]) * 1e3
    print(f"a miss: {over:.1f} ms over the real NVRTC (at most 5, without the worker's own cost)")
    rate = many["hits"] / many["seconds"]
    print(f"{PROGRAMS} programs at once: {many['seconds']:.1f} s, {rate:.0f} hits/s, ", end="")
    print(f"{many['failed']:.0f} failed")


if __name__ == "__main__":
    main()
