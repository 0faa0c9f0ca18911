"""`kcache verify`: every kind of damage is found, and only a repair changes anything."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import as_nobody, can_become_nobody, damage, fill, held, kernel, manifest, recency
from core.helpers import NOBODY, key, look, nobodys_directory, path_of

import kcache
from kcache.entry import FORMAT_VERSION, encode
from kcache.nvrtc import PRODUCER
from kcache.testing import flipped

A, B, C, M = (key(name) for name in "abcm")


@pytest.fixture
def filled(cache_directory: Path, backend: str) -> Path:
    fill(cache_directory, {A: kernel(), B: kernel(), M: manifest(), C: kernel()}, backend)
    return cache_directory


def test_only_a_repair_changes_anything(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    out = here("verify").clean()
    assert re.fullmatch(r"4 entries read, \S+ KiB\n  4 sound\n", out)
    damage(filled, A, backend)
    damage(filled, M, backend)
    said = here("verify")
    assert (said.code, said.err) == (1, "")
    assert f"damaged {A[:12]}: " in said.out
    assert "  2 sound\n  2 damaged\n" in said.out
    assert "kcache verify --repair" in said.out
    found = json.loads(here("verify", "--json").out)
    assert (found["entries"], found["sound"], found["damaged"], found["deleted"]) == (4, 2, 2, 0)
    assert {(problem["key"], problem["kind"]) for problem in found["problems"]} == {
        (A, "damaged"),
        (M, "damaged"),
    }
    assert found["backend_problems"] == []
    after = recency(filled, backend)
    assert (after[B], after[C]) == (before[B], before[C])
    with kcache.KernelCache(filled) as cache:
        assert cache.total_stats().requests == 0
    out = here("verify", "--repair").clean()
    assert "  2 sound\n  2 damaged, 2 deleted\n" in out
    assert set(held(filled, backend)) == {B, C}
    assert here("verify").out.endswith("  2 sound\n")


def test_every_kind_of_damage_of_a_file(cache_directory: Path, here: Callable) -> None:
    names = [key(n) for n in range(3)]
    nonsense = kcache.Entry({"set0": b"no dependency set"}, {"kind": "manifest"})
    fill(cache_directory, {**{name: kernel(500) for name in names}, M: nonsense})
    paths = [path_of(cache_directory / "file", name) for name in names]
    paths[0].write_bytes(flipped(-1, 0x10)(paths[0].read_bytes()))
    shutil.copyfile(paths[2], paths[1])  # the entry of another key
    said = here("verify")
    assert said.code == 1
    assert f"damaged {M[:12]}: malformed dependency set" in said.out
    assert "  1 sound\n  3 damaged\n" in said.out
    assert here("verify", "--repair").code == 0
    assert held(cache_directory) == [names[2]]


def test_other_versions_and_programs_are_no_damage(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kcache.open_engine(cache_directory) as engine:
        engine.put(A, kcache.Entry({"x": b"1"}))
        with monkeypatch.context() as patch:
            patch.setattr("kcache.entry.FORMAT_VERSION", FORMAT_VERSION + 1)
            engine.backend.put(B, encode(B, kernel(), producer=PRODUCER.encode()))
    for options in ((), ("--repair",)):
        said = here("verify", *options)
        assert said.code == 0
        assert "  0 sound\n  2 of another version of kcache, or of another program\n" in said.out
        assert set(held(cache_directory)) == {A, B}


@pytest.mark.skipif(not can_become_nobody(), reason="only root can become another user")
def test_unreadable_and_undeletable_entries_are_reported(
    here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobodys_directory() as directory:
        monkeypatch.setenv("KCACHE_DIR", str(directory))
        os.chown(directory, os.geteuid(), -1)
        fill(directory, {A: kernel(), B: kernel(), C: kernel()})
        damage(directory, B)
        here("verify", "--repair", "--json")  # imports the modules that the child needs
        damage(directory, B)
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        path_of(directory / "file", A).chmod(0)
        folder = path_of(directory / "file", B).parent
        folder.chmod(0o500)
        for options in ((), ("--repair",)):
            code, out, err = as_nobody("verify", *options)
            assert code == 1
            assert f"unreadable {A[:12]}: " in out
            assert "  1 sound\n" in out
        assert err.startswith("kcache: warning: delete ")
        assert "  1 damaged, 0 deleted\n" in out
        assert set(look(directory / "file").entries) == {A, B, C}
        folder.chmod(0o700)
        code, out, _ = as_nobody("verify", "--repair")
        assert code == 1  # there is still an entry that can't be read
        assert "  1 damaged, 1 deleted\n" in out


def test_a_damaged_database_is_reported_and_repaired(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_BACKEND", "lmdb")
    fill(cache_directory, {key(n): kernel(100) for n in range(300)}, "lmdb")
    data = cache_directory / "lmdb" / "db" / "data.mdb"
    with data.open("r+b") as file:
        for page in range(8, 40, 4):
            file.seek(4096 * page)
            file.write(b"\xff" * 4096)
    damaged = data.read_bytes()
    said = here("verify")
    assert said.code == 1
    assert " in the backend\n" in said.out
    assert data.read_bytes() == damaged
    assert here("verify", "--repair").code == 0
    assert here("verify").code == 0
