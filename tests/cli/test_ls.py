"""`kcache ls`: what is listed, in which order, and what must not stop it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import (
    CREATED,
    NOBODY,
    age,
    as_nobody,
    can_become_nobody,
    damage,
    fill,
    held,
    kernel,
    key,
    manifest,
    nobodys_directory,
    recency,
    rows,
)
from core.helpers import path_of

import kcache
from kcache.cli.terminal import cells, cut
from kcache.cli.terminal import columns as table
from kcache.entry import encode
from kcache.nvrtc import PRODUCER

A, B, C, M = (key(name) for name in "abcm")


@pytest.fixture
def filled(cache_directory: Path, backend: str) -> Path:
    """Three kernels and a manifest, in the order in which they were used."""
    now = time.time()
    fill(
        cache_directory,
        {
            A: kernel(20_000, created=now - 3 * 86400, seconds=2.0, names=["k<int>", "k<float>"]),
            B: kernel(40_000, created=now - 7200, seconds=0.05, source="b.cu", arch="sm_80"),
            M: manifest(),
            C: kernel(100, created=now - 60, seconds=0.5, source="c.cu", log="warning"),
        },
        backend,
    )
    return cache_directory


def listed(text: str) -> list[str]:
    """Return the first digits of the keys of a table."""
    head, *lines = text.splitlines()
    assert head.split() == ["KEY", "SIZE", "AGE", "USED", "COMPILE", "ARCH", "KERNEL"]
    return [line.split()[0] for line in lines]


def test_one_line_per_kernel(filled: Path, here: Callable) -> None:
    said = here("ls")
    assert (said.code, said.err) == (0, "")
    assert listed(said.out) == [C[:8], B[:8], A[:8]]
    line = said.out.splitlines()[3]
    assert re.fullmatch(
        rf"{A[:8]}  \d+\.\d KiB +3 d +\d+ s +2\.0 s +sm_90  axpy\.cu: k<int>, k<float>", line
    )
    assert all(line == line.rstrip() for line in said.out.splitlines())


def test_manifests_are_listed_only_on_demand(filled: Path, here: Callable) -> None:
    said = here("ls", "--all")
    assert listed(said.out) == [C[:8], M[:8], B[:8], A[:8]]
    assert f"{M[:8]}" in said.out
    assert "(manifest)" in said.out


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("last-use", [C, B, A]),
        ("size", [B, A, C]),
        ("age", [C, B, A]),
        ("compile-time", [A, C, B]),
    ],
)
def test_the_orders_and_their_reverse(
    order: str, expected: list[str], filled: Path, here: Callable
) -> None:
    out = here("ls", "--sort", order, "--json").out
    assert [row["key"] for row in rows(out)] == expected
    reverse = here("ls", "--sort", order, "--reverse", "--json").out
    assert [row["key"] for row in rows(reverse)] == expected[::-1]


def test_json_has_full_keys_bytes_and_seconds(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    found = {row["key"]: row for row in rows(here("ls", "--all", "--json").out)}
    assert set(found) == {A, B, C, M}
    row = found[A]
    assert row["kind"] == "kernel"
    assert row["problem"] is None
    assert row["names"] == ["k<int>", "k<float>"]
    assert (row["source_name"], row["arch"], row["compile_seconds"]) == ("axpy.cu", "sm_90", 2.0)
    assert isinstance(row["size_bytes"], int)
    assert row["size_bytes"] > 20_000
    assert row["last_use"] == pytest.approx(before[A] / 1e9)
    assert row["created"] == pytest.approx(time.time() - 3 * 86400, abs=300)
    assert found[M]["kind"] == "manifest"
    assert found[M]["created"] is None


def test_listing_is_no_use(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    here("ls")
    assert recency(filled, backend) == before
    with kcache.KernelCache(filled) as cache:
        assert cache.total_stats().requests == 0


def test_a_damaged_entry_is_listed_as_such(filled: Path, here: Callable, backend: str) -> None:
    damage(filled, A, backend)
    said = here("ls", "--sort", "compile-time")
    assert (said.code, said.err) == (0, "")
    assert listed(said.out) == [C[:8], B[:8], A[:8]]
    assert "(damaged: " in said.out.splitlines()[3]
    assert here("ls", "--sort", "compile-time", "--reverse").out.splitlines()[3][:8] == A[:8]
    (row,) = [row for row in rows(here("ls", "--json").out) if row["key"] == A]
    assert row["kind"] == "damaged"
    assert row["problem"]


def test_a_flipped_byte_a_cut_and_an_exchange_are_damage(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(n): kernel(300) for n in range(4)})
    place = cache_directory / "file"
    path = path_of(place, key(0))
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob)
    os.truncate(path_of(place, key(1)), 100)
    path_of(place, key(2)).write_bytes(path_of(place, key(3)).read_bytes())
    kinds = {row["key"]: row["kind"] for row in rows(here("ls", "--json").out)}
    assert kinds == {key(0): "damaged", key(1): "damaged", key(2): "damaged", key(3): "kernel"}


def test_entries_of_others_are_listed_as_such(cache_directory: Path, here: Callable) -> None:
    with kcache.open_engine(cache_directory) as engine:
        engine.put(A, kcache.Entry({"x": b"1"}))
        engine.backend.put(B, encode(B, kcache.Entry({}, {"kind": 5}), producer=PRODUCER.encode()))
    said = here("ls")
    assert said.code == 0
    assert "(made by '')" in said.out
    assert "(other)" in said.out


def test_what_cannot_be_read_is_listed_and_stops_nothing(
    here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobodys_directory() as directory:
        monkeypatch.setenv("KCACHE_DIR", str(directory))
        os.chown(directory, os.geteuid(), -1)
        fill(directory, {A: kernel(), B: kernel()})
        assert here("ls").code == 0
        if can_become_nobody():
            for path in (directory, *directory.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        path_of(directory / "file", A).chmod(0)
        code, out, err = as_nobody("ls")
        assert (code, err) == (0, "")
        assert set(listed(out)) == {A[:8], B[:8]}
        assert "(unreadable: " in out
        assert "Permission denied" in out


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"names": 5, "created": "yesterday", "compile_seconds": [], "arch": None},
        {"names": [1, None], "created": 1e300, "compile_seconds": -1, "source_name": {}},
        {"created": -5, "source_name": "\x1b[31m\nred\r", "names": ["\u202e"], "arch": "\t"},
    ],
)
def test_metadata_may_say_anything(
    metadata: dict[str, object], cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {A: kcache.Entry({}, {"kind": "kernel", **metadata})})  # type: ignore[dict-item]
    for order in ("last-use", "size", "age", "compile-time"):
        said = here("ls", "--sort", order)
        assert said.code == 0
        assert len(said.out.splitlines()) == 2
        assert all(char.isprintable() or char == "\n" for char in said.out)
    assert here("ls", "--json").code == 0
    assert here("show", A).code == 0
    assert here("show", A, "--json").code == 0


def test_keys_are_cut_to_what_tells_them_apart(cache_directory: Path, here: Callable) -> None:
    alike = [key(1, "abcdef012"), key(2, "abcdef012")]
    fill(cache_directory, {name: kernel() for name in (*alike, C)})
    shown = listed(here("ls").out)
    assert len({len(name) for name in shown}) == 1
    assert len(shown[0]) > 9
    for name in shown:
        assert here("show", name).code == 0


def test_keys_that_differ_at_their_end_are_shown_whole(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {"a" * 63 + last: kernel() for last in "12"})
    assert set(listed(here("ls").out)) == {"a" * 63 + "1", "a" * 63 + "2"}


def test_without_a_cache(cache_directory: Path, here: Callable) -> None:
    assert here("ls") == (0, "", "kcache: nothing has been cached yet\n")
    assert json.loads(here("ls", "--json").out) == []
    assert not cache_directory.exists()
    fill(cache_directory, {})
    assert here("ls") == (0, "", "kcache: there are no kernels\n")


def test_a_read_only_cache_is_listed(
    filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    assert len(listed(here("ls").out)) == 3


def test_a_reader_that_goes_away_ends_it_quietly(cache_directory: Path) -> None:
    fill(cache_directory, {key(n): kernel(10, source="x" * 1000) for n in range(200)})
    done = subprocess.run(
        ["sh", "-c", '"$0" -P -m kcache ls; echo $? >&2', sys.executable],
        stdout=(reading := subprocess.Popen(["true"], stdin=subprocess.PIPE)).stdin,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert reading.stdin is not None
    reading.stdin.close()
    reading.wait(60)
    assert done.stderr == b"141\n"


def test_entries_that_go_meanwhile_are_left_out(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcache.nvrtc import PRODUCER
    from kcache.nvrtc.inventory import items

    names = sorted(key(n, "00") for n in range(5))
    fill(cache_directory, {name: kernel(10) for name in names})
    with (
        kcache.KernelCache(cache_directory) as cache,
        kcache.KernelCache(cache_directory) as other,
    ):
        seen = []
        for item in items(cache.engine.backend, PRODUCER):
            seen.append(item.key)
            for name in names:
                if name != item.key:
                    other.engine.delete(name)
        assert len(seen) == 1


def test_the_age_is_the_time_since_the_compile(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {A: kernel(created=time.time() + 1e6), B: kernel(created=CREATED)})
    age(cache_directory, A, 5 * 3600)
    lines = {line.split()[0]: line for line in here("ls").out.splitlines()}
    assert re.search(r"B  0 s +5 h ", lines[A[:8]])  # the clock was set back: not negative
    assert re.search(r"B  \d+ d +\d+ s ", lines[B[:8]])


@pytest.mark.slow
def test_ten_thousand_entries_are_listed_without_holding_their_payloads(
    cache_directory: Path,
) -> None:
    with kcache.KernelCache(cache_directory, memory_size=0) as cache:
        for n in range(10_000):
            cache.engine.put(key(n), kernel(20_000))
    code = (
        "import resource, sys; from kcache.cli.app import app; app.run(['info']); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; app.run(['ls', '--all']); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, timeout=250, check=True
    )
    *lines, grown = done.stdout.splitlines()
    assert len([line for line in lines if b"axpy.cu" in line]) == 10_000
    assert int(grown) < 60_000  # KiB; the payloads are 200 MB
    assert len(held(cache_directory)) == 10_000


# -- filters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--name", "k<int>"), [A]),
        (("--name", "?.cu"), [B, C]),
        (("--name", "b.cu", "--name", "k<"), [A, B]),
        (("--arch", "sm_80"), [B]),
        (("--arch", "sm_80", "--name", "c.cu"), []),
        (("--older-than", "1000d"), []),
        (("--used-within", "9000d"), [A, B, C]),
    ],
)
def test_filters(options: tuple[str, ...], wanted: list[str], filled: Path, here: Callable) -> None:
    found = {row["key"] for row in rows(here("ls", "--json", *options).out)}
    assert found == set(wanted)
    assert {row["key"] for row in rows(here("ls", "--json", "--all", *options).out)} == set(wanted)


def test_filters_by_age(filled: Path, here: Callable, backend: str) -> None:
    age(filled, A, 5 * 86400) if backend == "file" else pytest.skip("ages are those of files")
    assert [row["key"] for row in rows(here("ls", "--json", "--older-than", "2d").out)] == [A]
    assert A not in here("ls", "--json", "--used-within", "2d").out
    assert "no kernel fits" in here("ls", "--older-than", "9d").err
    assert here("ls", "--older-than", "soon").code == 2


def test_options_that_differ_are_shown(cache_directory: Path, here: Callable) -> None:
    one, two = kernel(flags=["-DN=1", "-w"]), kernel(flags=["-DN=2", "-w"])
    fill(cache_directory, {A: one, B: two, C: kernel(arch="sm_80", flags=["-DN=3"])})
    lines = here("ls").out.splitlines()[1:]
    assert sorted(line.partition("axpy.cu")[2] for line in lines) == ["", "  [-DN=1]", "  [-DN=2]"]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_a_narrow_terminal_keeps_the_name_readable(
    columns: int, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcache.cli import listing
    from kcache.nvrtc.inventory import Item

    monkeypatch.setattr(listing, "width", lambda: columns)
    monkeypatch.setattr(listing, "fit", lambda text: text)
    source = "/home/somebody/projects/thing/src/kernels/reduce_rows.cu"
    item = Item(A, 123_456, 1e9, "kernel", "", source, ("rows<float>",), "sm_90a", 1e9, 1.5)
    head, line = listing.listing([item], 8, 2e9).splitlines()
    assert head.split()[0] == "KEY"
    assert head.split()[-1] == "KERNEL"
    assert ("ARCH" in head) == (columns >= 60)
    shown = source if columns == 200 else "reduce_rows.cu"
    assert line.endswith(f"  {shown}: rows<float>" if columns > 20 else "  reduce_ro…")
    if columns >= 60:
        assert line.index("reduce_rows.cu") + 24 <= columns
    assert ("COMPILE" in head) == (columns == 200)


def test_names_that_differ_at_their_end_differ_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kcache.cli import listing
    from kcache.nvrtc.inventory import Item

    monkeypatch.setattr(listing, "width", lambda: 60)
    monkeypatch.setattr(listing, "fit", lambda text: text)
    names = [f"a_rather_long_name_of_a_kernel_of_mine<{n}>" for n in ("float, 1", "float, 2")]
    items = [
        Item(key, 2000, 1e9, "kernel", "", "long.cu", (name,), "sm_90", 1e9, 1.5)
        for key, name in zip((A, B, C), (*names, "another_rather_long_name_of_mine"), strict=True)
    ]
    _, first, second, third = listing.listing(items, 8, 2e9).splitlines()
    assert first.endswith("<float, 1>")
    assert second.endswith("<float, 2>")
    assert "long.cu: a_rather" in first
    assert "long.cu: another_rather_long_n" in third
    assert max(map(len, (first, second, third))) <= 60


# -- filters of all commands ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--name", "axpy"], [A]),
        (["--name", "k<int>"], [A]),
        (["--name", "?.cu"], [C, B]),
        (["--arch", "sm_90"], [C, A]),
        (["--arch", "80", "--arch", "sm_90"], [C, B, A]),
        (["--arch", "sm_90", "--name", "c.cu"], [C]),
        (["--older-than", "1h"], [B]),
        (["--used-within", "1h"], [C, A]),
        (["--used-within", "1h", "--older-than", "1h"], []),
    ],
)
def test_ls_and_rm_and_bundles_take_the_same_filters(
    filters: list[str], expected: list[str], cache_directory: Path, here: Callable, tmp_path: Path
) -> None:
    entries = {
        A: kernel(names=["k<int>", "k<float>"]),
        B: kernel(source="b.cu", arch="sm_80"),
        M: manifest(),
        C: kernel(source="c.cu"),
    }
    fill(cache_directory, entries)
    age(cache_directory, B, 7200)
    wanted = sorted(expected)
    assert sorted(row["key"] for row in rows(here("ls", *filters, "--json").out)) == wanted
    would = json.loads(here("rm", *filters, "--dry-run", "--json").out)
    assert (would["dry_run"], sorted(would["keys"])) == (True, wanted)
    bundle = tmp_path / "kernels.kcb"
    assert here("bundle", "export", *filters, "-o", bundle).code == 0
    assert (
        sorted(row["key"] for row in rows(here("bundle", "list", bundle, "--json").out)) == wanted
    )
    assert sorted(held(cache_directory)) == sorted(entries)
    said = here("rm", *filters, "--yes")
    assert said.code == 0
    assert said.out.startswith(f"deleted {len(wanted)} entr")
    assert sorted(held(cache_directory)) == sorted(entries.keys() - wanted)


def test_filters_that_nothing_fits(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {A: kernel()})
    assert here("ls", "--name", "nothing") == (0, "", "kcache: no kernel fits the filters\n")
    assert here("rm", "--name", "nothing", "--yes").out == "deleted 0 entries, 0 B\n"
    said = here("ls", "--older-than", "soon")
    assert said.code == 2
    assert 'such as "12h" or "30d"' in said.err


def test_rm_wants_keys_or_filters(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {A: kernel(), B: kernel()})
    for arguments in ([], [A, "--name", "axpy"], ["--dry-run"]):
        said = here("rm", *arguments)
        assert said.code == 2
        assert "Give either keys, or options" in said.err
    assert len(held(cache_directory)) == 2
    told = json.loads(here("rm", A[:8], "--json").out)
    assert (told["dry_run"], told["entries"], told["keys"]) == (False, 1, [A])
    assert told["size_bytes"] > 1000


# -- on terminals ----------------------------------------------------------------------------------


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has standard output be a terminal of so many columns."""

    def columns(count: int) -> None:
        for module in ("kcache.cli.terminal", "kcache.cli.listing"):
            monkeypatch.setattr(f"{module}.width", lambda: count)

    return columns


