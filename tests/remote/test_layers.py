"""Layers: read-only directories below the cache, of any backend and owner; a hit writes nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, working_directory, write
from remote.fakes import until

import kcache
from kcache.errors import BackendError, ConfigError, CorruptEntryError
from kcache.remote.layer import DirectoryLayer
from kcache.remote.signing import make_keys, write_keys
from kcache.util import open_file

BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")
pytestmark = pytest.mark.usefixtures("nvrtc")


def source(value: int = 1) -> str:
    return KERNEL.replace("V", str(value))


def fill(folder: Path, *values: int, backend: str = "file") -> list[kcache.CompiledKernel]:
    with kcache.KernelCache(folder, backend=backend) as cache:
        return [cache.get_or_compile(source(n), options=ARCH) for n in values or (1,)]


def tree_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a folder, as a write would change it."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_in_a_layer_writes_nothing(tmp_path: Path, backend: str) -> None:
    (made,) = fill(tmp_path / "layer", backend=backend)
    before = tree_of(tmp_path / "layer")
    layer = f"file://{tmp_path}/layer?ro"
    with kcache.KernelCache(tmp_path / "own", remote=layer) as cache:
        for _ in range(3):
            kernel = cache.get_or_compile(source(), options=ARCH)
            assert kernel == made._replace(cached=True)
        stats = cache.stats()
        assert (stats.hits, stats.layer_hits, stats.misses, stats.compiles) == (3, 1, 0, 0)
        assert cache.lookup(source(), options=ARCH) is not None
        assert cache.entry_count == 0
    locks = {path for path in before if "lock" in path}  # LMDB's table of readers
    after = tree_of(tmp_path / "layer")
    assert {p: s for p, s in after.items() if p not in locks} == {
        p: s for p, s in before.items() if p not in locks
    }


def test_layers_are_asked_in_order_below_the_cache(tmp_path: Path) -> None:
    fill(tmp_path / "first", 1)
    fill(tmp_path / "second", 1, 2, backend="zstd")
    fill(tmp_path / "own", 3)
    layers = [f"file://{tmp_path}/first", f"file://{tmp_path}/second?ro"]
    with kcache.KernelCache(tmp_path / "own", remote=layers) as cache:
        for value, compiles in ((1, 0), (2, 0), (3, 0), (4, 1), (4, 1)):
            cache.get_or_compile(source(value), options=ARCH)
            assert cache.stats().compiles == compiles
        assert cache.stats().layer_hits == 2
        assert cache.entry_count == 2


def test_headers_are_checked_in_a_layer_too(tmp_path: Path) -> None:
    write(tmp_path / "tree/inc/x.h", "#define V 1\n")
    text = "#include <x.h>\n" + KERNEL
    options = ARCH.replace(include_paths=["inc"])
    layer = f"file://{tmp_path}/layer"
    with working_directory(tmp_path / "tree"):
        with kcache.KernelCache(tmp_path / "layer") as cache:
            one = cache.get_or_compile(text, options=options)
        with kcache.KernelCache(tmp_path / "own", remote=layer) as cache:
            for _ in range(2):
                assert cache.get_or_compile(text, options=options) == one._replace(cached=True)
            write(tmp_path / "tree/inc/x.h", "#define V 2\n")
            two = cache.get_or_compile(text, options=options)
            assert not two.cached
            assert two.cubin != one.cubin
            write(tmp_path / "tree/inc/x.h", "#define V 1\n")
            assert cache.get_or_compile(text, options=options).cubin == one.cubin
            assert cache.stats().compiles == 1


def test_what_is_found_is_kept_if_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "inc/x.h", "#define V 1\n")
    text = "#include <x.h>\n" + KERNEL
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    with kcache.KernelCache(tmp_path / "layer") as cache:
        cache.get_or_compile(text, options=options)
    with kcache.KernelCache(tmp_path / "own", remote=f"file://{tmp_path}/layer?keep=1") as cache:
        assert cache.get_or_compile(text, options=options).cached
        assert cache.entry_count == 2
    with kcache.KernelCache(tmp_path / "own") as cache:
        assert cache.get_or_compile(text, options=options).cached


def test_a_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    (made,) = fill(tmp_path / "layer")
    (path,) = (tmp_path / "layer").rglob(made.key)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    layer = f"file://{tmp_path}/layer"
    with kcache.KernelCache(tmp_path / "own", remote=layer) as cache:
        kernel = cache.get_or_compile(source(), options=ARCH)
        assert not kernel.cached
        assert kernel.cubin == made.cubin
        assert cache.stats().corrupt == 1
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("error", [MemoryError, OSError, BackendError, CorruptEntryError])
@pytest.mark.parametrize("header", ["", "#include <x.h>\n"])
def test_what_fails_in_a_layer_costs_a_compile(
    tmp_path: Path, error: type[Exception], header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one below it is asked all the same."""
    write(tmp_path / "inc/x.h", "")
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    fill(tmp_path / "first")
    with kcache.KernelCache(tmp_path / "second") as cache:
        made = cache.get_or_compile(header + source(1), options=options)
    layers = [f"file://{tmp_path}/{name}" for name in ("first", "second")]
    get = DirectoryLayer.get

    def fail(self: DirectoryLayer, key: str) -> bytes | None:
        if self.path.endswith("first"):
            raise error("out of order")
        return get(self, key)

    monkeypatch.setattr(DirectoryLayer, "get", fail)
    with kcache.KernelCache(tmp_path / "own", remote=layers) as cache:
        found = cache.get_or_compile(header + source(1), options=options)
        assert found == made._replace(cached=True)
        assert not cache.get_or_compile(header + source(2), options=options).cached
        stats = cache.stats()
        assert stats.corrupt + stats.errors > 1


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "socket", "nothing", "sparse"])
def test_what_is_no_entry_in_the_place_of_one(tmp_path: Path, what: str) -> None:
    (made,) = fill(tmp_path / "layer")
    (path,) = (tmp_path / "layer").rglob(made.key)
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/dev/zero")
    elif what == "socket":
        with working_directory(path.parent), socket.socket(socket.AF_UNIX) as listener:
            listener.bind("s")
            os.rename("s", path)
    else:
        path.touch()
        os.truncate(path, 0 if what == "nothing" else 1 << 40)
    with kcache.KernelCache(tmp_path / "own", remote=f"file://{tmp_path}/layer") as cache:
        kernel = cache.get_or_compile(source(), options=ARCH)
        assert not kernel.cached
        assert (kernel.key, kernel.cubin) == (made.key, made.cubin)
        stats = cache.stats()
        assert stats.corrupt + stats.errors > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_exchanged_meanwhile(tmp_path: Path, backend: str) -> None:
    fill(tmp_path / "layer", 1, 2, backend=backend)
    fill(tmp_path / "other", 3, 4, backend=backend)
    own, layer = tmp_path / "own", f"file://{tmp_path}/layer"
    with kcache.KernelCache(own, remote=layer, memory_size=0) as cache:

        def ask(value: int) -> bool:
            kernel = cache.get_or_compile(source(value), options=ARCH)
            assert f", {value};".encode() in (kernel.ptx or b"")
            return kernel.cached

        assert ask(1)
        (tmp_path / "layer").rename(tmp_path / "away")
        ask(5)
        (tmp_path / "other").rename(tmp_path / "layer")
        # LMDB looks once in a while whether its database is still the one at its place.
        until(lambda: cache.lookup(source(3), options=ARCH) is not None)
        assert ask(4)
        ask(1)
        ask(2)
        assert cache.stats().errors == 0
    with kcache.KernelCache(own, remote=()) as cache:  # the compiled kernel is there
        assert cache.lookup(source(5), options=ARCH) is not None
        assert cache.lookup(source(3), options=ARCH) is None


