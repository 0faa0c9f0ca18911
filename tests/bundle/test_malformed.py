"""Malformed bundles are refused, and do not change the cache."""

import io
import random
from contextlib import closing, suppress
from pathlib import Path

import pytest
from bundle.bundles import bundle_of, damaged, envelope, kernels, with_headers, written
from cli.helpers import fill, held, kernel
from core.helpers import key, output_of

import kcache
from kcache import BundleError, Entry, KernelCache
from kcache.entry import encode
from kcache.readonly.bundle_file import Bundle
from kcache.remote.signing import Sealer


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return {**kernels(5, 60), **with_headers(1, 2)}


@pytest.fixture(scope="module")
def sound(entries: dict[str, Entry], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return bundle_of(entries, tmp_path_factory.mktemp("sound"))


def refused(data: bytes, place: Path, match: str | None = None) -> None:
    """Assert that importing, verifying and listing `data` fail, and that the cache stays empty."""
    with KernelCache(place) as cache:
        with pytest.raises(BundleError, match=match):
            kcache.import_bundle(cache, io.BytesIO(data))
        assert cache.entry_count == 0
    for read in (kcache.verify_bundle, lambda source: list(kcache.list_bundle(source))):
        with pytest.raises(BundleError):
            read(io.BytesIO(data))


def values(*numbers: int) -> list[tuple[object, object]]:
    """Return a row for each number: its key and the envelope of a kernel."""
    return sorted((key(n), envelope(key(n), kernel(20))) for n in numbers)


def harmless(path: Path, whole: dict[str, bytes]) -> bool:
    """Return whether a damaged bundle can be verified, and then has the entries of the sound one.

    Assert that a key leads to the sound value, to none, or to a value whose checksum is wrong. The
    only error may be BundleError.
    """
    with suppress(BundleError), closing(Bundle(path, sealer=Sealer())) as bundle:
        for name in (*whole, key("absent")):
            with suppress(BundleError):
                value = bundle.get(name)
                assert value is None or value == whole.get(name) or not _is_sound(name, value)
    try:
        found = kcache.verify_bundle(path)
    except BundleError:
        return False
    assert found.kernels + found.manifests == len(whole)
    with closing(Bundle(path, sealer=Sealer())) as bundle:
        assert dict(bundle.items()) == whole
    return True


def _is_sound(name: str, value: bytes) -> bool:
    try:
        kcache.entry.decode(value, name)
    except kcache.CorruptEntryError:
        return False
    return True


@pytest.fixture(scope="module")
def whole(sound: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "kernels.kcb"
    path.write_bytes(sound)
    with closing(Bundle(path, sealer=Sealer())) as bundle:
        return dict(bundle.items())


def test_random_damage(sound: bytes, whole: dict[str, bytes], tmp_path: Path, long: bool) -> None:
    """A reader detects any damage that changes the content."""
    chance = random.Random(2)
    path = tmp_path / "kernels.kcb"
    for _ in range(20_000 if long else 300):
        path.write_bytes(damaged(sound, chance))
        harmless(path, whole)


def test_every_cut_is_refused(sound: bytes) -> None:
    for length in range(0, len(sound), 61):
        with pytest.raises(BundleError):
            kcache.verify_bundle(io.BytesIO(sound[:length]))
    with pytest.raises(BundleError, match="truncated"):
        kcache.verify_bundle(io.BytesIO(sound + b"\0"))


@pytest.mark.parametrize("data", [b"", b"SQLite format 3\0" + bytes(4080)])
def test_other_files(data: bytes, tmp_path: Path) -> None:
    refused(data, tmp_path, "not a bundle")


def test_another_version(sound: bytes, tmp_path: Path) -> None:
    refused(sound.replace(b"KCB1", b"KCB2", 1), tmp_path, "version 1, got 2")


RENAMED = "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', {!r})"


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("DROP TABLE entries", "without the table"),
        (
            "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END",
            "without the table",
        ),
        ("CREATE VIRTUAL TABLE text USING fts5(x)", "without the table"),
        (RENAMED.format("CHECK (load_extension('x'))"), "without the table"),
        (RENAMED.format("/*" + "x" * 5000 + "*/"), "damaged|malformed"),
        ("PRAGMA user_version = 7", "expected 7 entries, got 3"),
        ("DELETE FROM entries WHERE key LIKE '%'", "expected 3 entries, got 0"),
        (f"UPDATE entries SET key = '{key(9)}' WHERE key = '{key(1)}'", "another key"),
        ("UPDATE entries SET key = 'x' || key", "not in order at 'x"),
        ("UPDATE entries SET value = x''", "too short"),
        ("UPDATE entries SET value = value || x'00'", "no bytes|damaged|length"),
        ("UPDATE sqlite_master SET rootpage = 2147483647", "damaged"),
    ],
)
def test_a_malicious_database_is_refused(statement: str, match: str, tmp_path: Path) -> None:
    refused(written(values(1, 2, 3), tmp_path, statement), tmp_path / "cache", match)


