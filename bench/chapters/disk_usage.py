"""The chapter about the disk: what each cache takes there for the outputs of the real kernels."""

import os
from collections.abc import Callable
from pathlib import Path

from contenders.contenders import ON_DISK, OURS, ROOMY, Contender, available
from contenders.population import key
from harness.corpus import NAMES
from harness.findings import Ratio
from harness.measure import Summary
from harness.plan import Found, Plan

from chapters.backends import outputs

CHAPTER = "disk"
#: Each kernel is stored under this many keys. So the fixed size of a cache counts as little as in a
#: cache that is in use.
COPIES = 40
PAYLOAD = "its payload"


def disk(plan: Plan, folder: Path) -> Found:
    """PTX and CUBIN of every kernel of the corpus: in one entry, where a cache has such."""
    del plan  # sizes in bytes are the same in each round
    contenders, absent = available(CHAPTER, ON_DISK)
    yield from absent
    payload = sum(len(part) for name in NAMES for part in outputs(name).payload.values()) * COPIES
    lengths: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for each in contenders:
        place = folder / each.name
        _keep(each, place)
        lengths[each.name] = _total(place, lambda status: status.st_size, folders=False)
        blocks[each.name] = _total(place, lambda status: status.st_blocks * 512, folders=True)
    what = f"{len(NAMES)} kernels under {COPIES} keys each"
    for words, sizes in {"length of all files": lengths, "blocks (`du`)": blocks}.items():
        for each in contenders:
            yield _ratio(f"{each.name}, {what}: {words}", sizes[each.name], PAYLOAD, payload)
    ours = [each.name for each in contenders if each.role == OURS]
    peers = [each.name for each in contenders if each.role != OURS]
    for name in ours:
        for peer in peers:
            figure = f"{name}, {what}: blocks (`du`)"
            yield _ratio(figure, blocks[name], peer, blocks[peer])


def _keep(each: Contender, place: Path) -> None:
    """Puts all outputs; a peer has one value under a key, so it is given two keys."""
    opened = each.open(place, ROOMY)
    numbers = iter(range(10**9))
    for _ in range(COPIES):
        for name in NAMES:
            if opened.engine is not None:
                opened.engine.put(key(next(numbers)), outputs(name))
                continue
            for part in outputs(name).payload.values():
                opened.put(key(next(numbers)), part)
    opened.close()


def _total(place: Path, size: Callable[[os.stat_result], int], *, folders: bool) -> int:
    found = (place, *place.rglob("*")) if folders else place.rglob("*")
    return sum(size(path.stat()) for path in found if folders or path.is_file())


def _ratio(figure: str, ours: int, against: str, other: int) -> Ratio:
    sides = Summary.of([ours]), Summary.of([other])
    return Ratio(CHAPTER, figure, against, "B", *sides, Summary.of([ours / other]))