def test_options_that_differ_stand_behind_the_name(cache_directory: Path, here: Callable) -> None:
    entries = {key(n): kernel(names=["k"]) for n in range(5)}
    for number, entry in enumerate(entries.values()):
        flags = entry.metadata["flags"]
        assert isinstance(flags, list)
        flags += ["-std=c++17", *([f"-DN={number}"] if number else [])]
    names = entries[key(4)].metadata["names"]
    assert isinstance(names, list)
    names[:] = ["other"]
    metadata = {**entries[key(3)].metadata, "compiler": "nvrtc 34cd"}
    entries[key(3)] = kcache.Entry(entries[key(3)].payload, metadata)
    fill(cache_directory, entries)
    lines = {line[:8]: line.partition("axpy.cu: ")[2] for line in here("ls").out.splitlines()[1:]}
    assert [lines[key(number)[:8]] for number in range(5)] == [
        "k  [(nvrtc 12ab)]",
        "k  [-DN=1 (nvrtc 12ab)]",
        "k  [-DN=2 (nvrtc 12ab)]",
        "k  [-DN=3 (nvrtc 34cd)]",
        "other",
    ]
    found = {row["key"]: row for row in rows(here("ls", "--json").out)}
    assert found[key(1)]["flags"] == ["-std=c++17", "-DN=1"]
    assert found[key(1)]["compiler"] == "nvrtc 12ab"


