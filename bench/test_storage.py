"""Storage: gets and puts by size, puts into a full cache, opening a cache, and bytes on disk."""

import itertools
import random
from pathlib import Path
from typing import Any

import contenders
import corpus
import pytest
from contenders import CAPPED, EVERYTHING, KIB, ON_DISK, OURS, Opened, key, noise
from keep import Keep

import kcache

#: The size of a usual kernel in KiB. Only this size has targets.
USUAL = 100
MORE = [pytest.param(kib, marks=pytest.mark.slow) for kib in (1, 16, 16384)]
TARGETS = (
    pytest.mark.target("kcache file", contenders.RAW_FILE, 1.4),
    pytest.mark.target("kcache lmdb", contenders.RAW_FILE, 0.95),
    pytest.mark.target("kcache zstd", contenders.RAW_ZSTD, 1.2),
)
#: The bytes of all values that are got in turn: more than the processor's caches usually hold.
TOGETHER = 8 << 20

# -- gets and puts ---------------------------------------------------------------------------------


def _outputs(keep: Keep) -> bytes:
    """Return the PTX and the CUBIN of all kernels, joined into one value."""
    cases = [corpus.load(name) for name in list(corpus.NAMES)[1:]]
    with kcache.KernelCache(keep.folder()) as cache:
        kernels = [cache.get_or_compile(each.source, each.names, each.options) for each in cases]
    return b"".join((each.ptx or b"") + (each.cubin or b"") for each in kernels)


def _values(keep: Keep, contender: str, size: int) -> list[bytes]:
    """Return incompressible values, or, for zstd, pieces of PTX and CUBIN.

    The bytes of each piece are mapped to other bytes, so that no two pieces are alike.
    """
    count = min(max(TOGETHER // size, 2), 80)
    if "zstd" not in contender:
        return [noise(number, size) for number in range(count)]
    whole = keep(_outputs)
    whole *= 1 + 2 * size // len(whole)
    found = []
    for number in range(count):
        codes = bytes(random.Random(number).sample(range(256), 256))
        start = number * 997 % (len(whole) - size)
        found.append(whole[start : start + size].translate(codes))
    return found


def _opened(keep: Keep, contender: str, kib: int) -> tuple[Opened, list[bytes]]:
    opened = EVERYTHING[contender](keep.folder(), None)
    keep.callback(opened.close)
    values = keep(_values, contender, kib * KIB)
    for number, value in enumerate(values):
        opened.put(key(number), value)
    if opened.get(key(0)) != values[0]:
        raise RuntimeError(f"{contender}: not what was put")
    return opened, values


@pytest.mark.beside("get of {kib} KiB", "{contender}")
@pytest.mark.parametrize("contender", EVERYTHING)
@pytest.mark.parametrize("kib", [4, pytest.param(USUAL, marks=TARGETS), 1024, *MORE])
def test_get(benchmark: Any, keep: Keep, kib: int, contender: str) -> None:
    opened, values = keep(_opened, contender, kib)
    get, names = opened.get, itertools.cycle([key(number) for number in range(len(values))])
    benchmark(lambda: get(next(names)))


@pytest.mark.beside("put of {kib} KiB", "{contender}")
@pytest.mark.parametrize("contender", [each for each in EVERYTHING if each != contenders.MEMORY])
@pytest.mark.parametrize("kib", [4, USUAL, 1024, *MORE])
def test_put(benchmark: Any, keep: Keep, kib: int, contender: str, lap: int) -> None:
    opened, values = keep(_opened, contender, kib)
    numbers, turns = itertools.count(1000 * (lap + 1)), itertools.cycle(values)
    benchmark.pedantic(
        lambda: opened.put(key(next(numbers)), next(turns)),
        rounds=3,
        iterations=min(len(values), 10),
    )


# -- many entries, in a file system in memory, so that the cache is measured and not the disk ------

PAYLOAD = 4 * KIB
#: Contenders that look at every entry in each put. They are not measured with 100,000 entries.
SCANNING = (contenders.FILE_STREAM, contenders.JAX)
#: Contenders that are measured with 100,000 entries even in the quick form.
QUICK = ("kcache file", "kcache lmdb")
MANY = [
    pytest.param(name, count, marks=[pytest.mark.slow] * (count > 10_000 and name not in QUICK))
    for name in (*OURS, *CAPPED)
    for count in (1_000, 10_000, 100_000)[: 2 if name in SCANNING else 3]
]


def _population(keep: Keep, contender: str, count: int) -> tuple[Path, int]:
    place = keep.folder(on_disk=False)
    return place, contenders.fill(contender, place, count, PAYLOAD)


def _at_the_cap(keep: Keep, contender: str, count: int) -> Opened:
    opened = EVERYTHING[contender](*keep(_population, contender, count))
    keep.callback(opened.close)
    for number in range(2):  # the first put counts the entries
        opened.put(key(-1 - number), noise(number, PAYLOAD))
    return opened


@pytest.mark.beside("put at the cap: {contender}", "{entries:,} entries")
@pytest.mark.target("100,000 entries", "1,000 entries", 1.3)
@pytest.mark.parametrize(("contender", "entries"), MANY)
def test_put_at_the_cap(benchmark: Any, keep: Keep, contender: str, entries: int, lap: int) -> None:
    """Put into a full cache. One in 65 of kcache's puts evicts for the others; a round has four."""
    opened = keep(_at_the_cap, contender, entries)
    numbers = itertools.count(1_000_000 * (lap + 1))

    def put() -> None:
        number = next(numbers)
        opened.put(key(number), noise(number, PAYLOAD))

    iterations = 1 if contender in SCANNING else 260
    benchmark.pedantic(put, rounds=2, iterations=iterations)
    cap = keep(_population, contender, entries)[1]
    if opened.size and opened.size() > cap:
        raise RuntimeError(f"more than the cap of {cap} bytes")


@pytest.mark.beside("opening among {entries:,} entries", "{contender}")
@pytest.mark.parametrize(("contender", "entries"), MANY)
def test_open(benchmark: Any, keep: Keep, contender: str, entries: int) -> None:
    """Open a cache, and get the number of its stored bytes if it counts them."""
    place, cap = keep(_population, contender, entries)
    benchmark.pedantic(_open, (contender, place, cap), rounds=3)


def _open(contender: str, place: Path, cap: int) -> None:
    opened = EVERYTHING[contender](place, cap)
    if opened.size:
        opened.size()
    opened.close()


# -- bytes on disk ---------------------------------------------------------------------------------

COPIES = 40


@pytest.mark.laps(1)
@pytest.mark.beside("bytes on disk", "{contender}")
@pytest.mark.parametrize(
    "contender", [each for each in ON_DISK if each not in (contenders.CUPY, contenders.TRITON)]
)
def test_disk(benchmark: Any, keep: Keep, contender: str) -> None:
    """Put the kernels' PTX and CUBIN under 40 keys; compare the bytes on disk with the payload."""
    place, value = keep.folder(), keep(_outputs)
    opened = EVERYTHING[contender](place, None)
    numbers = itertools.count()
    benchmark.pedantic(lambda: opened.put(key(next(numbers)), value), rounds=COPIES)
    opened.close()
    used = sum(path.stat().st_blocks * 512 for path in place.rglob("*"))
    benchmark.extra_info |= {"found": f"{used / COPIES / len(value):.3g}", "right": True}
