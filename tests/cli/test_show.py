"""`kcache show` and `kcache extract`: one entry, named by the beginning of its key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import damage, fill, held, kernel, key, manifest, recency
from cli.test_terminal import AllTerminal

import kcache

A, B, M = (key(name) for name in "abm")


@pytest.fixture
def filled(cache_directory: Path, backend: str) -> Path:
    entries = {
        A: kernel(5000, names=["k<int>"], log="a.cu(3): warning: unused\n  here"),
        B: kernel(ptx=b"// PTX of b\n", arch="compute_90", source="b.cu"),
        M: manifest(),
    }
    fill(cache_directory, entries, backend)
    return cache_directory


def test_everything_that_is_known_of_a_kernel(filled: Path, here: Callable) -> None:
    said = here("show", A[:6])
    assert (said.code, said.err) == (0, "")
    for text in (A, "axpy.cu", "sm_90", "250.0 ms", "nvrtc 12ab", "--gpu-architecture=sm_90"):
        assert text in said.out
    assert re.search(r"^created +2023-11-1\d \d\d:13:20 [+-]\d{4} \(\d+ d ago\)$", said.out, re.M)
    assert re.search(r"^last use .* \(\d+ s ago\)$", said.out, re.M)
    assert re.search(r"^sections\n  ptx +7 B\n  cubin +4\.9 KiB$", said.out, re.M)
    assert re.search(r"^names\n  k<int>  _Z_k<int>$", said.out, re.M)
    assert re.search(r"^log\n  a\.cu\(3\): warning: unused\n    here$", said.out, re.M)


def test_json_has_the_metadata_as_it_is(filled: Path, here: Callable) -> None:
    found = json.loads(here("show", "--json", A).out)
    assert found["key"] == A
    assert found["sections"] == {"ptx": 7, "cubin": 5000}
    assert found["metadata"]["log"] == "a.cu(3): warning: unused\n  here"
    assert found["metadata"]["flags"] == ["--gpu-architecture=sm_90"]
    assert found["size_bytes"] > 5000


def test_the_headers_of_a_manifest(filled: Path, here: Callable) -> None:
    said = here("show", M)
    assert said.code == 0
    assert re.search(r"^kind +manifest$", said.out, re.M)
    assert "header set 0, checked in 0 locations" in said.out
    assert re.search(
        r"^headers that were read, and their digests \(1\)\n"
        r"  include path 1  lib/read\.h  000102030405060708090a0b0c0d0e0f$",
        said.out,
        re.M,
    )
    assert re.search(
        r"^paths where nothing must be \(1\)\n  source's folder  lib/read\.h$", said.out, re.M
    )
    (found,) = json.loads(here("show", "--json", M).out)["header_sets"]
    assert found["files"][0]["path"] == "lib/read.h"
    assert found["absent"] == [{"root": "source's folder", "path": "lib/read.h"}]


def test_showing_is_no_use(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    here("show", A)
    here("extract", A, "-o", filled / "out")
    assert recency(filled, backend) == before


def test_a_damaged_entry_is_shown_as_far_as_possible(
    filled: Path, here: Callable, backend: str
) -> None:
    damage(filled, A, backend)
    said = here("show", A[:10])
    assert said.code == 1
    assert A in said.out
    assert re.search(r"^kind +damaged$", said.out, re.M)
    assert said.err.startswith(f"kcache: error: entry {A[:12]} is not used: ")
    assert said.err.count("\n") == 1
    assert json.loads(here("show", A, "--json").out)["kind"] == "damaged"
    assert here("extract", A).code == 1


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "extract", "rm"])
def test_an_unknown_key_says_so(command: str, filled: Path, here: Callable) -> None:
    for name in ("00000", "f" * 64):
        said = here(command, name)
        assert (said.code, said.out) == (1, "")
        assert said.err == f"kcache: error: no entry has a key that begins with {name}\n"


@pytest.mark.parametrize("command", ["show", "extract", "rm"])
@pytest.mark.parametrize("name", ["", "abc", "wxyz", "abcd/..", "a" * 65, "-1234", "é" * 8])
def test_what_is_no_key_is_wrong_usage(
    command: str, name: str, filled: Path, here: Callable, backend: str
) -> None:
    said = here(command, "--", name)
    assert (said.code, said.out) == (2, "")
    assert "4 to 64 hexadecimal digits" in said.err
    assert len(held(filled, backend)) == 3


@pytest.mark.parametrize("command", ["show", "extract", "rm"])
def test_an_ambiguous_prefix_lists_up_to_eight_candidates(
    command: str, cache_directory: Path, here: Callable
) -> None:
    names = sorted(key(n, "abcd" * 5) for n in range(10))
    fill(cache_directory, {name: kernel(10) for name in names[:8]})
    said = here(command, "abcd")
    assert (said.code, said.out) == (1, "")
    assert said.err.count("\n") == 1
    assert "more" not in said.err
    fill(cache_directory, {name: kernel(10) for name in names[8:]})
    said = here(command, "abcd")
    assert "10 entries" in said.err
    shown = said.err.partition(": ")[2].split(": ")[-1].partition(" and ")[0].split(", ")
    assert len(shown) == 8
    assert [here("show", name).code for name in shown] == [0] * 8
    assert said.err.endswith(" and 2 more\n")
    assert len(held(cache_directory)) == 10


# -- extract ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nvrtc")
def test_the_machine_code_of_a_real_kernel(work: Path, here: Callable, backend: str) -> None:
    compiled = here("compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>")
    assert compiled.code == 0, compiled.err
    cubin = Path("axpy.cubin").read_bytes()
    (name,) = held(work.parent / "cache", backend)
    said = here("extract", name[:4])
    assert (said.code, said.out) == (0, "")
    assert said.err.startswith(f"kcache: cubin of axpy.cu -> {name[:12]}.cubin (")
    assert Path(f"{name[:12]}.cubin").read_bytes() == cubin
    assert cubin[:4] == b"\x7fELF"
    assert here("extract", name, "-o", "code.ptx").code == 0
    assert b".entry _Z4axpyIfE" in Path("code.ptx").read_bytes()
    assert "_Z4axpyIfE" in here("show", name).out
    assert "axpy.cu: axpy<float>" in here("ls").out


def test_what_is_written(filled: Path, here: Callable, run: Callable, tmp_path: Path) -> None:
    assert here("extract", B, "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out").read_bytes() == b"// PTX of b\n"
    assert here("extract", A, "--emit", "ptx", "-o", tmp_path / "x.cubin").code == 0
    assert (tmp_path / "x.cubin").read_bytes() == b"// PTX\n"
    done = run("extract", A, "-o", "-")
    with kcache.KernelCache(filled) as cache:
        entry = cache.engine.get(A)
    assert entry is not None
    assert (done.returncode, done.stdout) == (0, entry.payload["cubin"])


@pytest.mark.parametrize(("name", "there"), [(A, "ptx, cubin"), (M, "set0")])
def test_an_error_names_the_sections_that_there_are(
    name: str, there: str, filled: Path, here: Callable, tmp_path: Path
) -> None:
    said = here("extract", name, "--emit", "ltoir", "-o", tmp_path / "out")
    assert (said.code, said.out) == (1, "")
    assert said.err.endswith(f"has no ltoir; it has: {there}\n")
    assert not (tmp_path / "out").exists()


def test_binary_is_not_written_to_a_terminal(cache_directory: Path) -> None:
    fill(cache_directory, {A: kernel()})
    with AllTerminal("extract", A, "-o", "-") as terminal:
        code, _, seen = terminal.end()
    assert code == 2
    assert b"CUBIN is binary" in seen
    with AllTerminal("extract", A, "--emit", "ptx", "-o", "-") as terminal:
        code, _, seen = terminal.end()
    assert code == 0
    assert b"// PTX" in seen
