"""`kcache bundle`: what it prints, and what it doesn't change. `tests/bundle/` tests bundles."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Run, Said
from cli.helpers import as_nobody, can_become_nobody, damage, fill, held, kernel, manifest
from core.helpers import NOBODY, key, nobodys_directory, umask

from kcache import Entry

Here = Callable[..., Said]


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    fill(
        cache_directory,
        {
            key(1): kernel(names=["axpy<float>"]),
            key(2): kernel(names=["axpy<double>"], arch="sm_80"),
            key(3): manifest(),  # refers to no kernel
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
    assert (said.code, said.out, said.err) == (
        0,
        "2 entries added, 0 already present, 0 merged\n",
        "",
    )
    assert sorted(held(other)) == sorted([key(1), key(2)])
    again = here("bundle", "import", path, "--directory", other)
    assert again.out == "0 entries added, 2 already present, 0 merged\n"


def test_through_pipes(run: Run, filled: Path, tmp_path: Path) -> None:
    exported = run("bundle", "export", "-o", "-")
    assert exported.stdout.startswith(b"SQLite format 3")
    assert b"2 kernels" in exported.stderr
    imported = run("bundle", "import", "-", "--directory", tmp_path / "o", stdin=exported.stdout)
    assert imported.stdout.startswith(b"2 entries added")
    assert run("bundle", "list", "-", stdin=exported.stdout).returncode == 0
    cut = run("bundle", "verify", "-", stdin=exported.stdout[:-1])
    assert (cut.returncode, cut.stdout) == (1, b"")
    assert b"kcache: error: the input: it is truncated" in cut.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sh")
@pytest.mark.parametrize(
    ("command", "closed", "name"),
    [("verify -", "<&-", "standard input"), ("export -o -", ">&-", "standard output")],
)
def test_a_closed_stream(command: str, closed: str, name: str, filled: Path) -> None:
    line = f'"$0" -P -m kcache bundle {command} {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False
    )
    assert done.stderr == f"kcache: error: {name}: Bad file descriptor\n"
    assert done.returncode == 1


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


def test_omitted_entries_are_reported(here: Here, filled: Path, tmp_path: Path) -> None:
    damage(filled, key(2))
    said = here("bundle", "export", "-o", tmp_path / "kernels.kcb")
    assert said.out.startswith("1 kernel ")
    assert said.err.startswith(f"kcache: left out: damaged entry {key(2)[:12]}: ")


# -- images, and whether a bundle serves here ------------------------------------------------------


def test_an_image_layout_holds_the_bundle(here: Here, filled: Path, tmp_path: Path) -> None:
    bundle, layout = tmp_path / "kernels.kcb", tmp_path / "layout"
    assert here("bundle", "export", "-o", bundle).code == 0
    assert here("bundle", "export", "--oci", layout).clean().startswith("2 kernels and 0 manifests")
    (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
    blobs = layout / "blobs" / "sha256"
    described = json.loads(blob(blobs, manifest))
    config, (layer,) = json.loads(blob(blobs, described["config"])), described["layers"]
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    with tarfile.open(fileobj=io.BytesIO(blob(blobs, layer))) as archive:
        assert archive.getnames() == ["kernels.kcb"]
        assert archive.extractfile("kernels.kcb").read() == bundle.read_bytes()
    again = tmp_path / "again"
    again.mkdir()
    assert here("bundle", "export", "--oci", again).code == 0
    assert (again / "index.json").read_bytes() == (layout / "index.json").read_bytes()
    refused = here("bundle", "export", "--oci", layout)
    assert refused.err == f"kcache: error: {layout}: expected a new or an empty directory\n"
    assert here("bundle", "export", "--oci", layout, "-o", bundle).code == 2
    assert here("bundle", "export").code == 2


def blob(blobs: Path, descriptor: dict[str, Any]) -> bytes:
    """Return the content of a blob, and assert that its size and digest are the descriptor's."""
    content = (blobs / descriptor["digest"].removeprefix("sha256:")).read_bytes()
    assert descriptor["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert descriptor["size"] == len(content)
    return content


@pytest.fixture
def layout(run: Run, tmp_path: Path, nvrtc: tuple[int, int]) -> Path:
    """An image layout of a cache with one kernel for sm_90, which `kernels.json` lists."""
    kernels = [{"text": "__global__ void k(int* x) { *x = 1; }"}]
    (tmp_path / "kernels.json").write_text(json.dumps({"kernels": kernels}))
    assert run("warm", tmp_path / "kernels.json", "--arch", "sm_90").returncode == 0
    assert run("bundle", "export", "--oci", tmp_path / "layout").returncode == 0
    return tmp_path / "layout"


def test_a_bundle_that_serves_here(here: Here, layout: Path, tmp_path: Path) -> None:
    told = here("bundle", "check", layout, "--arch", "sm_90", "--list", tmp_path / "kernels.json")
    assert told.clean() == "serves: 1 kernel and 0 manifests, sm_90\n"
    told = here("bundle", "check", layout, "--arch", "90", "--json")
    assert json.loads(told.clean())["problems"] == []


def test_each_reason_why_a_bundle_does_not_serve(run: Run, layout: Path, tmp_path: Path) -> None:
    def reasons(*arguments: str | Path, **settings: str) -> list[str]:
        told = run("bundle", "check", *arguments, "--json", **settings)
        assert told.returncode == 1, told.stderr
        return json.loads(told.stdout)["problems"]

    (arch,) = reasons(layout, "--arch", "sm_100")
    assert arch == "arch: expected kernels for sm_100, got sm_90"
    (listed,) = reasons(layout, "--arch", "sm_80", "--arch", "sm_90")
    assert listed == "arch: expected kernels for sm_80, got sm_90"

    others = [{"text": "__global__ void other(int* x) { *x = 1; }", "source_name": "other.cu"}]
    (tmp_path / "others.json").write_text(json.dumps({"kernels": others}))
    wanted = ("--arch", "sm_90", "--list", tmp_path / "others.json")
    assert reasons(layout, *wanted) == ["list: other.cu (sm_90) is missing"]

    of_another = tmp_path / "of-another.kcb"
    entry = kernel(names=["k"])
    entry = Entry(entry.payload, {**entry.metadata, "compiler": "nvrtc 0123 4567"})
    fill(tmp_path / "another", {key(1): entry})
    exported = run("bundle", "export", "-o", of_another, "--directory", tmp_path / "another")
    assert exported.returncode == 0
    (compiler,) = reasons(of_another, "--arch", "sm_90")
    assert compiler.startswith("compiler: expected nvrtc 0123 4567 (), got nvrtc ")

    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "old.c").write_text("int cuDriverGetVersion(int *v) { *v = 11080; return 0; }")
    command = ["cc", "-shared", "-fPIC", driver / "old.c", "-o", driver / "libcuda.so.1"]
    if shutil.which("cc"):
        subprocess.run(command, check=True)
        (old,) = reasons(layout, "--arch", "sm_90", LD_LIBRARY_PATH=str(driver))
        assert re.fullmatch(
            r"driver: expected a driver for CUDA 1[23]\.0 or newer, got .* 11\.8", old
        )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
