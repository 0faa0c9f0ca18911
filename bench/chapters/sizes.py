"""The chapter about sizes: a get and a put of each cache, for small and for large values."""

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
from contenders.contenders import (
    BY_NAME,
    CONTENDERS,
    MEMORY,
    OURS,
    ROOMY,
    Contender,
    Opened,
    available,
)
from contenders.population import key
from harness.corpus import NAMES, load
from harness.findings import Comparison, Point
from harness.main_job import Job
from harness.measure import Round, Rounds, interleave, per_item, raw_read
from harness.plan import KIB, Found, Plan

#: The kernels whose outputs show how kernels compress. `trivial` is not among them: its CUBIN is
#: almost all header.
REAL = NAMES[1:]
#: The size for which ratios are reported.
USUAL = 100 * KIB
#: A get or put goes over values of this many bytes in all, so that they are not all in the
#: processor's caches...
TOGETHER = 8 << 20
#: ... but over at least and at most this many values.
FEWEST, MOST = 2, 80
RAW_FILE, RAW_LMDB = "raw file read", "raw LMDB get"
RAW_WRITE, RAW_LMDB_PUT = "raw file write", "raw LMDB put"
FLOORS = {"get": (RAW_FILE, RAW_LMDB), "put": (RAW_WRITE, RAW_LMDB_PUT)}


def sizes(plan: Plan, folder: Path) -> Found:
    """Gets of values that are there, puts of new ones without anything to evict."""
    contenders, absent = available("sizes", (*CONTENDERS, MEMORY))
    yield from absent
    for size in plan.value_sizes:
        yield from _size(plan, folder / str(size), contenders, size)


