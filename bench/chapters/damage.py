"""The chapter about trust: what a cache serves, keeps and loses when something goes wrong.

Facts, not times: each is made to happen here, for kcache with every backend and for every peer that
it can happen to. A fact's figure is "what happens: who"; `met` says whether it is as it should be.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from contenders import fault_probes
from contenders.contenders import BY_NAME, FILE_STREAM, ON_DISK, OURS, Contender, available
from contenders.population import key, value
from harness.findings import Fact
from harness.plan import KIB, Found, Plan
from harness.worker_processes import Workers

CHAPTER = "trust"
#: The probes by name: a description, the expected finding, and the caches it runs with. Caches of
#: bytes have no compiler.
BYTES: dict[str, tuple[str, str]] = {
    "truncated": (
        "the file that holds an entry is cut to a third, then asked for",
        fault_probes.MISS,
    ),
    "flipped": ("one bit of a value is damaged, then asked for", fault_probes.MISS),
    "oversize": ("an object of twice the cap is put beside 8 that fit", fault_probes.KEPT),
}
KERNELS: dict[str, tuple[str, str]] = {
    "header": ("an included header is edited, then the same source asked for", fault_probes.AGAIN),
    "full": (
        "no file may grow (as on a full disk) while a kernel is compiled",
        fault_probes.RETURNED,
    ),
    "read_only": ("the directory is read-only while a kernel is compiled", fault_probes.RETURNED),
}
WRITERS, CAP, PAYLOAD = 8, 1_000_000, 32 * KIB
#: Each writer alone puts nine tenths of the cap. A writer that counts only its own puts sees no
#: reason to evict.
PUTS = CAP * 9 // 10 // PAYLOAD
#: The allowed excess: one entry for each writer, 2 % on that, and the size of the counters and the
#: statistics...
SPARE = int(WRITERS * PAYLOAD * 1.02) + 64 * KIB
#: ... or, for LMDB, a file of twice the cap, the table of readers and the statistics.
LMDB_BOUND = 2 * CAP + (132 + 64) * KIB


def trust(plan: Plan, folder: Path) -> Found:
    """What is served, kept and lost."""
    del plan  # a result that occurs once occurs always
    contenders, absent = available(CHAPTER, ON_DISK)
    yield from absent
    able = [each for each in contenders if each.role == OURS or each.name == FILE_STREAM]
    chosen = {**dict.fromkeys(BYTES, contenders), **dict.fromkeys(KERNELS, able)}
    cases = [(probe, each) for probe, group in chosen.items() for each in group]

    def run(case: tuple[str, Contender]) -> str:
        probe, each = case
        place = folder / f"{probe} {each.name}"
        place.mkdir()
        return fault_probes.run(probe, each.name, place)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(cases, pool.map(run, cases), strict=True))
    for probe, (words, target) in {**BYTES, **KERNELS}.items():
        group = {each.name: found[probe, each] for each in chosen[probe]}
        yield from _facts(words, target, group)
    yield from _cap(contenders, folder)


def _facts(words: str, target: str, found: dict[str, str]) -> Iterator[Fact]:
    """One fact of kcache with all its backends, and one of each peer."""
    ours = {name: what for name, what in found.items() if BY_NAME[name].role == OURS}
    met = set(ours.values()) == {target}
    what = target if met else _each(ours)
    yield Fact(CHAPTER, f"{words}: kcache", what, target, met)
    for name, what in found.items():
        if name not in ours:
            yield Fact(CHAPTER, f"{words}: {name}", what, target, what == target)


def _each(ours: dict[str, str]) -> str:
    return ", ".join(f"`{BY_NAME[name].backend}` {what}" for name, what in ours.items())


# -- a cap and several writers -------------------------------------------------------------------


def _cap(contenders: Iterable[Contender], folder: Path) -> Iterator[Fact]:
    words = f"bytes on disk after {WRITERS} writers put 9/10 of the cap of {_megabytes(CAP)} each"
    found: dict[str, int] = {}
    for each in contenders:
        place = folder / f"cap {each.name}"
        with Workers("chapters.damage", WRITERS, (each.name, str(place))) as workers:
            failed = sum(workers.run(WRITERS))
        # Counted when all have ended. By then, a write-ahead log is part of its database.
        found[each.name] = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        if failed and each.role == OURS:
            raise RuntimeError(f"{each.name}: {failed} puts failed")
    ours = {name: size for name, size in found.items() if BY_NAME[name].role == OURS}
    met = all(size <= _bound(BY_NAME[name]) for name, size in ours.items())
    plain, mapped = _megabytes(CAP + SPARE), _megabytes(LMDB_BOUND)
    what = _each({name: _megabytes(size) for name, size in ours.items()})
    target = f"≤ {plain}; in LMDB ≤ {mapped}"
    yield Fact(CHAPTER, f"{words}: kcache", what, target, met)
    for name, size in found.items():
        if name not in ours:
            fine = size <= CAP + SPARE
            yield Fact(CHAPTER, f"{words}: {name}", _megabytes(size), f"≤ {plain}", fine)


def _bound(each: Contender) -> int:
    """What the documentation promises; see "What the cap bounds" there."""
    return LMDB_BOUND if str(each.backend).endswith("lmdb") else CAP + SPARE


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


class Writer:
    """A process that opens an empty cache and, when it is told to, puts; see `Workers`."""

    def __init__(self, number: int, name: str, folder: str) -> None:
        self._first = number * PUTS
        self._opened = BY_NAME[name].open(Path(folder), CAP)

    def __call__(self) -> int:
        """Returns how many puts failed."""
        failed = 0
        for number in range(self._first, self._first + PUTS):
            try:
                self._opened.put(key(number), value(number, PAYLOAD))
            except Exception:  # any exception is counted
                failed += 1
        return failed


work = Writer
