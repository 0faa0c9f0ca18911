"""What is wrong with the environment, and what each command makes of it: one rule for all.

Commands that look or compile warn and go on, as a program does. Commands that change a cache refuse
with the reason, rehearsals too: they would work on another cache, or with another cap, than the
user meant.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cli.helpers import fill, kernel
from cli.test_app import leaves
from core.helpers import key, snapshot

from kcache import KernelCache
from kcache.admin.bundles import export_bundle
from kcache.cli.app import app

pytestmark = pytest.mark.usefixtures("nvrtc")

KEY = key(1)
SOURCE = ("k.cu", "--arch", "sm_90")

#: Commands that look, or compile: a warning, and the same outcome.
LOOKS: dict[str, tuple[str, ...]] = {
    "compile": (*SOURCE, "-o", "k.cubin"),
    "why": (*SOURCE, "--json"),
    "stats": ("--json",),
    "path": (),
    "report": ("-o", "r.html"),
    "ls": ("--json",),
    "show": (KEY, "--json"),
    "extract": (KEY, "-o", "out.cubin"),
    "verify": ("--json",),
    "bundle export": ("-o", "x.kcb"),
    "config": ("--json",),
}
#: Commands that change a cache: an error.
CHANGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "warm": (("kernels.toml",), ("kernels.toml", "--dry-run")),
    "rm": ((KEY,), (KEY, "--dry-run")),
    "trim": ((), ("--dry-run",), ("--max-size", "1")),
    "clear": (("--yes",),),
    "migrate": (("--to", "zstd"), ("--to", "zstd", "--dry-run")),
    "verify": (("--repair",),),
    "stats": (("--zero",),),
    "config": (("--set", "wait=3"), ("--unset", "wait")),
    "bundle import": (("kernels.kcb",),),
}
#: Tested elsewhere, with why.
ELSEWHERE = {
    **dict.fromkeys(("integrations", "key new", "key show"), "has nothing to do with a cache"),
    **dict.fromkeys(
        ("bundle list", "bundle verify", "bundle check"), "has nothing to do with a cache"
    ),
    "push": "needs a remote: remote/test_push.py",
    "demo": "has a cache of its own, and settings of its own",
    "doctor": "reports wrong variables as findings: test_doctor.py",
    "run": "starts a program: below",
    "server start": "below",
    "server stop": "has nothing to do with a cache",
    "server status": "has nothing to do with a cache",
}


class Wrong(NamedTuple):
    """A variable with a value that is not allowed."""

    name: str
    value: str


def test_the_tables_have_every_command() -> None:
    named = LOOKS.keys() | CHANGES.keys() | ELSEWHERE.keys()
    assert {f"kcache {name}" for name in named} == {name for name, _ in leaves(app, "kcache")}


@pytest.fixture
def cache(work: Path, cache_directory: Path) -> Path:
    """A cache, and the files that the commands take."""
    (work / "k.cu").write_text("__global__ void k(float* x) { x[0] = 1; }\n")
    (work / "kernels.toml").write_text('[[kernels]]\nsource = "k.cu"\narchs = ["sm_90"]\n')
    fill(cache_directory, {KEY: kernel()})
    with KernelCache(cache_directory) as opened:
        export_bundle(opened, work / "kernels.kcb")
    return cache_directory


@pytest.fixture(params=["KCACHE_MAX_SIZE", "KCACHE_BACKEND", "KCACHE_DIR"])
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> Wrong:
    """Each way to have a variable wrong."""
    unsafe = tmp_path / "unsafe"
    fill(unsafe, {KEY: kernel()})
    unsafe.chmod(0o777)
    values = {"KCACHE_MAX_SIZE": "5GiGs", "KCACHE_BACKEND": "redis", "KCACHE_DIR": str(unsafe)}
    return Wrong(request.param, values[request.param])


@pytest.mark.parametrize("command", LOOKS)
def test_commands_that_read_or_compile_warn(
    command: str, wrong: Wrong, cache: Path, here: Callable, tmp_path: Path, monkeypatch
) -> None:
    line = (*command.split(), *LOOKS[command])
    if wrong.name == "KCACHE_DIR":  # as if nothing had been cached yet
        monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "none"))
    expected = here(*line)
    before = snapshot(tmp_path / "unsafe")
    monkeypatch.setenv(wrong.name, wrong.value)
    said = here(*line)
    assert said.code == expected.code, said.err
    assert said.err.count("kcache: warning: ") == 1, said.err
    assert f"kcache: warning: {wrong.name}" in said.err
    if "--json" in line and wrong.name != "KCACHE_DIR":
        assert said.out == expected.out
    assert snapshot(tmp_path / "unsafe") == before


@pytest.mark.parametrize(
    ("command", "options"), [(name, line) for name, lines in CHANGES.items() for line in lines]
)
def test_commands_that_change_a_cache_refuse(
    command: str,
    options: tuple[str, ...],
    wrong: Wrong,
    cache: Path,
    here: Callable,
    tmp_path: Path,
) -> None:
    places = (cache, tmp_path / "unsafe")
    before = [snapshot(place) for place in places]
    said = here(*command.split(), *options, **{wrong.name: wrong.value})
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"kcache: error: {wrong.name}"), said.err
    assert said.err.count("\n") == 1
    assert [snapshot(place) for place in places] == before


@pytest.mark.parametrize("wrong", ["KCACHE_DIR"], indirect=True)
def test_run_and_server_warn(wrong: Wrong, run: Callable, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    settings = {wrong.name: wrong.value, "XDG_RUNTIME_DIR": str(runtime)}
    lines = [("run", "--stats", "true"), ("server", "start")]
    try:
        for line in lines:
            said = run(*line, **settings)
            assert said.returncode == 0
            assert said.stderr.count(b"kcache: warning: ") == 1, (line, said.stderr)
            assert f"kcache: warning: {wrong.name}".encode() in said.stderr
    finally:
        run("server", "stop", **settings)
    unsafe = tmp_path / "unsafe"
    said = run("run", "--directory", unsafe, "true", XDG_RUNTIME_DIR=str(runtime))
    assert (said.returncode, said.stdout) == (2, b"")
