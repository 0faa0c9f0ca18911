"""Malformed bundles are refused, and leave the cache as it was."""

from __future__ import annotations

import io
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from bundle.bundles import bundle_of, damaged, envelope, forged, kernels, with_headers
from cli.helpers import fill, held, kernel, key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kcache
from kcache import BundleError, Entry, KernelCache
from kcache.bundle.format import HEAD_SIZE, MAX_ENTRIES, MAX_VALUE, RECORD_SIZE, TRAILER_SIZE
from kcache.bundle.reader import Bundle
from kcache.bundle.writer import BundleWriter
from kcache.entry import encode


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    entries = {**kernels(5, 60), **with_headers(1, 2)}
    return bundle_of(entries, tmp_path_factory.mktemp("sound"))


def refused(data: bytes, place: Path, match: str | None = None) -> None:
    """Asserts that an import of `data` fails, and that nothing is in the cache."""
    with KernelCache(place) as cache:
        with pytest.raises(BundleError, match=match):
            kcache.import_bundle(cache, io.BytesIO(data))
        assert cache.entry_count == 0
    with pytest.raises(BundleError):
        kcache.verify_bundle(io.BytesIO(data))
    with pytest.raises(BundleError):
        list(kcache.list_bundle(io.BytesIO(data)))


def values(*numbers: int) -> list[tuple[bytes, bytes]]:
    """Returns keys, as bytes, and envelopes."""
    found = sorted((key(n), envelope(key(n), kernel(20))) for n in numbers)
    return [(bytes.fromhex(name), value) for name, value in found]


def test_a_forgery_that_is_right_is_accepted() -> None:
    """What the other tests change, one thing each."""
    assert kcache.verify_bundle(io.BytesIO(forged(values(1, 2, 3)))).kernels == 3


def test_every_single_bit(sound: bytes) -> None:
    """Each byte has a bit changed, and the file is cut there: no reader accepts it."""
    chance = random.Random(1)
    for at in range(len(sound)):
        changed = bytearray(sound)
        changed[at] ^= 1 << chance.randrange(8)
        with pytest.raises(BundleError):
            kcache.verify_bundle(io.BytesIO(changed))
    for length in range(0, len(sound), 7):
        with pytest.raises(BundleError):
            kcache.verify_bundle(io.BytesIO(sound[:length]))
    with pytest.raises(BundleError):
        kcache.verify_bundle(io.BytesIO(sound + b"\0"))