@pytest.mark.parametrize("problem", ["missing", "file", "empty", "writable", "exchangeable"])
def test_what_is_no_safe_layer(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = tmp_path / "above" / "layer"
    fill(layer)
    if problem == "missing":
        layer = tmp_path / "nothing"
    elif problem == "file":
        layer = layer / "kcache.json"
    elif problem == "empty":
        layer = tmp_path / "empty"
        layer.mkdir()
    elif problem == "writable":
        layer.chmod(0o777)
    else:
        layer = layer.parent.rename(tmp_path / "unsafe") / "layer"
        layer.parent.chmod(0o777)
    if problem == "missing":
        with kcache.KernelCache(tmp_path / "own", remote=f"file://{layer}") as cache:
            assert cache.lookup(source(), options=ARCH) is None
    else:
        with pytest.raises(ConfigError, match="layer"):
            kcache.KernelCache(tmp_path / "own", remote=f"file://{layer}")
    monkeypatch.setenv("KCACHE_REMOTE", f"file://{layer}")
    caplog.clear()
    with kcache.KernelCache(tmp_path / "own2") as cache:
        assert cache.lookup(source(), options=ARCH) is None
        assert not cache.get_or_compile(source(), options=ARCH).cached
    assert str(layer) in caplog.text or problem == "missing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_users_directory_and_a_read_only_mount(tmp_path: Path, backend: str) -> None:
    """Layers that belong to somebody else, in a directory that not even root can write to."""
    fill(tmp_path / "layer", backend=backend)
    for path in [tmp_path / "layer", *(tmp_path / "layer").rglob("*")]:
        os.chown(path, 12345, 12345)
    code = (
        "import sys, kcache\n"
        "with kcache.KernelCache(sys.argv[1], remote='file://' + sys.argv[2]) as cache:\n"
        "    kernel = cache.lookup(sys.argv[3], options=kcache.CompileOptions(arch='sm_80'))\n"
        "    print(kernel is not None, cache.stats().layer_hits, cache.stats().errors)\n"
    )
    layer = str(tmp_path / "layer")
    arguments = [sys.executable, "-c", code, str(tmp_path / "own"), layer, source()]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.split() == ["True", "1", "0"], run.stderr
    mounted = (
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/x" 2>/dev/null '
        '&& exec "$@"'
    )
    unshared = ["unshare", "-m", "sh", "-c", mounted, layer]
    run = subprocess.run(
        [*unshared, "true"], capture_output=True, text=True, check=False, timeout=60
    )
    if run.returncode:
        pytest.skip(f"nothing can be mounted here: {run.stderr.strip()[:100]}")
    run = subprocess.run(
        [*unshared, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.stdout.split() == ["True", "1", "0"], run.stderr


def test_a_directory_is_trusted_for_its_owner_with_a_signing_key_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files carry no signatures; who may write to it decides, as for the cache itself."""
    fill(tmp_path / "layer")
    pytest.importorskip("cryptography", reason="cryptography is missing")
    write_keys(str(tmp_path / "key"), make_keys()[0])
    monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / "key"))
    layer = f"file://{tmp_path}/layer"
    with kcache.KernelCache(tmp_path / "own", remote=layer) as cache:
        assert cache.get_or_compile(source(), options=ARCH).cached
        assert cache.stats().layer_hits == 1
    (tmp_path / "layer").chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to it"):
        kcache.KernelCache(tmp_path / "own", remote=layer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_only_the_owner_of_a_layer_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_file, "trusted", open_file.trusted)
    open_file.trusted.discard(12346)
    (made,) = fill(tmp_path / "layer")
    (path,) = (tmp_path / "layer").rglob(made.key)
    os.chown(path, 12346, 12346)
    with kcache.KernelCache(tmp_path / "own", remote=f"file://{tmp_path}/layer") as cache:
        assert cache.lookup(source(), options=ARCH) is None
        assert cache.stats().corrupt == 1
    # And the cache's own directory still has to be the user's.
    open_file.trusted.add(12346)
    try:
        os.chown(tmp_path / "layer", 12346, 12346)
        with pytest.raises(ConfigError, match="12346"):
            kcache.KernelCache(tmp_path / "layer")
    finally:
        open_file.trusted.discard(12346)
