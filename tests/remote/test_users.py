"""Another user on another machine, in another checkout: of every kind of tier, nothing is compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote.test_protocols import PATIENT, of_http, of_redis, of_s3

pytestmark = [
    pytest.mark.usefixtures("nvrtc"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be somebody else"
    ),
]
#: No user on any machine has this id.
OTHER = 45454
#: One machine: kernels without headers, and one with a header, in the checkout that it stands in.
PROGRAM = """
import hashlib, json, os, sys
import kcache
folder, remote, bundle = sys.argv[1:]
text = 'extern "C" __global__ void k(int* out) { *out = %s; }'
options = kcache.CompileOptions(arch="sm_80", include_paths=["inc"])
with kcache.KernelCache(folder, remote=remote or None, relocation="eager") as cache:
    sources = [text % "1", text % "2", '#include <x.h>\\n' + text % "VALUE"]
    kernels = [cache.get_or_compile(each, options=options) for each in sources]
    if remote and not remote.startswith("file:"):
        assert cache._on_miss().remotes.client.flush(120)
    made = hashlib.sha256(b"".join(k.ptx + (k.cubin or b"") for k in kernels)).hexdigest()
    stats = cache.stats()
if bundle:
    with kcache.KernelCache(folder) as cache:
        kcache.export_bundle(cache, bundle)
print(json.dumps([os.geteuid(), stats.compiles, stats.hits, stats.errors, made]))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others can look into; a test's own is for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="kc-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


#: Commands that run as another user. The second one can also read root's files, since Python itself
#: may lie in root's home. Both have the same rights to write, and own the files that they make.
_IDS = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
_READS = [*_IDS, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


@pytest.fixture(scope="module")
def other() -> list[str]:
    """What runs a command as the other user, who can then start Python itself, as a service is."""
    code = "import subprocess, sys, kcache; subprocess.run([sys.executable, '-c', ''], check=True)"
    for become in (_IDS, _READS):
        command = [*become, sys.executable, "-c", code]
        try:
            subprocess.run(command, cwd="/", capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            continue
        return become
    pytest.skip("no other user can run this Python")


def run(
    home: Path, become: list[str], remote: str, bundle: str = ""
) -> tuple[int, int, int, int, str]:
    """Runs the program as a user with a home, a checkout and a cache of its own."""
    for folder in (home, home / "run", home / "checkout", home / "checkout/inc"):
        folder.mkdir(mode=0o700)
    (home / "checkout/inc/x.h").write_text("#define VALUE 7\n")
    for path in (home, *home.rglob("*")):
        os.chown(path, *(OTHER, OTHER) if become else (0, 0))
    found = subprocess.run(
        [*become, sys.executable, "-c", PROGRAM, str(home / "cache"), remote, bundle],
        cwd=home / "checkout",
        env={**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run")},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    told: Any = json.loads(found.stdout)
    return told[0], told[1], told[2], told[3], told[4]


@pytest.mark.parametrize("kind", ["redis", "http", "s3", "layer", "bundle"])
def test_another_user_compiles_nothing(
    kind: str, place: Path, other: list[str], request: pytest.FixtureRequest
) -> None:
    remote, bundle = "", ""
    if kind in ("redis", "http", "s3"):
        address = {"redis": of_redis, "http": of_http, "s3": of_s3}[kind](request)
        remote = f"{address.replace('?', '/users?')}&{PATIENT}".replace("?&", "?")
    elif kind == "bundle":
        bundle = str(place / "kernels.kcb")
    user, compiles, hits, errors, made = run(place / "a", [], remote, bundle)
    assert (user, compiles, hits, errors) == (0, 3, 0, 0)
    if kind == "layer":  # the maker of an image does this
        subprocess.run(["chmod", "-R", "a+rX", place / "a"], check=True)
        remote = f"file://{place}/a/cache"
    elif kind == "bundle":
        os.chmod(bundle, 0o644)
        remote = f"file://{bundle}"
    assert run(place / "b", other, remote) == (OTHER, 0, 3, 0, made)
