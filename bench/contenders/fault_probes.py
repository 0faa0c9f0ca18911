"""Fault probes: show what a cache does with damage, a large object and a failing disk.

Each runs in a process of its own, since some of what happens here ends it. A probe is a function of
a contender and an empty folder; it returns in a word or two what was found out. The chapter "trust"
runs them all and compares.

    python bench/contenders/fault_probes.py PROBE CONTENDER FOLDER
"""

import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # PYTHONSAFEPATH leaves it out

import kcache
from contenders.contenders import BY_NAME, FILE_STREAM, ROOMY, Contender
from contenders.population import key

VALUE = random.Random(1).randbytes(100 << 10)
CAP, SMALL, LARGE, SMALL_COUNT = 1_000_000, 100_000, 2_000_000, 8
MISS, AGAIN, RETURNED = "miss", "compiled again", "kernel returned"
KEPT = f"{SMALL_COUNT} of {SMALL_COUNT} kept"

_SOURCE = '#include "{header}"\nextern "C" __global__ void k(int* x) {{ *x = VALUE + {number}; }}\n'


def run(probe: str, contender: str, folder: Path) -> str:
    """Runs a probe in a new process; returns what it found, or what ended the process."""
    command = [sys.executable, __file__, probe, contender, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return f"process killed by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        raise RuntimeError(f"{probe}, {contender}: {done.stderr[-2000:]}")
    return done.stdout.strip()


# -- bytes under keys ----------------------------------------------------------------------------


def truncated(contender: Contender, folder: Path) -> str:
    """The file that holds an entry, or the database that does, is cut to a third."""
    _put(contender, folder)
    path, _ = _where(folder)
    os.truncate(path, path.stat().st_size // 3)
    return _got(contender, folder)


def flipped(contender: Contender, folder: Path) -> str:
    """One bit in the middle of a value is another."""
    _put(contender, folder)
    path, place = _where(folder)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    return _got(contender, folder)


def oversize(contender: Contender, folder: Path) -> str:
    """An object of twice the cap is put beside small ones that fit."""
    opened = contender.open(folder, CAP)
    keys = [key(number) for number in range(SMALL_COUNT)]
    for number, name in enumerate(keys):
        opened.put(name, number.to_bytes(8, "little") + VALUE[: SMALL - 8])
    if not all(map(opened.get, keys)):
        raise RuntimeError("not even the small ones are kept")
    try:
        opened.put(key(-1), VALUE * (LARGE // len(VALUE) + 1))
    except Exception as error:
        return f"raises {type(error).__name__}"
    return f"{sum(opened.get(name) is not None for name in keys)} of {SMALL_COUNT} kept"


def _put(contender: Contender, folder: Path) -> None:
    opened = contender.open(folder, ROOMY)
    opened.put(key(0), VALUE)
    opened.close()


def _where(folder: Path) -> tuple[Path, int]:
    """Returns the file that holds the value, and where in it its middle is.

    Zstandard leaves noise as it is, so that it is found there, too.
    """
    places = {path: path.read_bytes().find(VALUE[50_000:50_064]) for path in _files(folder)}
    return next((path, place) for path, place in places.items() if place >= 0)


def _got(contender: Contender, folder: Path) -> str:
    try:
        opened = contender.open(folder, ROOMY)
        found = opened.get(key(0))
    except Exception as error:  # any exception: it reaches the caller
        return f"raises {type(error).__name__}"
    if found == VALUE:
        raise RuntimeError("the damage did not reach the value")
    return MISS if found is None else "served"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# -- kernels -------------------------------------------------------------------------------------


def header(contender: Contender, folder: Path) -> str:
    """A header is edited between two compiles of one source, which names its absolute path."""
    path = folder / "value.cuh"
    compile_one = _compiler(contender, folder / "cache")
    path.write_text("#define VALUE 1\n", encoding="utf-8")
    before = compile_one(path, 0)
    path.write_text("#define VALUE 2\n", encoding="utf-8")
    return AGAIN if compile_one(path, 0) != before else "old code served"


def full(contender: Contender, folder: Path) -> str:
    """No file may grow any more, as on a full disk, while a kernel is compiled."""
    path = folder / "value.cuh"
    path.write_text("#define VALUE 1\n", encoding="utf-8")
    compile_one = _compiler(contender, folder / "cache")
    compile_one(path, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        return _outcome(compile_one, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def read_only(contender: Contender, folder: Path) -> str:
    """The directory may not be written to any more while a kernel is compiled."""
    path = folder / "value.cuh"
    path.write_text("#define VALUE 1\n", encoding="utf-8")
    compile_one = _compiler(contender, folder / "cache")
    compile_one(path, 0)
    inside = [folder / "cache", *(folder / "cache").rglob("*")]
    for found in inside:
        found.chmod(0o555 if found.is_dir() else 0o444)
    _obey_permissions()
    if any(os.access(found, os.W_OK, effective_ids=True) for found in inside):
        raise RuntimeError("it can still be written to")
    try:
        return _outcome(compile_one, path)
    finally:
        for found in inside:
            if found.is_dir():
                found.chmod(0o755)


def _obey_permissions() -> None:
    """Has root obey permissions, too: gives up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.

    What capget(2) and capset(2) take: a version and a process, then twice three sets of 32.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) == 0:
        sets[0] &= ~(1 << 1 | 1 << 2)
        libc.capset(header, sets)


def _outcome(compile_one: Callable[[Path, int], bytes], path: Path) -> str:
    try:
        code = compile_one(path, 1)
    except Exception as error:  # any exception: the kernel is lost
        return f"kernel lost: {type(error).__name__}"
    return RETURNED if code else "no kernel"


def _compiler(contender: Contender, folder: Path) -> Callable[[Path, int], bytes]:
    """Returns what compiles a source, told apart by a number, through the cache in `folder`."""
    folder.mkdir(exist_ok=True)
    if contender.name == FILE_STREAM:
        return _cuda_core(folder)
    opened = kcache.KernelCache(folder, backend=contender.backend)
    options = kcache.CompileOptions(arch="sm_90")

    def compile_one(path: Path, number: int) -> bytes:
        source = _SOURCE.format(header=path, number=number)
        return opened.get_or_compile(source, (), options).cubin or b""

    return compile_one


def _cuda_core(folder: Path) -> Callable[[Path, int], bytes]:
    core, utils = import_module("cuda.core"), import_module("cuda.core.utils")
    cache = utils.FileStreamProgramCache(folder)

    def compile_one(path: Path, number: int) -> bytes:
        source = _SOURCE.format(header=path, number=number)
        program = core.Program(source, "c++", core.ProgramOptions(arch="sm_90"))
        return bytes(program.compile("cubin", cache=cache).code)

    return compile_one


PROBES = {
    probe.__name__: probe for probe in (truncated, flipped, oversize, header, full, read_only)
}

if __name__ == "__main__":
    sys.stdout.write(PROBES[sys.argv[1]](BY_NAME[sys.argv[2]], Path(sys.argv[3])) + "\n")