@pytest.mark.parametrize("count", [200, 120, 80, 60, 40, 20, 10, 3, 1])
def test_no_line_is_longer_than_the_terminal_and_names_keep_room(
    count: int, cache_directory: Path, here: Callable, columns: Callable
) -> None:
    entries = {
        A: kernel(source="reduce.cu", names=["reduce_by_key<float>"]),
        B: kernel(source="日本語のとても長い名前のカーネル.cu", names=["カーネル"]),
        C: kernel(source="e\u0301\n\x1b[31m.cu", names=["x" * 300]),
    }
    for number in range(2):
        entries[key(number)] = kernel(source="options.cu")
        flags = entries[key(number)].metadata["flags"]
        assert isinstance(flags, list)
        flags.append(f"-I/a/very/long/path/that/all/of/them/have/{number}")
    fill(cache_directory, entries)
    columns(count)
    for lines in (here("ls").out.splitlines(), here("ls", "--all").out.splitlines()):
        assert len(lines) == 6
        assert all(cells(line) <= count for line in lines)
    if count >= 40:
        text = "\n".join(lines)
        assert "reduce.cu: reduce_by_key" in text
        assert "日本語のとても長い" in text
        ends = [line[-2:] for line in lines if "options.cu" in line]
        assert sorted(ends) == ["0]", "1]"]
    if count == 60:
        assert lines[0].split() == ["KEY", "SIZE", "ARCH", "KERNEL"]


def test_wide_characters_keep_columns_aligned() -> None:
    text = table([("日本", "x"), ("abcd", "x"), ("e\u0301", "x")])
    assert {cells(line) for line in text.splitlines()} == {7}
    assert [cut(text, 5) for text in ("abcdef", "日本語", "abc")] == ["abcd…", "日本…", "abc"]
    assert cut("abcdefgh", 5, keep_end=True) == "ab…gh"
    assert cut("日本語", 0) == ""
