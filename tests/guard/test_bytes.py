"""Bytes: what an operation allocates, what an entry holds in memory, what it takes on disk."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from guard.child import code, measuring, output
from guard.operations import PAYLOAD, entry, key

import kcache

KIB = 1 << 10
#: How many bytes Python's objects around a payload may take.
SMALL = 8 * KIB
#: operation -> copies of the payload at the peak. A hit holds the envelope as read, and the section
#: that is cut out of it; a put the envelope without and with its checksum; zstd compresses on top.
COPIES = {"hit in memory": 0, "hit": 2, "first hit of a key": 2, "put": 2, "put again": 2}


@pytest.mark.parametrize("backend", ["file", "zstd", "lmdb", "zstd+lmdb"])
def test_what_the_engine_allocates(backend: str, tmp_path: Path) -> None:
    command = measuring("bytes", tmp_path / "cache", backend)
    for name, (peak, left) in json.loads(output(command, tmp_path)).items():
        copies = COPIES.get(name, 0) + (name.startswith("put") and 1 + 2 * ("zstd" in backend))
        small = KIB // 2 if name == "hit in memory" else 4 * SMALL
        assert peak <= copies * PAYLOAD + small, name
        assert left <= ("hit" in name and "memory" not in name) * PAYLOAD + SMALL, name


@pytest.mark.usefixtures("nvrtc")
def test_what_a_hit_of_a_kernel_allocates(tmp_path: Path) -> None:
    allocated = json.loads(output(measuring("bytes", tmp_path, "kernels"), tmp_path))
    assert allocated["kernel in memory"][0] < KIB // 2
    assert allocated["kernel in memory, headers"][0] < 4 * KIB
    assert max(peak for peak, _ in allocated.values()) < 20 * KIB


_HELD = """
import gc, sys, tracemalloc
from guard.operations import entry, key
import kcache
place, size, count = sys.argv[1], int(sys.argv[2]), 1000
with kcache.open_engine(place, max_size=1 << 28, memory_size=1 << 28) as engine:
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
    print(tracemalloc.get_traced_memory()[0] / count)
"""


@pytest.mark.parametrize("size", [1, 4 * KIB])
def test_an_entry_in_memory_holds_its_payload_once(size: int, tmp_path: Path) -> None:
    held = float(output(code(_HELD, tmp_path, size), tmp_path))
    # Around it: key, entry, mappings and metadata; 1,208 bytes by Python 3.11.
    assert size + KIB // 2 < held <= size + KIB + KIB // 2


@pytest.mark.parametrize(
    ("backend", "size", "most"),
    [
        ("file", 1, 133 + 1),  # an envelope around one section
        ("file", PAYLOAD, 133 + PAYLOAD),
        ("zstd", PAYLOAD, 137 + PAYLOAD),  # what does not compress is kept as it is
        ("lmdb", 1, 4096),  # whole pages
        ("lmdb", PAYLOAD, 26 * 4096),
    ],
)
def test_what_an_entry_takes_on_disk(backend: str, size: int, most: int, tmp_path: Path) -> None:
    with kcache.open_engine(tmp_path, backend=backend) as engine:
        for number in range(100):
            assert engine.put(key(number), entry(size, number))
        infos = list(islice(engine.backend.scan(), 101))
        assert len(infos) == 100
        assert max(info.size for info in infos) <= most
        assert sum(info.size for info in infos) == engine.size_bytes
    if backend == "lmdb" and size == PAYLOAD:
        on_disk = (tmp_path / "lmdb/db/data.mdb").stat().st_size
        assert 100 * most <= on_disk <= 1.05 * 100 * most
