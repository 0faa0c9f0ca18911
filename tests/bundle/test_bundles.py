"""Bundles: an import adds exactly the entries that were exported, with every backend."""

import io
import os
import sqlite3
import sys
from pathlib import Path

import pytest
from bundle.bundles import (
    REQUEST,
    bundle_of,
    dependency_set,
    export,
    kernels,
    with_headers,
    written,
)
from cli.helpers import BACKENDS, age, contents, damage, fill, held, kernel
from core.helpers import fork, key, umask, wait

import kcache
from kcache import BundleError, Entry, KernelCache
from kcache.nvrtc.manifest import Manifest
from kcache.remote.signing import make_keys, write_keys


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bundle_goes_from_one_cache_to_another(tmp_path: Path, backend: str) -> None:
    entries = {**kernels(20), **with_headers(1, 2)}
    fill(tmp_path / "one", entries, backend)
    path = tmp_path / "kernels.kcb"
    with KernelCache(tmp_path / "one", backend=backend) as cache:
        done = kcache.export_bundle(cache, path)
    assert (done.kernels, done.manifests, done.left_out) == (22, 1, ())
    assert done.size == path.stat().st_size
    with KernelCache(tmp_path / "two", backend="file") as cache:
        assert kcache.import_bundle(cache, path) == (23, 0, 0, 0, 0)
        assert kcache.import_bundle(cache, path) == (0, 23, 0, 0, 0)
    assert contents(tmp_path / "two") == contents(tmp_path / "one", backend)
    assert export(tmp_path / "two") == path.read_bytes()


def test_neither_backend_nor_order_nor_place_nor_time_is_in_a_bundle(tmp_path: Path) -> None:
    entries = {**kernels(10), **with_headers(1, 2, 3, stamped=True)}
    fill(tmp_path / "one", entries)
    fill(tmp_path / "two", dict(reversed(entries.items())), "lmdb")
    age(tmp_path / "one", key(3), 10_000)
    again = {**entries, **with_headers(3, 1, 2)}
    again |= {name: entry for name, entry in entries.items() if name != REQUEST}
    fill(tmp_path / "three", again, "zstd")
    bundles = {export(tmp_path / "one"), export(tmp_path / "two", backend="lmdb")}
    assert bundles == {export(tmp_path / "three", backend="zstd")}
    (data,) = bundles
    assert b"/home/somebody" not in data


def test_builds_of_two_days_are_equal_if_asked_for(tmp_path: Path) -> None:
    for name, seconds in (("one", 0.5), ("two", 0.75)):
        entry = kernel(created=1e9 + seconds, seconds=seconds, ptx=b"// PTX\n")
        fill(tmp_path / name, {key(1): entry})
    assert export(tmp_path / "one") != export(tmp_path / "two")
    one = export(tmp_path / "one", reproducible=True)
    assert one == export(tmp_path / "two", reproducible=True)
    (item,) = kcache.list_bundle(io.BytesIO(one))
    assert (item.created, item.compile_seconds) == (None, None)


# -- which entries are exported --------------------------------------------------------------------


def test_a_manifest_is_exported_with_its_kernels_alone(tmp_path: Path) -> None:
    fill(tmp_path, {**kernels(2), **with_headers(1, 2)})
    gone = dependency_set(1).result_key(REQUEST)
    with KernelCache(tmp_path) as cache:
        cache.engine.delete(gone)
    found = [item.key for item in kcache.list_bundle(io.BytesIO(export(tmp_path)))]
    assert gone not in found
    assert REQUEST in found
    with KernelCache(tmp_path / "two") as cache:
        kcache.import_bundle(cache, io.BytesIO(export(tmp_path, names=["inc"])))
    assert set(contents(tmp_path / "two")) == {REQUEST, dependency_set(2).result_key(REQUEST)}
    manifest = Manifest.from_entry(contents(tmp_path / "two")[REQUEST])
    assert [each.raw for each in manifest.dependency_sets] == [dependency_set(2).raw]
    assert not list(kcache.list_bundle(io.BytesIO(export(tmp_path, names=["nothing"]))))


def test_damaged_and_foreign_entries_are_not_exported(tmp_path: Path) -> None:
    fill(tmp_path, kernels(2))
    damage(tmp_path, key("bad"))
    with kcache.open_engine(tmp_path) as engine:
        engine.put(key("other"), Entry({"x": b"y"}))
    file = io.BytesIO()
    with KernelCache(tmp_path) as cache:
        done = kcache.export_bundle(cache, file)
    assert done.kernels == 2
    assert {item.key: item.kind for item in done.left_out} == {
        key("bad"): "damaged",
        key("other"): "other",
    }


