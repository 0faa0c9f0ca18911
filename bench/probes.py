"""Probes: show how a cache handles damage, an edited header, a full disk and many writers.

Each probe runs in a process of its own, because some faults kill the process. A fault is a function
that takes a contender and an empty folder. It returns what was found, and whether that is right.

    python bench/probes.py FAULT CONTENDER FOLDER
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))  # with PYTHONSAFEPATH, Python does not add it

from contenders import CUPY, FILE_STREAM, KIB, ON_DISK, key, needs, noise

import kcache

VALUE = noise(1, 100 * KIB)
CAP = 1_000_000
#: The number of writers. Each puts nine tenths of the cap, so none of them would evict if it were
#: alone.
WRITERS, PAYLOAD = 8, 32 * KIB
PUTS = CAP * 9 // 10 // PAYLOAD
#: The limits that the page about the cap promises. For files, they are the cap, one entry for each
#: writer, the counters and the statistics; for LMDB, a file of twice the cap, LMDB's table of
#: readers, and the statistics.
BOUND, LMDB_BOUND = CAP + int(WRITERS * PAYLOAD * 1.02) + 64 * KIB, 2 * CAP + 196 * KIB
Found = tuple[str, bool]


# -- bytes under keys ------------------------------------------------------------------------------


def cut(contender: str, folder: Path) -> Found:
    """Cut the file or the database that holds an entry to a third of its size."""
    path, _ = _put(contender, folder)
    os.truncate(path, path.stat().st_size // 3)
    return _get(contender, folder)


def flipped(contender: str, folder: Path) -> Found:
    """Flip one bit in the middle of a stored value."""
    path, place = _put(contender, folder)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    return _get(contender, folder)


def _put(contender: str, folder: Path) -> tuple[Path, int]:
    """Put an entry; return the file that holds it, and the position of a part of its value there.

    The value is found even if zstd compresses it, because zstd stores noise unchanged.
    """
    opened = ON_DISK[contender](folder, None)
    opened.put(key(0), VALUE)
    opened.close()
    files = [path for path in folder.rglob("*") if path.is_file()]
    places = {path: path.read_bytes().find(VALUE[50_000:50_064]) for path in files}
    return next((path, place) for path, place in places.items() if place >= 0)


def _get(contender: str, folder: Path) -> Found:
    try:
        found = ON_DISK[contender](folder, None).get(key(0))
    except Exception as error:  # it reaches the caller
        return f"raises {type(error).__name__}", False
    if found == VALUE:
        raise RuntimeError("the damage did not reach the value")
    return ("miss", True) if found is None else ("served", False)


# -- kernels ---------------------------------------------------------------------------------------

Compile = Callable[[int], bytes]


def header(contender: str, folder: Path) -> Found:
    """Edit a header between two compiles of the same source."""
    compile_ = _compiler(contender, folder)
    before = compile_(0)
    (folder / "value.cuh").write_text("#define VALUE 2\n", encoding="utf-8")
    same = compile_(0) == before
    return ("old code served", False) if same else ("compiled again", True)


def full(contender: str, folder: Path) -> Found:
    """Compile a kernel while no file may grow, as on a full disk."""
    compile_ = _compiler(contender, folder)
    compile_(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        return _outcome(compile_)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def _outcome(compile_: Compile) -> Found:
    try:
        compile_(1)
    except Exception as error:  # the kernel is lost
        return f"kernel lost: {type(error).__name__}", False
    return "kernel returned", True


def _compiler(contender: str, folder: Path) -> Compile:
    """Return a function that compiles source number N through the cache in `folder`."""
    path, place = folder / "value.cuh", folder / "cache"
    path.write_text("#define VALUE 1\n", encoding="utf-8")
    place.mkdir()
    compilers = {FILE_STREAM: _cuda_core, CUPY: _cupy}
    make = compilers.get(contender, lambda place: _kcache(place, contender.removeprefix("kcache ")))
    compile_ = make(place)
    return lambda number: compile_(
        f'#include "{path}"\nextern "C" __global__ void k(int* x) {{ *x = VALUE + {number}; }}\n'
    )


def _kcache(place: Path, backend: str) -> Callable[[str], bytes]:
    cache = kcache.KernelCache(place, backend=backend)
    options = kcache.CompileOptions(arch="sm_90")
    return lambda source: cache.get_or_compile(source, (), options).cubin or b""


def _cuda_core(place: Path) -> Callable[[str], bytes]:
    core, utils = needs("cuda.core", "cuda.core.utils")
    cache, options = utils.FileStreamProgramCache(place), core.ProgramOptions(arch="sm_90")
    return lambda source: bytes(
        core.Program(source, "c++", options).compile("cubin", cache=cache).code
    )


def _cupy(place: Path) -> Callable[[str], bytes]:
    """Return a function that compiles like CuPy, but without a device; see `programs.py`."""
    os.environ["CUPY_CACHE_DIR"] = str(place)
    (compiler,) = needs("cupy.cuda.compiler")
    loaded: list[bytes] = []
    module = SimpleNamespace(load=loaded.append, _set_mapping=lambda mapping: None)
    compiler.function = SimpleNamespace(Module=lambda: module)
    compiler._get_arch_for_options_for_nvrtc = lambda _arch=None: ("-arch=sm_90", "cubin")

    def compile_(source: str) -> bytes:
        compiler._compile_module_with_cache(source, (), arch="90")
        return loaded[-1]

    return compile_


# -- a cap and several writers ---------------------------------------------------------------------


def writers(contender: str, folder: Path) -> Found:
    """Let eight writers put nine tenths of the cap each, at once; then measure the disk usage."""
    command = [sys.executable, __file__, "_writer", contender, str(folder)]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([*command, str(number)], stdin=pipe, stdout=pipe)
        for number in range(WRITERS)
    ]
    for process in started:
        process.stdout.readline()  # type: ignore[union-attr]
    for process in started:
        process.stdin.write(b"\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    for process in started:
        process.communicate()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e6:.2f} MB", size <= (LMDB_BOUND if contender.endswith("lmdb") else BOUND)


def _writer(contender: str, folder: Path, number: str) -> Found:
    opened = ON_DISK[contender](folder, CAP)
    print("ready", flush=True)
    sys.stdin.readline()
    for each in range(int(number) * PUTS, (int(number) + 1) * PUTS):
        with suppress(Exception):  # a value that is not stored takes no room
            opened.put(key(each), noise(each, PAYLOAD))
    opened.close()
    return "", True


def run(fault: str, contender: str, folder: Path) -> Found:
    """Run a fault in a new process; return what it found, or the signal that killed the process."""
    command = [sys.executable, "-W", "ignore", __file__, fault, contender, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return f"process killed by {signal.Signals(-done.returncode).name}", False
    if done.returncode:
        raise RuntimeError(f"{fault}, {contender}: {done.stderr[-2000:]}")
    right, _, found = done.stdout.splitlines()[-1].partition(" ")
    return found, right == "right"


if __name__ == "__main__":
    found, right = globals()[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
    print("right" if right else "wrong", found)
