"""Bytes: what an operation allocates, what an entry holds in memory, what it takes on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from guard.child import code, measuring, output
from guard.scenarios import BACKENDS, KIB, PAYLOAD, SCENARIOS, entry, key

import kcache
from kcache.entry import encode

#: How many bytes Python's objects around a payload may take.
SMALL = 8 * KIB


@pytest.fixture(scope="module")
def allocated(folder: Path, has_compiler: bool) -> dict[str, list[int]]:
    """Scenario -> bytes at the peak, bytes that are left, both as tracemalloc counts them."""
    found: dict[str, list[int]] = json.loads(
        output(measuring("bytes", folder, compiler=has_compiler), folder)
    )
    return found


@pytest.fixture
def peak(allocated: dict[str, list[int]], request: pytest.FixtureRequest) -> Callable[[str], int]:
    def asked(name: str) -> int:
        if SCENARIOS[name].compiler:
            request.getfixturevalue("nvrtc")
        return allocated[name][0]

    return asked


@pytest.mark.parametrize("name", ["memory: hit", "kernel: hit in memory"])
def test_a_hit_from_memory_copies_nothing(name: str, peak: Callable[[str], int]) -> None:
    assert peak(name) < KIB // 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_holds_the_payload_twice_at_most(
    backend: str, allocated: dict[str, list[int]]
) -> None:
    """The envelope as read, and the section cut out of it; then only that."""
    most, left = allocated[f"{backend}: hit"]
    assert 2 * PAYLOAD <= most <= 2 * PAYLOAD + SMALL
    assert PAYLOAD <= left <= PAYLOAD + KIB


@pytest.mark.parametrize("operation", ["put", "put again"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_put_copies_the_payload_three_times_at_most(
    backend: str, operation: str, allocated: dict[str, list[int]]
) -> None:
    """The scenario's payload, the envelope without and with its checksum; zstd's output comes on
    top, and here nothing can be compressed."""
    most, left = allocated[f"{backend}: {operation}"]
    copies = 3 + 2 * ("zstd" in backend)
    assert (copies - 1) * PAYLOAD <= most <= copies * PAYLOAD + SMALL
    assert left < KIB


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("key", 8 * KIB),  # 3 KiB of them are the source, encoded
        ("request", 8 * KIB),  # the fields of the key are hashed at once, so held at once
        ("kernel: hit in memory, headers", 4 * KIB),
        ("kernel: hit in file", 16 * KIB),
        ("kernel: hit in lmdb", 16 * KIB),
        ("kernel: lookup that misses", 8 * KIB),
        ("kernel: open and close", 16 * KIB),
        *((f"{backend}: miss", 2 * KIB) for backend in BACKENDS),
        *((f"{backend}: delete", 8 * KIB) for backend in BACKENDS),
        *((f"{backend}: open and close", 16 * KIB) for backend in BACKENDS),
    ],
)
def test_what_moves_no_payload_allocates_little(
    name: str, most: int, peak: Callable[[str], int]
) -> None:
    assert 0 < peak(name) <= most


# -- the memory tier -------------------------------------------------------------------------------

_HELD = """
import gc, sys, tracemalloc
from guard.scenarios import entry, key, still
import kcache
place, size = sys.argv[1], int(sys.argv[2])
count = 1000
with kcache.open_engine(place, max_size=1 << 28, memory_size=1 << 28) as engine:
    still(engine)
    for number in range(count):
        assert engine.put(key(number), entry(size, number))
    engine.memory.clear()
    engine.get(key(0))
    engine.memory.clear()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    for number in range(count):
        assert engine.get(key(number)) is not None
    held, _ = tracemalloc.get_traced_memory()
    print(held / count)
"""


#: Bytes around a payload, for key, entry, mappings and metadata: 1,208 by Python 3.11, 1,168 by 3.12
#: and 3.13. That the tier charges more than it holds is tested in tests/core/test_memory.py.
_AROUND = 1536


@pytest.mark.parametrize("size", [1, 4 * KIB])
def test_an_entry_in_memory_holds_its_payload_once(size: int, tmp_path: Path) -> None:
    held = float(output(code(_HELD, tmp_path, size), tmp_path))
    assert size + KIB // 2 < held <= size + _AROUND


# -- the disk --------------------------------------------------------------------------------------

#: Bytes of an envelope around one section "cubin" and the metadata of `entry`.
ENVELOPE = 133
PAGE = 4096


def _stored(backend: str, place: Path, size: int, count: int = 1) -> int:
    with kcache.open_engine(place, backend=backend) as engine:
        for number in range(count):
            assert engine.put(key(number), entry(size, number))
        infos = list(islice(engine.backend.scan(), count + 1))
        assert len(infos) == count
        assert sum(info.size for info in infos) == engine.size_bytes
        return engine.size_bytes


def test_the_envelope_adds_little_to_a_payload() -> None:
    for size in (0, 1, PAYLOAD):
        assert len(encode(key(0), entry(size))) == size + ENVELOPE


@pytest.mark.parametrize("size", [1, KIB, PAYLOAD])
def test_a_file_is_the_envelope(size: int, tmp_path: Path) -> None:
    assert _stored("file", tmp_path, size) == size + ENVELOPE
    (found,) = (tmp_path / "file").glob("??/" + "?" * 64)
    assert found.stat().st_size == size + ENVELOPE


@pytest.mark.parametrize("size", [1, KIB, PAYLOAD])
def test_what_does_not_compress_is_kept_as_it_is(size: int, tmp_path: Path) -> None:
    assert _stored("zstd", tmp_path, size) <= size + ENVELOPE + 4


def test_what_compresses_is_kept_small(tmp_path: Path) -> None:
    with kcache.open_engine(tmp_path, backend="zstd") as engine:
        assert engine.put(key(0), kcache.Entry({"cubin": b"kernel" * (PAYLOAD // 6)}))
        assert engine.size_bytes < PAYLOAD // 100


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (KIB, 1), (PAYLOAD, 26)])
def test_lmdb_takes_whole_pages(size: int, pages: int, tmp_path: Path) -> None:
    """As accounted; a value of more than half a page begins a page of its own."""
    assert _stored("lmdb", tmp_path, size) == pages * PAGE


def test_lmdb_takes_little_beside_the_values(tmp_path: Path) -> None:
    """The file of a hundred entries against what is accounted for them."""
    stored = _stored("lmdb", tmp_path, PAYLOAD, 100)
    size = (tmp_path / "lmdb/db/data.mdb").stat().st_size
    assert stored <= size <= 1.05 * stored