# -- the file --------------------------------------------------------------------------------------


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    fill(tmp_path / "cache", kernels(1))
    letter, folder, pipe = (tmp_path / name for name in ("letter.txt", "folder", "pipe"))
    letter.write_text("Dear reader")
    folder.mkdir()
    os.mkfifo(pipe)
    with KernelCache(tmp_path / "cache") as cache:
        with umask(0o027):
            kcache.export_bundle(cache, tmp_path / "for the group")
        for path in (letter, folder, pipe):
            with pytest.raises(BundleError, match="refusing to overwrite"):
                kcache.export_bundle(cache, path)
        with pytest.raises(BundleError, match="not a bundle"):
            kcache.import_bundle(cache, pipe)
        empty = tmp_path / "empty"  # as mktemp creates it
        empty.touch()
        kcache.export_bundle(cache, empty)
        kcache.export_bundle(cache, empty)
    assert letter.read_text() == "Dear reader"
    assert (tmp_path / "for the group").stat().st_mode & 0o777 == 0o640
    assert kcache.verify_bundle(empty).kernels == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cache", "empty", "folder", "for the group", "letter.txt", "pipe",
    ]  # fmt: skip


def test_a_python_without_sqlite_raises_a_bundle_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.kcb").write_bytes(bundle_of(kernels(1), tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(BundleError, match="need the module sqlite3, which this Python lacks"):
        kcache.verify_bundle(tmp_path / "kernels.kcb")


@pytest.mark.parametrize("killed", [False, True])
def test_an_export_that_does_not_end_leaves_the_old_bundle(tmp_path: Path, killed: bool) -> None:
    fill(tmp_path / "cache", kernels(3))
    path = tmp_path / "kernels.kcb"
    path.write_bytes(export(tmp_path / "cache"))
    old = path.read_bytes()

    def get(name: str) -> bytes:
        if killed:
            os.kill(os.getpid(), 9)
        raise RuntimeError(name)

    def child() -> None:
        with KernelCache(tmp_path / "cache") as cache:
            cache.engine.backend.get = get  # type: ignore[method-assign]
            with pytest.raises(RuntimeError):
                kcache.export_bundle(cache, path)

    assert (wait(fork(child)) != 0) is killed
    assert path.read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 2 + killed
    with KernelCache(tmp_path / "cache") as cache:
        assert kcache.export_bundle(cache, path).kernels == 3


# -- import ----------------------------------------------------------------------------------------


def test_an_import_keeps_the_entries_of_the_cache(tmp_path: Path) -> None:
    """If the cache has another entry under the same key, an import keeps the cache's entry."""
    theirs = bundle_of({key(1): kernel(source="theirs.cu")}, tmp_path / "theirs")
    fill(tmp_path / "ours", {key(1): kernel(source="ours.cu")})
    with KernelCache(tmp_path / "ours") as cache:
        assert kcache.import_bundle(cache, io.BytesIO(theirs)).present == 1
    assert contents(tmp_path / "ours")[key(1)].metadata["source_name"] == "ours.cu"


def test_a_damaged_entry_is_replaced(tmp_path: Path) -> None:
    theirs = bundle_of(kernels(1), tmp_path / "theirs")
    fill(tmp_path / "ours", {})
    damage(tmp_path / "ours", key(0))
    with KernelCache(tmp_path / "ours") as cache:
        assert kcache.import_bundle(cache, io.BytesIO(theirs)).added == 1
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_dependency_sets_of_both_stay(tmp_path: Path) -> None:
    theirs = bundle_of(with_headers(1, 2), tmp_path / "theirs")
    fill(tmp_path / "ours", with_headers(3, 1, stamped=True))
    with KernelCache(tmp_path / "ours") as cache:
        assert kcache.import_bundle(cache, io.BytesIO(theirs)) == (1, 1, 1, 0, 0)
        assert kcache.import_bundle(cache, io.BytesIO(theirs)) == (0, 3, 0, 0, 0)
    manifest = Manifest.from_entry(contents(tmp_path / "ours")[REQUEST])
    sets = [dependency_set(number).raw for number in (3, 1, 2)]
    assert [each.raw for each in manifest.dependency_sets] == sets
    assert manifest.dependency_sets[0].stamps  # the stamps of this cache are kept, too


