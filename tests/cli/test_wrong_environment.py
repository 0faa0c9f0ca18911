"""Bad values in the environment: all commands follow the same rule.

Commands that only read, or compile, warn and continue, as a program does. Commands that change a
cache fail with the reason, also with `--dry-run`, because they would work on a cache or with a cap
that the user did not mean.
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

#: Commands that only read, or compile: they warn, and have the same result.
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
#: Commands that change a cache: they fail.
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
#: Commands that are not tested here, with the reason.
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
    """A variable's name, and a value that it must not have."""

    name: str
    value: str


def test_the_tables_have_every_command() -> None:
    named = LOOKS.keys() | CHANGES.keys() | ELSEWHERE.keys()
    assert {f"kcache {name}" for name in named} == {name for name, _ in leaves(app, "kcache")}


@pytest.fixture
def cache(work: Path, cache_directory: Path) -> Path:
    """A cache, and the files to which the commands refer."""
    (work / "k.cu").write_text("__global__ void k(float* x) { x[0] = 1; }\n")
    (work / "kernels.toml").write_text('[[kernels]]\nsource = "k.cu"\narchs = ["sm_90"]\n')
    fill(cache_directory, {KEY: kernel()})
    with KernelCache(cache_directory) as opened:
        export_bundle(opened, work / "kernels.kcb")
    return cache_directory


@pytest.fixture(params=["KCACHE_MAX_SIZE", "KCACHE_BACKEND", "KCACHE_DIR"])
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> Wrong:
    """Each variable with a bad value."""
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
    if wrong.name == "KCACHE_DIR":  # the expected result is that of an empty cache
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
