"""`kcache ls`, `show` and `extract`, and the filters that all commands have."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import age, damage, fill, held, kernel, manifest, recency, rows
from cli.test_terminal import AllTerminal
from core.helpers import key

import kcache
from kcache import Entry
from kcache.cli.commands.cmd_ls import _KINDS
from kcache.nvrtc.answers import Answers

A, B, C, M = (key(name) for name in "abcm")


@pytest.fixture
def filled(cache_directory: Path, backend: str) -> Path:
    """A cache with three kernels and a manifest, in the order of their last uses."""
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
    """Return the column of a table that has the first digits of the keys."""
    head, *lines = text.splitlines()
    assert head.split() == ["KEY", "SIZE", "AGE", "USED", "COMPILE", "ARCH", "KERNEL"]
    return [line.split()[0] for line in lines]


def test_one_line_per_kernel_and_manifests_on_demand(
    filled: Path, here: Callable, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recency(filled, backend)
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    out = here("ls").clean()
    assert listed(out) == [C[:8], B[:8], A[:8]]
    assert re.fullmatch(
        rf"{A[:8]}  \d+\.\d KiB +3 d +\d+ s +2\.0 s +sm_90  axpy\.cu: k<int>, k<float>",
        out.splitlines()[3],
    )
    everything = here("ls", "--all").out
    assert listed(everything) == [C[:8], M[:8], B[:8], A[:8]]
    assert "(manifest)" in everything
    assert recency(filled, backend) == before  # listing does not record a use
    with kcache.KernelCache(filled) as cache:
        assert cache.total_stats().requests == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [("last-use", [C, B, A]), ("size", [B, A, C]), ("age", [C, B, A]), ("compile-time", [A, C, B])],
)
@pytest.mark.usefixtures("filled")
def test_the_orders_and_their_reverse(order: str, expected: list[str], here: Callable) -> None:
    for more, wanted in ((), expected), (("--reverse",), expected[::-1]):
        out = here("ls", "--sort", order, "--json", *more).out
        assert [row["key"] for row in rows(out)] == wanted


def test_json_has_full_keys_bytes_and_seconds(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    found = {row["key"]: row for row in rows(here("ls", "--all", "--json").out)}
    assert set(found) == {A, B, C, M}
    row = found[A]
    assert (row["kind"], row["problem"], row["arch"]) == ("kernel", None, "sm_90")
    assert (row["names"], row["compile_seconds"]) == (["k<int>", "k<float>"], 2.0)
    assert row["size_bytes"] > 20_000  # type: ignore[operator]
    assert row["last_use"] == pytest.approx(before[A] / 1e9)
    assert row["created"] == pytest.approx(time.time() - 3 * 86400, abs=300)
    assert (found[M]["kind"], found[M]["created"]) == ("manifest", None)


def test_a_damaged_entry_is_listed_as_such(filled: Path, here: Callable, backend: str) -> None:
    damage(filled, A, backend)
    out = here("ls", "--sort", "compile-time").clean()
    assert listed(out) == [C[:8], B[:8], A[:8]]
    assert "(damaged: " in out.splitlines()[3]
    assert here("ls", "--sort", "compile-time", "--reverse").out.splitlines()[3][:8] == A[:8]
    (row,) = [row for row in rows(here("ls", "--json").out) if row["key"] == A]
    assert row["kind"] == "damaged"
    assert row["problem"]


# -- the filters of all commands -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--name", "k<int>"], [A]),
        (["--name", "?.cu"], [B, C]),
        (["--name", "b.cu", "--name", "k<"], [A, B]),
        (["--arch", "80", "--arch", "sm_90"], [A, B, C]),
        (["--arch", "sm_80", "--name", "c.cu"], []),
        (["--older-than", "1h"], [B]),
        (["--used-within", "1h"], [A, C]),
    ],
)
def test_filters_mean_the_same_everywhere(
    filters: list[str], expected: list[str], cache_directory: Path, here: Callable, tmp_path: Path
) -> None:
    entries = {
        A: kernel(names=["k<int>"]),
        B: kernel(source="b.cu", arch="sm_80"),
        M: manifest(),
        C: kernel(source="c.cu"),
    }
    fill(cache_directory, entries)
    age(cache_directory, B, 7200)
    wanted = sorted(expected)
    for more in ([], ["--all"]):
        assert (
            sorted(row["key"] for row in rows(here("ls", *filters, *more, "--json").out)) == wanted
        )
    would = json.loads(here("rm", *filters, "--dry-run", "--json").out)
    assert (would["dry_run"], sorted(would["keys"])) == (True, wanted)
    bundle = tmp_path / "kernels.kcb"
    assert here("bundle", "export", *filters, "-o", bundle).code == 0
    listed = rows(here("bundle", "list", bundle, "--json").out)
    assert sorted(row["key"] for row in listed) == wanted
    assert sorted(held(cache_directory)) == sorted(entries)
    said = here("rm", *filters, "--yes")
    assert said.code == 0
    assert said.out.startswith(f"deleted {len(wanted)} entr")
    assert sorted(held(cache_directory)) == sorted(entries.keys() - wanted)


def test_filters_that_nothing_fits(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {A: kernel()})
    assert here("ls", "--name", "nothing") == (0, "", "kcache: no kernel matches the filters\n")
    assert here("rm", "--name", "nothing", "--yes").out == "deleted 0 entries, 0 B\n"
    said = here("ls", "--older-than", "soon")
    assert said.code == 2
    assert 'such as "12h" or "30d"' in said.err


# -- `kcache show` and `kcache extract` ------------------------------------------------------------


@pytest.fixture
def shown(cache_directory: Path, backend: str) -> Path:
    entries = {
        A: kernel(5000, names=["k<int>"], log="a.cu(3): warning: unused\n  here"),
        B: kernel(ptx=b"// PTX of b\n", arch="compute_90", source="b.cu"),
        M: manifest(),
    }
    fill(cache_directory, entries, backend)
    return cache_directory


def test_everything_that_is_known_of_a_kernel(shown: Path, here: Callable, backend: str) -> None:
    before = recency(shown, backend)
    out = here("show", A[:6]).clean()
    for text in (A, "axpy.cu", "sm_90", "250.0 ms", "nvrtc 12ab", "--gpu-architecture=sm_90"):
        assert text in out
    assert re.search(r"^created +2023-11-1\d \d\d:13:20 [+-]\d{4} \(\d+ d ago\)$", out, re.M)
    assert re.search(r"^sections\n  ptx +7 B\n  cubin +4\.9 KiB$", out, re.M)
    assert re.search(r"^names\n  k<int>  _Z_k<int>$", out, re.M)
    found = json.loads(here("show", "--json", A).out)
    assert (found["key"], found["sections"]) == (A, {"ptx": 7, "cubin": 5000})
    assert found["metadata"]["log"] == "a.cu(3): warning: unused\n  here"
    here("extract", A, "-o", shown / "out")
    assert recency(shown, backend) == before  # showing does not record a use


def test_the_files_of_nvcc(cache_directory: Path, here: Callable) -> None:
    entry = kernel(file0=b"code")
    files = [["/there/k.o", 0o755, True, 0]]
    fill(cache_directory, {A: Entry(entry.payload, {**entry.metadata, "files": files})})
    assert re.search(r"^files\n  0755  /there/k.o$", here("show", A).out, re.M)


def test_the_headers_of_a_manifest(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {M: manifest()})
    said = here("show", M)
    assert said.code == 0
    assert re.search(r"^kind +manifest$", said.out, re.M)
    assert "include path 1  lib/read.h  000102030405060708090a0b0c0d0e0f\n" in said.out
    assert "source's folder  lib/read.h\n" in said.out
    (found,) = json.loads(here("show", "--json", M).out)["dependency_sets"]
    assert found["files"][0]["path"] == "lib/read.h"
    assert found["absent"] == [{"root": "source's folder", "path": "lib/read.h"}]


def test_a_damaged_entry_is_shown_as_far_as_possible(cache_directory: Path, here: Callable) -> None:
    damage(cache_directory, A)
    said = here("show", A[:10])
    assert said.code == 1
    assert A in said.out
    assert said.err.startswith(f"kcache: error: entry {A[:12]} can't be used: ")
    assert said.err.count("\n") == 1
    assert json.loads(here("show", A, "--json").out)["kind"] == "damaged"
    assert here("extract", A).code == 1


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "extract", "rm"])
def test_wrong_keys_change_nothing(command: str, cache_directory: Path, here: Callable) -> None:
    names = sorted(key(n, "abcd" * 5) for n in range(10))
    fill(cache_directory, {name: kernel(10) for name in names})
    for name in ("00000", "f" * 64):
        error = f"kcache: error: no entry has a key that begins with {name}\n"
        assert here(command, name) == (1, "", error)
    for name in ("", "abc", "wxyz", "abcd/..", "a" * 65, "-1234", "é" * 8):
        said = here(command, "--", name)
        assert (said.code, said.out) == (2, "")
        assert "4 to 64 hexadecimal digits" in said.err
    said = here(command, "abcd")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "10 entries" in said.err
    assert said.err.endswith(" and 2 more\n")
    assert len(held(cache_directory)) == 10


# -- extract ---------------------------------------------------------------------------------------


def test_extract_writes_the_section(
    shown: Path, here: Callable, run: Callable, tmp_path: Path
) -> None:
    assert here("extract", B, "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out").read_bytes() == b"// PTX of b\n"
    assert here("extract", A, "--emit", "ptx", "-o", tmp_path / "x.cubin").code == 0
    assert (tmp_path / "x.cubin").read_bytes() == b"// PTX\n"
    done = run("extract", A, "-o", "-")
    with kcache.KernelCache(shown) as cache:
        entry = cache.engine.get(A)
    assert (done.returncode, done.stdout) == (0, entry.payload["cubin"])
    for name, there in ((A, "ptx, cubin"), (M, "set0")):
        said = here("extract", name, "--emit", "ltoir", "-o", tmp_path / "none")
        assert (said.code, said.out) == (1, "")
        assert said.err.endswith(f"has no ltoir; it has: {there}\n")
    assert not (tmp_path / "none").exists()


def test_binary_is_not_written_to_a_terminal(cache_directory: Path) -> None:
    fill(cache_directory, {A: kernel()})
    with AllTerminal("extract", A, "-o", "-") as terminal:
        code, _, seen = terminal.end()
    assert code == 2
    assert b"CUBIN is binary" in seen


def test_show_has_every_kind_of_answer() -> None:
    """`kcache show` has a name for each kind of answer that a dependency set can contain."""
    assert {*Answers._fields} - {"digests", "home"} == _KINDS.keys()
