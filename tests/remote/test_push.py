"""`kcache push` fills a remote from a cache, so that another machine compiles nothing."""

import json
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from core.helpers import run
from nvrtc.reference import ARCH, KERNEL, write
from remote import servers
from remote.fakes import NO_HURRY
from remote.machines import Machines, of_client, source

import kcache


def push(directory: Path, remote: str, *arguments: str) -> tuple[int, str, str]:
    environ = {"KCACHE_DIR": str(directory), "KCACHE_REMOTE": remote}
    done = run(sys.executable, "-m", "kcache", "push", *arguments, environ=environ)
    return done.returncode, done.stdout, done.stderr


def test_push(hosts: Machines, redis_server: servers.Redis, tmp_path: Path) -> None:
    """`kcache push` uploads kernels with and without headers. A local hit does not upload."""
    remote = f"redis://127.0.0.1:{redis_server.port}/6/push"
    text, options = (
        f"#include <x.h>\n{KERNEL.replace('V', 'VALUE')}",
        ARCH.replace(include_paths=["i"]),
    )
    write(tmp_path / "i/x.h", "#define VALUE 7\n")
    with chdir(tmp_path):
        with kcache.KernelCache(tmp_path / "a") as cache:
            made = [
                cache.get_or_compile(source(1), options=ARCH),
                cache.get_or_compile(text, options=options),
            ]
        patient = f"{remote}?{NO_HURRY}&slow=60"
        with kcache.KernelCache(tmp_path / "a", remote=patient) as cache:
            assert cache.get_or_compile(source(1), options=ARCH).cached
        for _ in range(2):
            code, out, err = push(tmp_path / "a", patient)
            assert (code, err) == (0, "")
            assert out == f"{remote}: 2 kernels and 1 manifest\n"
        with hosts.cache("b", patient) as cache:
            found = [
                cache.get_or_compile(source(1), options=ARCH),
                cache.get_or_compile(text, options=options),
            ]
            assert of_client(cache).flush(60)
            assert cache.stats().compiles == 0
    assert [kernel.cubin for kernel in found] == [kernel.cubin for kernel in made]


@pytest.mark.usefixtures("nvrtc")
def test_failed_uploads_are_counted_with_the_reason(tmp_path: Path) -> None:
    with kcache.KernelCache(tmp_path / "a") as cache:
        cache.get_or_compile(source(1), options=ARCH)
    nobody = f"redis://127.0.0.1:{servers.free_port()}"
    code, out, err = push(tmp_path / "a", nobody, "--json")
    (told,) = json.loads(out)
    assert (code, told["kernels"], told["failed"]) == (1, 0, 1)
    assert err.startswith("kcache: error: 1 entry not stored: ")
    assert nobody in err
    code, _, err = push(tmp_path / "a", f"{nobody}?ro")
    assert (code, err) == (
        2,
        "kcache: error: KCACHE_REMOTE has no address that can be written to\n",
    )
