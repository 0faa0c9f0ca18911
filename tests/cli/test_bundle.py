"""`kcache bundle`: what it says, and what it leaves alone. What a bundle is: `tests/bundle/`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import Run, Said
from cli.helpers import damage, fill, held, kernel, key, manifest

Here = Callable[..., Said]


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    fill(
        cache_directory,
        {
            key(1): kernel(names=["axpy<float>"]),
            key(2): kernel(names=["axpy<double>"], arch="sm_80"),
            key(3): manifest(),  # leads to no kernel
        },
    )
    return cache_directory


@pytest.mark.usefixtures("filled")
def test_from_one_cache_to_another(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "kernels.kcb"
    out = here("bundle", "export", "-o", path).clean()
    assert out.startswith(f"2 kernels and 0 manifests in {path}, ")
    other = tmp_path / "other"
    said = here("bundle", "import", path, "--directory", other)
    assert (said.code, said.out, said.err) == (0, "2 entries added, 0 were there, 0 merged\n", "")
    assert sorted(held(other)) == sorted([key(1), key(2)])
    again = here("bundle", "import", path, "--directory", other)
    assert again.out == "0 entries added, 2 were there, 0 merged\n"


def test_through_pipes(run: Run, filled: Path, tmp_path: Path) -> None:
    exported = run("bundle", "export", "-o", "-")
    assert exported.stdout.startswith(b"SQLite format 3")
    assert b"2 kernels" in exported.stderr
    imported = run("bundle", "import", "-", "--directory", tmp_path / "o", stdin=exported.stdout)
    assert imported.stdout.startswith(b"2 entries added")
    assert run("bundle", "list", "-", stdin=exported.stdout).returncode == 0
    cut = run("bundle", "verify", "-", stdin=exported.stdout[:-1])
    assert (cut.returncode, cut.stdout) == (1, b"")
    assert b"kcache: error: what was piped in: it is truncated" in cut.stderr


@pytest.mark.usefixtures("filled")
def test_list_and_verify(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "kernels.kcb"
    here("bundle", "export", "-o", path)
    assert len(here("bundle", "list", path).out.splitlines()) == 3
    found = json.loads(here("bundle", "list", "--json", path).out)
    assert {row["key"]: row["arch"] for row in found} == {key(1): "sm_90", key(2): "sm_80"}
    assert "last_use" not in found[0]
    assert here("bundle", "verify", path).out.endswith(", not signed\n")
    told = json.loads(here("bundle", "verify", "--json", path).out)
    assert (told["kernels"], told["size"]) == (2, path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-5])
    said = here("bundle", "verify", path)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"kcache: error: {path}: it is truncated")


def test_what_is_left_out_is_said(here: Here, filled: Path, tmp_path: Path) -> None:
    damage(filled, key(2))
    said = here("bundle", "export", "-o", tmp_path / "kernels.kcb")
    assert said.out.startswith("1 kernel ")
    assert said.err.startswith(f"kcache: left out: damaged entry {key(2)[:12]}: ")
