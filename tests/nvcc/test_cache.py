"""Artifacts of nvcc in a cache: commands, cap, errors, recordings, and sharing between machines."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nvcc.conftest import Service
from remote import servers

from kcache.daemons import sockets
from kcache.dropin import run_environment as env

pytestmark = pytest.mark.slow

CUBIN = ["-cubin", "-arch=sm_90", "-Iinclude", "k.cu", "-o", "k.cubin"]


def told(service: Service, *arguments: object, cwd: Path) -> Any:
    done = service.kcache(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def counts_of(service: Service, *, cwd: Path) -> Any:
    """Return what `kcache stats` prints once the service has ended."""
    sockets.ask(service.socket, sockets.STOP)
    while sockets.status(service.socket) is not None:
        pass
    while not (found := told(service, "stats", cwd=cwd))["misses"]:
        pass
    return found


def test_the_commands_know_it(service: Service, project: Path) -> None:
    command = ["why", "--", service.nvcc, *CUBIN]
    before = service.kcache(*command, cwd=project)
    assert before.stdout.startswith("k.cu for sm_90 would be compiled: ")
    for _ in range(2):
        assert service.run(*CUBIN, cwd=project).returncode == 0
    assert "is in the cache" in service.kcache(*command, cwd=project).stdout
    stats = counts_of(service, cwd=project)
    assert (stats["hits"], stats["misses"], stats["compiles"]) == (1, 1, 1)
    listed = told(service, "ls", cwd=project)
    assert {item["source_name"] for item in listed if item["kind"] == "kernel"} == {"k.cu"}
    (kernel,) = (item for item in listed if item["kind"] == "kernel")
    shown = service.kcache("show", kernel["key"][:12], cwd=project).stdout
    assert "k.cubin" in shown
    (manifest,) = (
        item for item in told(service, "ls", "--all", cwd=project) if item["kind"] == "manifest"
    )
    shown = service.kcache("show", manifest["key"][:12], cwd=project).stdout
    assert "include/header.h" in shown
    assert "symbolic links, and their targets" in shown
    assert service.kcache("verify", cwd=project).returncode == 0
    report = service.kcache("report", "--output", "-", cwd=project)
    assert (report.returncode, "k.cu" in report.stdout) == (0, True), report.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("header", "the header {}/include/header.h changed"),
        ("shadow", "{}/header.h exists now, but did not when the compiler looked for it"),
        ("macro", "the macro X was added"),
        ("variable", "the environment variable NVCC_APPEND_FLAGS has another value"),
    ],
)
def test_why_names_what_changed(change: str, reason: str, service: Service, project: Path) -> None:
    assert service.run(*CUBIN, cwd=project).returncode == 0
    more, variables = (["-DX"] if change == "macro" else []), {}
    if change == "header":
        (project / "include/header.h").write_text("#define FACTOR 5\n")
    elif change == "shadow":
        (project / "header.h").write_text("#define FACTOR 5\n")
    elif change == "variable":
        variables["NVCC_APPEND_FLAGS"] = "-DX"
    done = service.kcache("why", "--", service.nvcc, *more, *CUBIN, cwd=project, **variables)
    assert reason.format(project) in done.stdout
    service.restart(KCACHE_ON_MISS="error")
    refused = service.run(*more, *CUBIN, cwd=project, **variables)
    assert refused.returncode == 1
    assert reason.format(project) in refused.stderr.decode()
    assert b"KCACHE_ON_MISS=error allows no compile" in refused.stderr


def test_the_cap_holds(service: Service, project: Path) -> None:
    service.restart(KCACHE_MAX_SIZE="80 KB")
    for number in range(6):
        assert service.run(f"-DX={number}", *CUBIN, cwd=project).returncode == 0
    assert counts_of(service, cwd=project)["evictions"] > 0
    folder = Path(service.environment["KCACHE_DIR"])
    assert sum(path.stat().st_size for path in folder.glob("file/*/*")) <= 80_000


def test_a_bundle_answers(service: Service, project: Path, tmp_path: Path) -> None:
    assert service.run(*CUBIN, cwd=project).returncode == 0
    bundle = tmp_path / "artifacts.kcache"
    assert service.kcache("bundle", "export", "-o", bundle, cwd=project).returncode == 0
    service.restart(KCACHE_DIR=str(tmp_path / "empty"), KCACHE_REMOTE=bundle.as_uri())
    assert service.run(*CUBIN, cwd=project).returncode == 0
    assert (service.counts["hits"], service.counts["misses"]) == (1, 0)


@pytest.mark.parametrize("is_there", [True, False], ids=["the same place", "a random place"])
def test_a_recording_warms_another_cache(
    is_there: bool, service: Service, project: Path, tmp_path: Path
) -> None:
    """A recorded source may be in a directory that no longer exists, like those of DeepGEMM."""
    recording = tmp_path / "starts.jsonl"
    service.restart(KCACHE_RECORD=str(recording))

    def start_in(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(project / "k.cu", folder / "kernel.cu")
        arguments = ("-cubin", "-arch=sm_90", f"-I{project}/include", folder / "kernel.cu", "-o")
        assert service.run(*arguments, folder / "k.cubin", cwd=project).returncode == 0
        assert (folder / "k.cubin").stat().st_size

    start_in(tmp_path / "one")
    (line,) = map(json.loads, recording.read_text().splitlines())
    assert "HOME" not in line["nvcc"]["environment"]
    if not is_there:
        shutil.rmtree(tmp_path / "one")
    elsewhere = {"KCACHE_DIR": str(tmp_path / "warmed")}
    checked = service.kcache("warm", "--check", recording, cwd=tmp_path, **elsewhere)
    assert (checked.returncode, "1 would be compiled" in checked.stdout) == (1, True)
    for compiled in (1, 0):
        done = service.kcache("warm", "--json", recording, cwd=tmp_path, **elsewhere)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["compiled"] == compiled
    service.restart(**elsewhere)
    start_in(tmp_path / "another")
    assert (service.counts["hits"], service.counts["misses"]) == (1, 0)
    assert service.kcache("warm", "--check", recording, cwd=tmp_path, **elsewhere).returncode == 0

    def is_missing_in_a_bundle(*filters: str) -> bool:
        export = ("bundle", "export", "-o", "k.kcb", *filters)
        assert service.kcache(*export, cwd=tmp_path, **elsewhere).returncode == 0
        check = ("bundle", "check", "k.kcb", "--arch", "sm_90", "--list", recording)
        told = service.kcache(*check, cwd=tmp_path)
        return "kernel.cu (sm_90) is missing" in told.stderr

    assert not is_missing_in_a_bundle()
    assert is_missing_in_a_bundle("--name", "nothing")


def test_two_machines_compile_once(service: Service, project: Path, tmp_path: Path) -> None:
    """The second machine waits for the lease, and gets the artifact that the first one uploaded."""
    (project / "include/header.h").write_text("#define FACTOR 3\n#include <cuda/std/tuple>\n")
    with servers.redis(tmp_path) as server:
        remote = f"redis://127.0.0.1:{server.port}?leases"
        daemons, started = [], []
        for machine in ("one", "another"):
            service.restart(KCACHE_REMOTE=remote, KCACHE_DIR=str(tmp_path / machine))
            daemons.append(service.socket)
        for path in daemons:
            variables = {**service.environment, env.SOCKET: path}
            command = [str(service.client), str(service.nvcc), *CUBIN]
            started.append(subprocess.Popen(command, cwd=project, env=variables))
        assert [process.wait(300) for process in started] == [0, 0]
        counts = []
        for service.socket in daemons:
            counts.append(service.counts)
        assert sum(each["misses"] for each in counts) == 1
        assert sum(each["hits"] for each in counts) == 1


def test_the_launcher_and_the_compiler_share_entries(service: Service, project: Path) -> None:
    environment = {**service.environment, env.SOCKET: service.socket}
    for hits, arguments in enumerate(([], ["nvcc"], [str(service.nvcc)])):
        command = [str(service.client), *arguments, *CUBIN]
        assert subprocess.run(command, cwd=project, env=environment, check=False).returncode == 0
        assert service.counts["hits"] == hits
    compiler = project / "bin/nvcc"
    compiler.parent.mkdir()
    shutil.copy(service.client, compiler)
    assert (
        subprocess.run([compiler, *CUBIN], cwd=project, env=environment, check=False).returncode
        == 0
    )
    assert service.counts["hits"] == 3
    assert os.path.getsize(project / "k.cubin")
