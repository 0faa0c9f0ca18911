"""`kcache migrate` moves every entry, keeps the order and the cap, and may be interrupted."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import BACKENDS, contents, damage, fill, held, kernel, manifest, recency
from core.helpers import key, started

import kcache
from kcache import Entry
from kcache.admin.transfer import TOO_LARGE, move_entries

#: Pairs of backends in which each backend is the source once and the destination once.
PAIRS = list(zip(BACKENDS, (*BACKENDS[1:], BACKENDS[0]), strict=True))


def mixed(count: int = 12) -> dict[str, Entry]:
    entries = {key(n): kernel(100 * n, names=[f"k<{n}>"]) for n in range(count)}
    return {**entries, key("m"): manifest()}


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_every_entry_arrives_in_the_order_of_use(
    origin: str, target: str, cache_directory: Path, here: Callable
) -> None:
    entries = mixed()
    fill(cache_directory, entries, origin)
    with kcache.KernelCache(cache_directory, backend=origin) as cache:
        cache.engine.get(key(0))
    order = held(cache_directory, origin)
    assert order[-1] == key(0)
    out = here("migrate", "--from", origin, "--to", target).clean()
    assert re.match(rf"moved 13 entries, .*, from {re.escape(origin)} to ", out)
    assert f"\nSaved with the cache: backend={target}. " in out
    assert contents(cache_directory, target) == entries
    assert held(cache_directory, target) == order
    assert contents(cache_directory, origin) == {}
    assert not (cache_directory / origin).exists()


def test_a_copy_leaves_the_origin(cache_directory: Path, here: Callable) -> None:
    entries = mixed()
    fill(cache_directory, entries)
    before = recency(cache_directory)
    said = here("migrate", "--to", "lmdb", "--keep")
    assert said.code == 0
    assert said.out.startswith("copied 13 entries, ")
    assert contents(cache_directory, "lmdb") == entries
    assert recency(cache_directory) == before


def test_damaged_entries_are_left_out_and_counted(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, mixed())
    damage(cache_directory, key(2))
    damage(cache_directory, key(3))
    with kcache.open_engine(cache_directory) as engine:  # an entry of another program
        engine.put(key("x"), Entry({"x": b"1"}))
    said = here("migrate", "--to", "lmdb")
    assert said.code == 0
    assert "kcache: left out 2 entries: damaged\n" in said.err
    assert "kcache: left out 1 entry: of another version of kcache, and still in the " in said.err
    assert len(contents(cache_directory, "lmdb")) == 11
    assert held(cache_directory) == [key("x")]


def test_a_second_time_there_is_nothing_to_do(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, mixed())
    assert here("migrate", "--to", "zstd").code == 0
    for more in ((), ("--dry-run",), ("--keep",)):
        said = here("migrate", "--to", "zstd", *more)
        assert (said.code, said.out, said.err) == (
            0,
            "the entries are already in zstd: nothing to migrate\n",
            "",
        )
        told = json.loads(here("migrate", "--to", "zstd", "--json", *more).out)
        assert (told["from"], told["to"], told["entries"]) == ("zstd", "zstd", 0)
    assert len(contents(cache_directory, "zstd")) == 13


def test_sound_entries_of_the_target_stay(cache_directory: Path, here: Callable) -> None:
    entries = mixed()
    fill(cache_directory, entries)
    newer = kernel(77, source="newer.cu")
    fill(cache_directory, {key(3): newer}, "lmdb")
    damage(cache_directory, key(4), "lmdb")
    assert here("migrate", "--to", "lmdb").code == 0
    assert contents(cache_directory, "lmdb") == {**entries, key(3): newer}


# -- the cap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_migrate_keeps_the_cap(origin: str, target: str, tmp_path: Path) -> None:
    cap = 240_000
    # The entries are compressible, so they grow when they leave zstd. They are small, so they take
    # noticeably more space in whole pages of LMDB.
    entries = {key(n): kernel(cubin=bytes(1000) + os.urandom(200 + n)) for n in range(200)}
    fill(tmp_path, entries, origin, "240KB")
    order = held(tmp_path, origin)
    assert len(order) > 50
    largest = 4096  # a page of LMDB; no entry takes as much in a file
    with (
        kcache.KernelCache(tmp_path, backend=origin, max_size=cap, memory_size=0) as source,
        kcache.KernelCache(tmp_path, backend=target, max_size=cap, memory_size=0) as destination,
    ):
        put = destination.engine.backend.put
        used: list[int] = []

        def watched(name: str, value: bytes) -> int:
            size = put(name, value)
            used.append(source.size_bytes + destination.engine.backend.usage().bytes)
            return size

        destination.engine.backend.put = watched  # type: ignore[method-assign]
        moved = move_entries(source.engine, destination.engine)
        assert used
        assert max(used) <= cap + largest
        assert moved.left_out == ()
        assert source.entry_count == 0
        assert destination.size_bytes <= cap
    arrived = held(tmp_path, target)
    # The entries that did not fit were the coldest ones.
    assert arrived == order[len(order) - len(arrived) :]
    with kcache.KernelCache(tmp_path, backend=target, read_only=True) as cache:
        full = len(arrived) == len(order) or cache.size_bytes > 0.8 * cap
    assert full


def test_an_entry_larger_than_the_cap_stays(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache_directory, {key(1): kernel(cubin=bytes(50_000)), key(2): kernel(100)}, "zstd")
    monkeypatch.setenv("KCACHE_MAX_SIZE", "20000")
    with kcache.KernelCache(cache_directory, backend="zstd", max_size="1MB") as source:
        with kcache.KernelCache(cache_directory, backend="lmdb") as destination:
            moved = move_entries(source.engine, destination.engine)
        assert ([item.kind for item in moved.left_out], moved.entries) == ([TOO_LARGE], 1)
        assert source.entry_count == 1


def test_an_unwritable_target_loses_nothing(cache_directory: Path, here: Callable) -> None:
    entries = mixed()
    fill(cache_directory, entries)
    (cache_directory / "zstd").write_text("in the way")
    said = here("migrate", "--to", "zstd")
    assert (said.code, said.out) == (1, "")
    assert said.err.splitlines()[-1].startswith("kcache: error: ")
    assert "Traceback" not in said.err
    assert contents(cache_directory, "file") == entries


# -- interruptions ---------------------------------------------------------------------------------

#: Moves the entries. After each one it prints a line and waits for a byte.
STEPS = """
import contextlib, sys
from kcache.cli.app import app
from kcache.cli.commands import cmd_config as migrate
def moved():
    sys.stderr.write("moved\\n"); sys.stderr.flush()
    sys.stdin.read(1)
migrate.progress = lambda *_: contextlib.nullcontext(moved)
sys.exit(app.run(["migrate", "--to", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("end", "target"), [(signal.SIGINT, "zstd"), (signal.SIGKILL, "zstd"), (signal.SIGKILL, "lmdb")]
)
def test_an_interrupted_migration_is_resumed(
    end: signal.Signals, target: str, cache_directory: Path, here: Callable
) -> None:
    entries = mixed(30)
    fill(cache_directory, entries)
    order = held(cache_directory)
    process = started(STEPS, target, stderr=subprocess.PIPE)
    for _ in range(10):
        assert process.stderr.readline() == "moved\n"
        process.stdin.write("x")
        process.stdin.flush()
    assert process.stderr.readline() == "moved\n"
    process.send_signal(end)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if end == signal.SIGINT:
        assert process.returncode == 130
    assert out == ""
    here_now, there_now = contents(cache_directory, "file"), contents(cache_directory, target)
    assert {**here_now, **there_now} == entries
    assert len(there_now) >= 11
    here("migrate", "--to", target).clean()
    assert contents(cache_directory, target) == entries
    assert held(cache_directory, target) == order
    assert not (cache_directory / "file").exists()
