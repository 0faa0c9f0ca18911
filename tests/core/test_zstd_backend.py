"""ZstdBackend: what is stored, and that damaged values can't make it allocate much memory."""

import os
import struct
import tracemalloc
from typing import Any

import pytest
import zstandard
from core.helpers import QUICK, entry, key
from hypothesis import given
from hypothesis import strategies as st

from kcache import CacheEngine, ConfigError, CorruptEntryError
from kcache.testing import MemoryBackend
from kcache_backends.zstd import MAX_SIZE, SMALL, ZstdBackend

PTX = b"ld.param.u64 %rd1, [axpy_param_0];\n" * 3000


def stored(inner: MemoryBackend, name: str) -> bytes:
    found = inner.get(name)
    assert found is not None
    return found


@given(st.binary(max_size=2000), st.integers(1, 50), st.sampled_from([-7, 1, 3, 22]))
@QUICK
def test_values_come_back_and_are_never_stored_larger(value: bytes, times: int, level: int) -> None:
    inner = MemoryBackend()
    backend = ZstdBackend(inner, level=level)
    size = backend.put(key(1), value * times)
    assert backend.get(key(1)) == backend.use(key(1)) == value * times
    assert size == len(stored(inner, key(1))) <= len(value) * times + 4
    assert size <= len(value) * times + backend.overhead


def test_compressed_values_are_zstandard_frames() -> None:
    inner = MemoryBackend()
    ZstdBackend(inner).put(key(1), PTX)
    raw = stored(inner, key(1))
    assert raw[:4] == b"KCZz"
    assert zstandard.ZstdDecompressor().decompress(raw[4:]) == PTX
    assert len(raw) < len(PTX) / 50
    noise = os.urandom(1000)
    ZstdBackend(inner).put(key(2), noise)
    assert stored(inner, key(2)) == b"KCZr" + noise


@pytest.mark.parametrize("level", [-8, 23, 3.0, "3", True, None])
def test_another_level_is_refused_by_name(level: Any) -> None:
    with pytest.raises(ConfigError, match=r"level: expected -7 to 22"):
        ZstdBackend(MemoryBackend(), level=level)


def frame_that_claims(size: int) -> bytes:
    """Return the header of a frame whose content has `size` bytes (RFC 8878, 3.1.1.1)."""
    return struct.pack("<IBQ", 0xFD2FB528, 0b11100000, size) + b"\x01\x00\x00"


FRAME = zstandard.ZstdCompressor().compress(PTX)
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(PTX)
NO_VALUES = {
    "nothing": b"",
    "too short": b"KCZ",
    "another prefix": b"KCZx" + FRAME,
    "no prefix": FRAME,
    "no frame": b"KCZz",
    "truncated": b"KCZz" + FRAME[:-1],
    "extended": b"KCZz" + FRAME + b"x",
    "two frames": b"KCZz" + FRAME + FRAME,
    "no content size": b"KCZz" + UNSIZED,
    "a bomb": b"KCZz" + frame_that_claims(MAX_SIZE + 1),
    "a larger bomb": b"KCZz" + frame_that_claims((1 << 64) - 3),
    "the largest allowed, with nothing in it": b"KCZz" + frame_that_claims(1 << 20),
    "a skippable frame": b"KCZz" + struct.pack("<II", 0x184D2A50, 4) + b"1234",
}


@pytest.mark.parametrize("what", NO_VALUES)
def test_invalid_values_are_damage(what: str) -> None:
    inner = MemoryBackend()
    backend = ZstdBackend(inner)
    inner.put(key(1), NO_VALUES[what])
    for read in (backend.get, backend.use):
        with pytest.raises(CorruptEntryError):
            read(key(1))
    engine = CacheEngine(backend)
    assert engine.get(key(1)) is None
    assert (engine.stats().corrupt, engine.stats().errors) == (1, 0)
    assert engine.put(key(1), entry())
    assert engine.get(key(1)) == entry()


def test_a_small_frame_that_grows_is_damage_and_not_decompressed() -> None:
    inner = MemoryBackend()
    for size, cap in ((1 << 30, None), (64 << 20, None), (8 << 20, 4 << 20)):
        bomb = zstandard.ZstdCompressor(level=3).compress(bytes(size))
        inner.put(key(1), b"KCZz" + bomb)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptEntryError, match=f"frame: expected .*, got {size}"):
                ZstdBackend(inner, max_size=cap).get(key(1))
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("size", [SMALL, SMALL + 1, 5 << 20])
def test_values_that_compress_too_well_are_stored_uncompressed(size: int) -> None:
    inner = MemoryBackend()
    backend = ZstdBackend(inner, max_size=8 << 20)
    backend.put(key(1), bytes(size))
    assert stored(inner, key(1))[:4] == (b"KCZz" if size <= SMALL else b"KCZr")
    assert backend.get(key(1)) == bytes(size)