def _size(plan: Plan, folder: Path, contenders: list[Contender], size: int) -> Found:
    count = min(max(TOGETHER // size, FEWEST), MOST)
    tasks: list[Callable[[], Round]] = []
    opened: list[Opened] = []
    for each in contenders:
        each_opened = each.open(folder / each.name, ROOMY)
        opened.append(each_opened)
        tasks += _tasks(each, each_opened, size, count)
    tasks += _raw_files(folder / "raw", size, count)
    tasks += _raw_lmdb(folder / "raw lmdb", size, count)
    os.sync()
    interleave(1, tasks)
    rounds = interleave(plan.fills, tasks)
    for each_opened in opened:
        each_opened.close()
    shutil.rmtree(folder)
    for operation, floors in FLOORS.items():
        point = partial(
            Point, "sizes", f"{operation} against size", x=size, x_name="bytes", unit="s"
        )
        series = [(each.name, each.role) for each in contenders if _does(each, operation)]
        for name, role in [*series, *((name, "floor") for name in floors)]:
            yield point(series=name, role=role, y=rounds.summary(f"{operation} {name}"))
    if size == USUAL:
        yield from _ratios(contenders, rounds)


def _ratios(contenders: list[Contender], rounds: Rounds) -> Found:
    """Ours to every peer and floor that keeps values where it does: on the disk, in memory."""
    ratio = Comparison("sizes", rounds).ratio
    for operation, floors in FLOORS.items():
        for each in contenders:
            if each.role != OURS or not _does(each, operation):
                continue
            peers = [other.name for other in contenders if other.role != OURS]
            alike = [name for name in peers if BY_NAME[name].on_disk == each.on_disk]
            for other in (*alike, *(floors if each.on_disk else ())):
                yield ratio(
                    f"{each.name}, {operation} of {USUAL // KIB} KiB",
                    f"{operation} {each.name}",
                    other,
                    f"{operation} {other}",
                )


def _does(each: Contender, operation: str) -> bool:
    """Whether it is measured: a put into the memory tier is a put into the backend below it."""
    return operation == "get" or each is not MEMORY


def _tasks(each: Contender, opened: Opened, size: int, count: int) -> Iterator[Callable[[], Round]]:
    make = kernel_like if each.backend and "zstd" in each.backend else noise
    values = [make(size, number) for number in range(count)]
    for number, value in enumerate(values):
        opened.put(key(number), value)
    order = [key(number) for number in random.Random(0).sample(range(count), count)]
    numbers = itertools.count(count)

    def get(name: str) -> None:
        if opened.get(name) is None:
            raise RuntimeError(f"{each.name}: not a hit")

    def put_new() -> Round:
        new = [(key(next(numbers)), value) for value in values[: max(count // 4, 1)]]
        start = time.perf_counter()
        for name, value in new:
            opened.put(name, value)
        return {f"put {each.name}": (time.perf_counter() - start) / len(new)}

    yield per_item(f"get {each.name}", get, order)
    if _does(each, "put"):
        yield put_new


# -- what is read and written --------------------------------------------------------------------


@cache
def _noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def noise(size: int, number: int) -> bytes:
    """Returns bytes that do not compress, others for each number."""
    return number.to_bytes(8, "little") + _noise(size)[8:]


@cache
def whole_outputs() -> bytes:
    """Returns PTX and CUBIN of the real kernels, one after another."""
    return b"".join(part for name in REAL for part in _outputs(name))


def _outputs(name: str) -> tuple[bytes, bytes]:
    with TemporaryDirectory() as folder:
        job = Job(load(name), Path(folder))
        with job.empty_cache() as opened:
            kernel = job.request(opened)
    if not (kernel.ptx and kernel.cubin):
        raise RuntimeError(f"{name}: no PTX or no CUBIN")
    return kernel.ptx, kernel.cubin


@cache
def _material(size: int) -> bytes:
    """Returns outputs of the real kernels, again and again in other codes of their bytes.

    Each repetition has its bytes exchanged for others, one for one: it compresses as the first one
    does, but not because the first one is there.
    """
    whole = whole_outputs()
    parts: list[bytes] = []
    for number in range(-(-2 * size // len(whole))):
        table = bytes(random.Random(number).sample(range(256), 256)) if number else None
        parts.append(whole.translate(table) if table else whole)
    return b"".join(parts)


def kernel_like(size: int, number: int) -> bytes:
    """Returns bytes that compress as PTX and CUBIN do, others for each number."""
    material = _material(size)
    start = number * 997 % (len(material) - size)
    return material[start : start + size]


# -- floors --------------------------------------------------------------------------------------


def _raw_files(folder: Path, size: int, count: int) -> Iterator[Callable[[], Round]]:
    """Files by system calls alone: read, and written under another name and renamed."""
    folder.mkdir(parents=True)
    paths = [f"{folder}/{number}" for number in range(count)]
    values = [noise(size, number) for number in range(count)]
    for path, value in zip(paths, values, strict=True):
        Path(path).write_bytes(value)
    numbers = itertools.count()

    def write(value: bytes) -> None:
        path = f"{folder}/new{next(numbers)}"
        descriptor = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, value)
        os.close(descriptor)
        os.rename(path + ".tmp", path)

    yield per_item(f"get {RAW_FILE}", raw_read, random.Random(0).sample(paths, count))
    yield per_item(f"put {RAW_WRITE}", write, values[: max(count // 4, 1)])


def _raw_lmdb(folder: Path, size: int, count: int) -> Iterator[Callable[[], Round]]:
    """LMDB by itself: a transaction and a copy for each, synchronised as kcache does it."""
    folder.mkdir(parents=True)
    environment = lmdb.open(str(folder), map_size=ROOMY, metasync=False)
    values = [noise(size, number) for number in range(count)]
    numbers = itertools.count()

    def put(value: bytes) -> None:
        with environment.begin(write=True) as txn:
            txn.put(next(numbers).to_bytes(32, "big"), value)

    def get(number: int) -> None:
        with environment.begin() as txn:
            txn.get(number.to_bytes(32, "big"))

    for value in values:
        put(value)
    yield per_item(f"get {RAW_LMDB}", get, random.Random(0).sample(range(count), count))
    yield per_item(f"put {RAW_LMDB_PUT}", put, values[: max(count // 4, 1)])