def test_a_bundle_that_others_can_write_to_does_not_serve(
    here: Here, layout: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "kernels.kcb"
    assert here("bundle", "export", "-o", bundle).code == 0
    bundle.chmod(0o664)
    told = here("bundle", "check", bundle, "--arch", "sm_90")
    assert told.code == 1
    assert "is not allowed: others can write to it (mode 0664)" in told.err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_a_layout_is_written_whatever_the_umask(here: Here, tmp_path: Path) -> None:
    with nobodys_directory() as folder:
        os.chown(folder, os.geteuid(), -1)
        cache = folder / "cache"
        fill(cache, {key(1): kernel()})
        command = ("bundle", "export", "--directory", cache, "--oci")
        here(*command, tmp_path / "layout")  # imports the modules that the child needs
        if can_become_nobody():
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        with umask(0o177):
            code, _, err = as_nobody(*command, folder / "layout")
        assert (code, err) == (0, "")
        assert (folder / "layout/index.json").is_file()


def test_an_invalid_image_layout_is_named(here: Here, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"manifests": [{"digest": "sha256:../x"}]}')
    told = here("bundle", "check", tmp_path, "--arch", "sm_90")
    assert told.code == 1
    expected = "expected a directory or an OCI image layout with kernels.kcb"
    assert f"{tmp_path}: {expected} (expected a SHA-256 digest" in told.err
    (tmp_path / "index.json").write_text("[" * 200_000)
    assert f"{tmp_path}: {expected} (" in here("bundle", "check", tmp_path, "--arch", "sm_90").err