def test_random_damage(sound: bytes, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Whatever is done to a bundle, it is refused, and a layer of it returns or raises."""
    chance = random.Random(2)
    path = tmp_path / "kernels.kcb"
    for _ in range(20_000 if pytestconfig.getoption("--long", default=False) else 400):
        data = damaged(sound, chance)
        if data == sound:
            continue
        path.write_bytes(data)
        with pytest.raises(BundleError):
            kcache.verify_bundle(path)
        try:
            bundle = Bundle(path)
        except BundleError:
            continue
        for number in (*range(5), "absent"):
            try:
                bundle.get(key(number))
            except BundleError:
                pass
        bundle.close()
    refused(damaged(sound, chance), tmp_path / "cache")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.binary(max_size=100)), max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "gap": st.binary(max_size=70),
            "at": st.integers(0, 2**64 - 1),
            "entries": st.integers(0, 2**64 - 1),
            "offset": st.integers(0, 2**64 - 1),
            "size": st.integers(0, 2**64 - 1),
        },
    ),
)
def test_forgeries(found: list[tuple[bytes, bytes]], wrong: dict[str, object]) -> None:
    """Right checksums over anything: refused, or empty, never another exception."""
    data = forged(found, **wrong)
    try:
        assert kcache.verify_bundle(io.BytesIO(data)) == (0, 0, 0, len(data), False)
    except BundleError:
        return
    assert not found


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no bundle"),
        (b"PK\x03\x04" + bytes(200), "no bundle"),
        (b"KCBUNDLE", "truncated"),
        (forged([], head=b"KCBUNDLE" + (2).to_bytes(4, "little") + bytes(4)), "version 2"),
        (forged([], head=b"KCBUNDLE" + (1).to_bytes(4, "little") + b"\x07\0\0\0"), "unknown kind"),
        (forged(values(1, 2)[::-1]), "not in order"),
        (forged(values(1) * 2), "not in order"),
        (forged(values(1), offset=0), "place"),
        (forged(values(1), size=0), "place"),
        (forged(values(1), size=2**63), "place"),
        (forged(values(1), size=MAX_VALUE + 1), "place"),
        (forged(values(1), gap=b"between"), "between"),
        (forged(values(1), entries=0), "does not fit"),
        (forged(values(1), entries=MAX_ENTRIES + 1), "allowed"),
        (forged(values(1), entries=2**64 - 1), "allowed"),
        (forged(values(1), at=0), "does not fit"),
        (forged([(bytes(32), b"no envelope")]), "too short"),
        (forged([(bytes(32), values(1)[0][1])]), "another key"),
    ],
)
def test_right_checksums_over_nonsense(data: bytes, match: str, tmp_path: Path) -> None:
    refused(data, tmp_path, match)


def test_a_manifest_of_nonsense(tmp_path: Path) -> None:
    entry = Entry({"set0": b"nonsense"}, {"kind": "manifest"})
    refused(forged([(bytes.fromhex(key(1)), envelope(key(1), entry))]), tmp_path, "header set")


def test_the_last_entry_is_bad_and_nothing_was_written(tmp_path: Path) -> None:
    """All of it is checked before the first put; what was there stays."""
    fill(tmp_path, {key("mine"): kernel()})
    found = values(*range(20))
    found[-1] = (found[-1][0], found[-1][1][:-1] + b"?")
    with KernelCache(tmp_path) as cache, pytest.raises(BundleError, match="checksum mismatch"):
        kcache.import_bundle(cache, io.BytesIO(forged(found)))
    assert held(tmp_path) == [key("mine")]


def test_entries_of_another_version_are_left_out(tmp_path: Path) -> None:
    other = encode(key(2), kernel(), producer=b"kcache-nvrtc/999")
    found = sorted([*values(1), (bytes.fromhex(key(2)), other)])
    with KernelCache(tmp_path) as cache:
        done = kcache.import_bundle(cache, io.BytesIO(forged(found)))
    assert (done.added, done.other_version) == (1, 1)
    assert held(tmp_path) == [key(1)]


def test_a_writer_refuses_what_no_reader_takes() -> None:
    writer = BundleWriter(io.BytesIO())
    writer.add(key(1), b"x")
    for name, value in ((key(1), b"x"), ("f" * 64, b"")):
        with pytest.raises(BundleError):
            writer.add(name, value)


@pytest.mark.skipif(sys.platform == "win32", reason="needs rlimits and sparse files")
def test_absurd_sizes_take_no_memory(tmp_path: Path) -> None:
    """A file of a terabyte, nearly all of it a hole, that says it is index: refused at once."""
    path = tmp_path / "huge.kcb"
    entries = MAX_ENTRIES
    with path.open("wb") as file:
        file.write(b"KCBUNDLE" + (1).to_bytes(4, "little") + bytes(4))
        try:
            file.truncate((1 << 40) - TRAILER_SIZE)
        except OSError:
            pytest.skip("the file system has no files of that size")
        file.seek(0, os.SEEK_END)
        at = (1 << 40) - TRAILER_SIZE - entries * RECORD_SIZE
        file.write(at.to_bytes(8, "little") + entries.to_bytes(8, "little") + bytes(16))
        file.write(b"KCBNDEND")
    assert path.stat().st_size == 1 << 40
    assert at > HEAD_SIZE
    code = f"""
import resource, kcache, kcache.admin.bundles, kcache.nvrtc.manifest
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    kcache.verify_bundle({str(path)!r})
except kcache.BundleError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "checksum of its index" in said.stdout, said.stderr
    assert int(said.stdout.split()[-1]) < 8
    assert resource.getpagesize()


def test_what_is_piped_in_is_refused_before_it_is_copied() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 <= size < 100
            return b"zeros and more" * 2

    with pytest.raises(BundleError, match="no bundle"):
        kcache.verify_bundle(Endless())  # type: ignore[arg-type]
