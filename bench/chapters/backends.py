"""The chapters about reading: a verified hit from each backend, and what zstd makes of kernels."""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
from contenders.population import entry, key
from harness.corpus import NAMES, load
from harness.findings import Comparison, Ratio, Timing
from harness.main_job import Job
from harness.measure import Round, Summary, interleave, per_item, raw_read
from harness.plan import KIB, Found, Plan

import kcache
from kcache.backend import Backend
from kcache.entry import encode
from kcache_backends.file import FileBackend
from kcache_backends.zstd import DEFAULT_LEVEL, ZstdBackend

COUNT = 500
SIZE = 100 * KIB
LEVELS = (1, DEFAULT_LEVEL, 9, 19)
#: The kernels whose real outputs are stored. `trivial` is not among them: its entry is almost all
#: header.
REAL = NAMES[1:]


@cache
def outputs(name: str) -> kcache.Entry:
    """Compiles a kernel of the corpus, once, and returns its entry with PTX and CUBIN."""
    with TemporaryDirectory() as folder:
        job = Job(load(name), Path(folder))
        with job.empty_cache() as opened:
            kernel = job.request(opened)
    if not (kernel.ptx and kernel.cubin):
        raise RuntimeError(f"{name}: no PTX or no CUBIN")
    return kcache.Entry(
        {"ptx": kernel.ptx, "cubin": kernel.cubin},
        {"kind": "kernel", "compile_seconds": 1.0, "arch": "sm_90", "log": kernel.log},
    )


# -- gets: 100 KiB from each backend ---------------------------------------------------------------


@cache
def whole_outputs() -> bytes:
    """Returns the outputs of the real kernels, one after another."""
    return b"".join(part for name in REAL for part in outputs(name).payload.values())


