"""Operations: the operations whose system calls the guard counts, each as a function.

Run as a program, this module does each operation three times, and then three more times, each
between two marks that strace records.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import kcache
from kcache.entry import encode
from kcache.nvrtc import files

#: A path that does not exist. A stat below it, before and after an operation, marks the operation
#: among the system calls.
MARK = "/kcache-guard"
PAYLOAD = 100 << 10
#: How many headers the kernel with headers reads.
HEADERS = 5
KERNEL = 'extern "C" __global__ void k(int* out) {{ *out = {}; }}\n'
#: An incompressible payload, made of digests of numbers. Machine code hardly compresses, either.
_NOISE = b"".join(bytes.fromhex(kcache.hash_source(str(n))) for n in range(2 * PAYLOAD // 32))

Operation = Callable[[], object]


def key(number: int | str) -> str:
    return kcache.hash_source(f"guard {number}")


def entry(size: int = PAYLOAD, number: int = 0) -> kcache.Entry:
    """Return an entry with `size` bytes of payload, which differ for each number up to 100 Ki."""
    metadata = {"kind": "kernel", "compile_seconds": 1.0}
    return kcache.Entry({"cubin": _NOISE[number : number + size]}, metadata)


def headers_in(folder: Path) -> str:
    """Write headers that include one another in a chain; return a source that includes the first."""
    folder.mkdir()
    for number in range(HEADERS):
        more = f'#include "h{number + 1}.h"\n' if number + 1 < HEADERS else "#define V 7\n"
        (folder / f"h{number}.h").write_text(more)
    return '#include "h0.h"\n' + KERNEL.format("V")


def _engine(place: Path, backend: str) -> Iterator[tuple[str, Operation]]:
    """Yield the names and operations of an engine on the cache `place`, which `fill` has made."""

    def opened(memory: int = 0) -> kcache.CacheEngine:
        return kcache.open_engine(place, backend=backend, max_size=1 << 30, memory_size=memory)

    def open_and_close() -> None:
        with opened():
            pass

    yield "open and close", open_and_close
    with opened(1 << 24) as engine:
        engine.put(key(0), entry())
        yield "hit in memory", lambda: engine.get(key(0))
    with opened() as engine:
        here = [info.key for info in itertools.islice(engine.backend.scan(), 20)]
        used, gone, new = iter(here[:10]), iter(here[10:]), itertools.count(10**6)
        yield "usage", lambda: engine.size_bytes
        yield "hit", lambda: engine.get(key(0))
        yield "first hit of a key", lambda: engine.get(next(used))
        yield "miss", lambda: engine.get(key("missing"))
        yield "put", lambda: engine.put("00" + key(next(new))[2:], entry())
        yield "put again", lambda: engine.put(key(0), entry())
        yield "delete", lambda: engine.delete(next(gone))


def fill(place: Path, backend: str, count: int) -> None:
    """Make a cache of `count` entries.

    For the backend `file`, most files are written without the backend, which is faster.
    """
    plain = backend == "file"
    with (
        kcache.open_engine(place, backend=backend, max_size=1 << 30) as engine,
        engine.backend.batch(),
    ):
        for number in range(min(count, 256) if plain else count):
            assert engine.put(f"{number % 256:02x}" + key(number)[2:], entry(64))
    if plain:  # without the file of counters, the backend counts the entries itself
        os.unlink(place / "file/counters")
        for name in map(key, range(256, count)):
            (place / "file" / name[:2] / name).write_bytes(encode(name, entry(64)))


def _kernels(place: Path, stack: ExitStack) -> Iterator[tuple[str, Operation]]:
    """Yield names and operations: hits of kernels in memory and in files, and a lookup miss."""
    files.FRESH_NS = -(1 << 62)  # type: ignore[misc]  # stamps of new headers are trusted at once
    source = headers_in(place / "inc")
    options = kcache.CompileOptions(arch="sm_80", include_paths=[place / "inc"])
    for name, text in (("", KERNEL.format(7)), (", headers", source)):
        for where, memory in (("memory", 1 << 24), ("file", 0)):
            cache = stack.enter_context(kcache.KernelCache(place / "cache", memory_size=memory))
            cache.get_or_compile(text, (), options)
            yield (
                f"kernel in {where}{name}",
                lambda c=cache, t=text: c.get_or_compile(t, (), options),
            )
    numbers = itertools.count()
    yield "lookup that misses", lambda: cache.lookup(KERNEL.format(next(numbers)), (), options)


def _mark(name: str) -> None:
    try:
        os.stat(f"{MARK}/{name}")
    except OSError:
        pass


def main(folder: str, what: str) -> None:
    """Do the operations of a backend on the cache `folder`, or those of kernels in a new folder."""
    with ExitStack() as stack:
        place = Path(folder)
        operations = _kernels(place, stack) if what == "kernels" else _engine(place, what)
        for name, operation in operations:
            for _ in range(3):
                operation()
            for _ in range(3):  # one of the three may also write statistics
                _mark(f"begin {name}")
                operation()
                _mark("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
