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


def test_everything_that_is_known_of_a_kernel(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    said = here("show", A[:6])
    assert (said.code, said.err) == (0, "")
    for text in (A, "axpy.cu", "sm_90", "250.0 ms", "nvrtc 12ab", "--gpu-architecture=sm_90"):
        assert text in said.out
    assert re.search(r"^created +2023-11-1\d \d\d:13:20 [+-]\d{4} \(\d+ d ago\)$", said.out, re.M)
    assert re.search(r"^sections\n  ptx +7 B\n  cubin +4\.9 KiB$", said.out, re.M)
    assert re.search(r"^names\n  k<int>  _Z_k<int>$", said.out, re.M)
    found = json.loads(here("show", "--json", A).out)
    assert (found["key"], found["sections"]) == (A, {"ptx": 7, "cubin": 5000})
    assert found["metadata"]["log"] == "a.cu(3): warning: unused\n  here"
    here("extract", A, "-o", filled / "out")
    assert recency(filled, backend) == before  # showing is no use


def test_the_headers_of_a_manifest(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {M: manifest()})
    said = here("show", M)
    assert said.code == 0
    assert re.search(r"^kind +manifest$", said.out, re.M)
    assert "include path 1  lib/read.h  000102030405060708090a0b0c0d0e0f\n" in said.out
    assert "source's folder  lib/read.h\n" in said.out
    (found,) = json.loads(here("show", "--json", M).out)["header_sets"]
    assert found["files"][0]["path"] == "lib/read.h"
    assert found["absent"] == [{"root": "source's folder", "path": "lib/read.h"}]


def test_a_damaged_entry_is_shown_as_far_as_possible(cache_directory: Path, here: Callable) -> None:
    damage(cache_directory, A)
    said = here("show", A[:10])
    assert said.code == 1
    assert A in said.out
    assert said.err.startswith(f"kcache: error: entry {A[:12]} is not used: ")
    assert said.err.count("\n") == 1
    assert json.loads(here("show", A, "--json").out)["kind"] == "damaged"
    assert here("extract", A).code == 1


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "extract", "rm"])
def test_what_is_no_key_of_one_entry_changes_nothing(
    command: str, cache_directory: Path, here: Callable
) -> None:
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