def test_a_bundle_beyond_the_cap_evicts_older_entries_and_nothing_of_itself(tmp_path: Path) -> None:
    theirs = bundle_of(kernels(40, 1000), tmp_path / "theirs")
    fill(tmp_path / "ours", {key(f"old{n}"): kernel(1000) for n in range(10)}, max_size="30KB")
    with KernelCache(tmp_path / "ours", max_size="30KB") as cache:
        done = kcache.import_bundle(cache, io.BytesIO(theirs))
        assert cache.size_bytes <= 30_000
    assert done.added + done.no_room == 40
    assert 10 < done.added < 25
    kept = set(held(tmp_path / "ours")) & set(kernels(40))
    assert len(kept) == done.added


def test_a_read_only_cache_is_left_alone(tmp_path: Path) -> None:
    data = bundle_of({}, tmp_path)
    with KernelCache(tmp_path, read_only=True) as cache, pytest.raises(kcache.ConfigError):
        kcache.import_bundle(cache, io.BytesIO(data))


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no fork")
def test_an_import_that_is_killed_can_be_run_again(tmp_path: Path) -> None:
    """An import that is killed leaves only sound entries, and no manifest without its kernels."""
    theirs = bundle_of({**kernels(6), **with_headers(1)}, tmp_path / "theirs")
    for puts in range(0, 8, 2):
        place = tmp_path / f"ours{puts}"

        def child(place: Path = place, left: int = puts) -> None:
            with KernelCache(place) as cache:
                put = cache.engine.backend.put

                def counting(name: str, value: bytes) -> int:
                    nonlocal left
                    if not left:
                        os.kill(os.getpid(), 9)
                    left -= 1
                    return put(name, value)

                cache.engine.backend.put = counting  # type: ignore[method-assign]
                kcache.import_bundle(cache, io.BytesIO(theirs))

        assert wait(fork(child)) != 0
        there = contents(place)
        assert len(there) == puts
        assert REQUEST not in there
        with KernelCache(place) as cache:
            assert kcache.import_bundle(cache, io.BytesIO(theirs)).added == 8 - puts
        assert contents(place) == contents(tmp_path / "theirs")


# -- signatures ------------------------------------------------------------------------------------


def test_only_signed_bundles_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="the extra signing is not installed")
    for name in ("ours", "theirs"):
        private, public = make_keys()
        write_keys(str(tmp_path / name), private)
        write_keys(str(tmp_path / f"{name}.pub"), public, mode=0o644)
    fill(tmp_path / "cache", kernels(3))
    unsigned = export(tmp_path / "cache")
    monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / "ours"))
    signed = export(tmp_path / "cache")
    assert signed == export(tmp_path / "cache")
    assert kcache.verify_bundle(io.BytesIO(signed)).signed
    monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / "theirs"))
    foreign = export(tmp_path / "cache")
    monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / "ours.pub"))
    with KernelCache(tmp_path / "reader") as cache:
        for data in (unsigned, foreign, exchanged(signed, tmp_path)):
            with pytest.raises(BundleError, match="sign|key"):
                kcache.import_bundle(cache, io.BytesIO(data))
        assert cache.entry_count == 0
        assert kcache.import_bundle(cache, io.BytesIO(signed)).added == 3
        with pytest.raises(kcache.ConfigError, match="no private key"):
            kcache.export_bundle(cache, io.BytesIO())
    monkeypatch.delenv("KCACHE_SIGNING_KEY_FILE")
    summary = kcache.verify_bundle(io.BytesIO(signed))
    assert (summary.kernels, summary.signed) == (3, None)  # no key verified the signatures
    assert kcache.verify_bundle(io.BytesIO(unsigned)).signed is False
    assert contents(tmp_path / "reader") == contents(tmp_path / "cache")


def exchanged(signed: bytes, folder: Path) -> bytes:
    """Return a bundle in which two signed values are exchanged, so each has the other's key."""
    path = folder / "signed.kcb"
    path.write_bytes(signed)
    connection = sqlite3.connect(path)
    (one, first), (two, second), *rest = connection.execute("SELECT key, value FROM entries")
    connection.close()
    return written([(one, second), (two, first), *rest], folder)