def test_a_cyclic_page_does_not_hang(tmp_path: Path) -> None:
    """A bundle is refused, without a hang, if all cells of an inner page refer to the same page."""
    many = [(f"{number:064x}", bytes(900)) for number in range(400)]
    data = bytearray(written(many, tmp_path))
    for at in range(4096, len(data), 4096):
        if data[at] == 2:  # an inner page
            below = int.from_bytes(data[at + 8 : at + 12], "big")
            cells = int.from_bytes(data[at + 3 : at + 5], "big")
            for cell in range(cells):
                where = at + int.from_bytes(data[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
                data[where : where + 4] = below.to_bytes(4, "big")
    refused(bytes(data), tmp_path / "cache", "not in order|damaged|too short|entry")


def test_a_manifest_of_nonsense(tmp_path: Path) -> None:
    entry = Entry({"set0": b"nonsense"}, {"kind": "manifest"})
    refused(
        written([(key(1), envelope(key(1), entry))], tmp_path), tmp_path / "cache", "dependency set"
    )


def test_the_last_entry_is_bad_and_nothing_was_written(tmp_path: Path) -> None:
    """A bundle is checked completely before the first put, so a bad last entry changes nothing."""
    fill(tmp_path / "cache", {key("mine"): kernel()})
    found = values(*range(20))
    name, value = found[-1]
    data = written([*found[:-1], (name, value[:-1] + b"?")], tmp_path)
    with (
        KernelCache(tmp_path / "cache") as cache,
        pytest.raises(BundleError, match="checksum mismatch"),
    ):
        kcache.import_bundle(cache, io.BytesIO(data))
    assert held(tmp_path / "cache") == [key("mine")]


def test_entries_of_another_version_are_left_out(tmp_path: Path) -> None:
    other = encode(key(2), kernel(), producer=b"kcache-nvrtc/999")
    data = written(sorted([*values(1), (key(2), other)]), tmp_path)
    with KernelCache(tmp_path / "cache") as cache:
        done = kcache.import_bundle(cache, io.BytesIO(data))
    assert (done.added, done.other_version) == (1, 1)
    assert held(tmp_path / "cache") == [key(1)]


def test_absurd_sizes_take_no_memory(tmp_path: Path) -> None:
    """A value that exceeds the limit is refused before its memory is allocated."""
    statement = "UPDATE entries SET value = zeroblob(20000000)"
    path = tmp_path / "huge.kcb"
    path.write_bytes(written([(key(1), b"x")], tmp_path, statement))
    code = """
import resource, sys, kcache, kcache.admin.bundles, kcache.readonly.bundle_file, sqlite3
kcache.readonly.bundle_file.MAX_VALUE = 19_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    kcache.verify_bundle(sys.argv[1])
except kcache.BundleError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    said = output_of(code, path).splitlines()
    assert "too big" in said[0]
    assert int(said[1]) < 8


def test_invalid_standard_input_is_refused_before_it_is_copied() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 <= size <= 100
            return b"zeros and more" * 2

    with pytest.raises(BundleError, match="not a bundle"):
        kcache.verify_bundle(Endless())  # type: ignore[arg-type]