def mix(number: int) -> kcache.Entry:
    """Returns 100 KiB cut from the outputs of the real kernels, elsewhere for each number."""
    whole = whole_outputs() * -(-2 * SIZE // len(whole_outputs()))
    start = number * 997 % (len(whole) - SIZE)
    return kcache.Entry({"cubin": whole[start : start + SIZE]}, {"compile_seconds": 1.0})


def gets(plan: Plan, folder: Path) -> Found:
    """`CacheEngine.get` of 100 KiB from every backend, beside a raw read of a file of that size."""
    noise = partial(entry, payload=SIZE)
    plain, wrapped = {"lmdb": 0.9, "file": None}, {"zstd": 3.0, "zstd+lmdb": 3.0}
    yield from _gets(plan, folder / "noise", noise, "that do not compress", plain)
    yield from _gets(plan, folder / "mix", mix, "of PTX and CUBIN", wrapped)


def _gets(
    plan: Plan,
    folder: Path,
    make: Callable[[int], kcache.Entry],
    content: str,
    backends: Mapping[str, float | None],
) -> Found:
    entries = {key(number): make(number) for number in range(COUNT)}
    order = random.Random(0).sample(list(entries), COUNT)
    tasks = [_raw_task(folder / "raw", entries, order), *_raw_lmdb(folder, entries, order)]
    engines = {name: kcache.open_engine(folder / "cache", backend=name) for name in backends}
    for name, engine in engines.items():
        for each, made in entries.items():
            engine.put(each, made)
        tasks.append(per_item(name, engine.get, order))
        # A backend that notes and writes no uses. It shows the time of a get without them.
        unused = kcache.CacheEngine(engine.backend, read_only=True)
        tasks.append(per_item(f"{name} unused", unused.get, order))
        tasks.append(per_item(f"{name} first", engine.get, order[:1] * COUNT))
    os.sync()
    interleave(2, tasks)
    rounds = interleave(plan.calls, tasks)
    for name, engine in engines.items():
        if engine.stats().misses:
            raise RuntimeError(f"{name}: not a hit")
        engine.close()
    ratio = partial(Comparison("gets", rounds).ratio, against="raw file read")
    of = f"500 keys, 100 KiB {content}"
    for name, target in backends.items():
        yield ratio(f"kcache `{name}`, get of each of {of}", name, other="raw", target=target)
    for name in backends:
        yield ratio(
            f"kcache `{name}`, the same, the use not recorded", f"{name} unused", other="raw"
        )
    for name in backends:
        yield ratio(
            f"kcache `{name}`, get of one key again and again", f"{name} first", other="raw, same"
        )
    yield ratio(f"raw LMDB get, each of {of}", "raw lmdb", other="raw")


def _raw_task(
    folder: Path, entries: dict[str, kcache.Entry], order: Sequence[str]
) -> Callable[[], Round]:
    for name, made in entries.items():
        path = folder / name[:2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.payload["cubin"])
    paths = [f"{folder}/{name[:2]}/{name}" for name in order]

    def task() -> Round:
        return {
            **per_item("raw", raw_read, paths)(),
            **per_item("raw, same", raw_read, paths[:1] * COUNT)(),
        }

    return task


def _raw_lmdb(
    folder: Path, entries: dict[str, kcache.Entry], order: Sequence[str]
) -> Iterator[Callable[[], Round]]:
    """A get with nothing around it: a transaction, a copy of the value."""
    environment = lmdb.open(str(folder / "raw lmdb"), map_size=4 * COUNT * SIZE)
    with environment.begin(write=True) as txn:
        for name, made in entries.items():
            txn.put(bytes.fromhex(name), made.payload["cubin"])

    def get(raw: bytes) -> None:
        with environment.begin() as txn:
            txn.get(raw)

    yield per_item("raw lmdb", get, [bytes.fromhex(name) for name in order])


# -- zstd: how small, and how fast -----------------------------------------------------------------


def zstd(plan: Plan, folder: Path) -> Found:
    """The entries of the kernels through zstd at several levels."""
    plain = FileBackend(folder / "plain")
    wrapped = {
        level: ZstdBackend(FileBackend(folder / f"level{level}"), level=level) for level in LEVELS
    }
    usual = wrapped[DEFAULT_LEVEL]
    for name in NAMES:
        whole = outputs(name)
        for output, value in whole.payload.items():
            part = kcache.Entry({output: value}, whole.metadata)
            yield _smaller(f"`{name}`, {output.upper()}", *_sizes([part], usual, plain))
    for level, backend in wrapped.items():
        sizes = _sizes(map(outputs, REAL), backend, plain)
        target = 4.0 if level == DEFAULT_LEVEL else None
        yield _smaller(f"the {len(REAL)} kernels with headers", *sizes, level, target)
    yield from _times(plan, {"plain": plain, **{f"level {n}": b for n, b in wrapped.items()}})


def _sizes(
    entries: Iterator[kcache.Entry] | Sequence[kcache.Entry],
    wrapped: ZstdBackend,
    plain: FileBackend,
) -> tuple[int, int]:
    """Returns the stored bytes of entries, compressed and plain."""
    blobs = [encode(key(0), each, producer=b"") for each in entries]
    stored, bare = (sum(b.put(key(0), blob) for blob in blobs) for b in (wrapped, plain))
    return stored, bare


def _smaller(
    what: str, stored: int, plain: int, level: int = DEFAULT_LEVEL, target: float | None = None
) -> Ratio:
    return Ratio(
        "zstd",
        f"{what}, stored at level {level}",
        "stored plain",
        "B",
        Summary.of([stored]),
        Summary.of([plain]),
        Summary.of([plain / stored]),
        target,
        at_least=True,
    )


def _put(backend: Backend, blob: tuple[str, bytes]) -> None:
    backend.put(*blob)


def _get(backend: Backend, blob: tuple[str, bytes]) -> None:
    backend.get(blob[0])


def _times(plan: Plan, backends: dict[str, FileBackend | ZstdBackend]) -> Found:
    """Put and get of 100 KiB, without a cap: what the level costs."""
    blobs = [(key(n), encode(key(n), mix(n), producer=b"")) for n in range(20)]
    tasks = [
        per_item(f"{name} {operation}", partial(function, backend), blobs)
        for name, backend in backends.items()
        for operation, function in (("put", _put), ("get", _get))
    ]
    for backend in backends.values():
        for blob in blobs:
            backend.put(*blob)
    rounds = interleave(plan.fills, tasks)
    for name, backend in backends.items():
        for operation in ("put", "get"):
            column = f"files, 100 KiB of PTX and CUBIN: {operation}"
            yield Timing("zstd", name, column, rounds.summary(f"{name} {operation}"))
        backend.close()
