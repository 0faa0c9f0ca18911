"""Layers: read-only directories below the cache, of any backend and owner. A hit writes nothing."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from core.helpers import as_root, in_child, run, snapshot
from nvrtc.reference import ARCH, KERNEL, write
from remote.fakes import until
from remote.machines import source

import kcache
from kcache.errors import ConfigError
from kcache.remote.signing import make_keys, write_keys
from kcache.util import path_safety

BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")
pytestmark = pytest.mark.usefixtures("nvrtc")


def fill(folder: Path, *values: int, backend: str = "file") -> list[kcache.CompiledKernel]:
    with kcache.KernelCache(folder, backend=backend) as cache:
        return [cache.get_or_compile(source(n), options=ARCH) for n in values or (1,)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_in_a_layer_writes_nothing(tmp_path: Path, backend: str) -> None:
    (made,) = fill(tmp_path / "layer", backend=backend)
    before = snapshot(tmp_path / "layer")
    layer = f"file://{tmp_path}/layer?ro"
    with kcache.KernelCache(tmp_path / "own", remote=layer) as cache:
        assert cache.why(source(), options=ARCH).hit
        for _ in range(3):
            kernel = cache.get_or_compile(source(), options=ARCH)
            assert kernel == made._replace(cached=True)
        stats = cache.stats()
        assert (stats.hits, stats.layer_hits, stats.misses, stats.compiles) == (3, 1, 0, 0)
        assert cache.lookup(source(), options=ARCH) is not None
        assert cache.entry_count == 0
    locks = {path for path in before if "lock" in path}  # LMDB's table of readers
    after = snapshot(tmp_path / "layer")
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


def test_found_kernels_are_stored_if_configured(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_read_only_tier_is_replaced_while_in_use(tmp_path: Path, backend: str) -> None:
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
        # The `lmdb` backend checks only from time to time whether its database was replaced.
        until(lambda: cache.lookup(source(3), options=ARCH) is not None)
        assert ask(4)
        ask(1)
        ask(2)
        assert cache.stats().errors == 0
    with kcache.KernelCache(own, remote=()) as cache:  # the compiled kernel is in the cache
        assert cache.lookup(source(5), options=ARCH) is not None
        assert cache.lookup(source(3), options=ARCH) is None


@pytest.mark.parametrize("problem", ["missing", "file", "empty", "writable", "exchangeable"])
def test_an_unsafe_read_only_tier_is_refused(
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


@as_root
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_another_users_directory_and_a_read_only_mount(tmp_path: Path, backend: str) -> None:
    """A layer may belong to another user, and be in a read-only file system."""
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
    done = run(*arguments)
    assert done.stdout.split() == ["True", "1", "0"], done.stderr
    mounted = (
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/x" 2>/dev/null '
        '&& exec "$@"'
    )
    unshared = ["unshare", "-m", "sh", "-c", mounted, layer]
    trial = run(*unshared, "true")
    if trial.returncode:
        pytest.skip(f"no directory can be mounted here: {trial.stderr.strip()[:100]}")
    done = run(*unshared, *arguments)
    assert done.stdout.split() == ["True", "1", "0"], done.stderr


def test_directories_need_no_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of a directory need no signatures, but only safe directories are accepted."""
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


@as_root
def test_entries_of_a_third_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_safety, "trusted", path_safety.trusted)
    path_safety.trusted.discard(12346)
    (made,) = fill(tmp_path / "layer")
    (path,) = (tmp_path / "layer").rglob(made.key)
    os.chown(path, 12346, 12346)
    with kcache.KernelCache(tmp_path / "own", remote=f"file://{tmp_path}/layer") as cache:
        assert cache.lookup(source(), options=ARCH) is None
        assert cache.stats().corrupt == 1
    # The cache's own directory still has to belong to the user.
    path_safety.trusted.add(12346)
    try:
        os.chown(tmp_path / "layer", 12346, 12346)
        with pytest.raises(ConfigError, match="12346"):
            kcache.KernelCache(tmp_path / "layer")
    finally:
        path_safety.trusted.discard(12346)


# -- a bundle as a layer ---------------------------------------------------------------------------

WITH_HEADER = '#include "scale.h"\n__global__ void scale(float* x) { *x *= SCALE; }\n'


def checkout(folder: Path) -> kcache.CompileOptions:
    """Create a checkout; return the options for compiles in it."""
    folder.mkdir()
    (folder / "scale.h").write_text("#define SCALE 2\n")
    return kcache.CompileOptions(arch="sm_90", include_paths=[folder])


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache and a bundle of its two kernels."""
    folder = tmp_path_factory.mktemp("makers")
    with kcache.KernelCache(folder / "maker") as cache:
        cache.get_or_compile(source(), options=ARCH)
        cache.get_or_compile(WITH_HEADER, options=checkout(folder / "one"))
    with kcache.KernelCache(folder / "maker") as cache:
        kcache.export_bundle(cache, folder / "kernels.kcb")
    return folder


@pytest.fixture
def bundle(makers: Path, tmp_path: Path) -> Path:
    """A bundle of two kernels. The cache from which it was exported is beside it."""
    shutil.copytree(makers, tmp_path, dirs_exist_ok=True)
    return tmp_path / "kernels.kcb"


def test_a_bundle_serves_another_checkout(tmp_path: Path, bundle: Path) -> None:
    options = checkout(tmp_path / "two")
    before = bundle.stat()
    with kcache.KernelCache(tmp_path / "maker") as cache:
        made = cache.get_or_compile(WITH_HEADER, options=options)
    # Two slashes at the beginning of a path are equivalent to one.
    with kcache.KernelCache(tmp_path / "own", remote=f"file:///{bundle}") as cache:
        kernel = cache.get_or_compile(WITH_HEADER, options=options)
        assert (kernel.cubin, kernel.ptx) == (made.cubin, made.ptx)
        assert kernel.cached
        cache.get_or_compile(source(), options=ARCH)
        stats = cache.stats()
        assert (stats.layer_hits, stats.misses, stats.compiles) == (2, 0, 0)
        assert cache.entry_count == 0

        def child() -> None:
            cache.clear_memory()
            assert cache.get_or_compile(WITH_HEADER, options=options).cached

        in_child(child)
    after = bundle.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


@pytest.mark.parametrize(
    "how", ["empty", "cut in a value", "cut in the middle", "another", "longer"]
)
def test_a_bundle_that_is_overwritten(tmp_path: Path, bundle: Path, how: str) -> None:
    """If a bundle is overwritten while it is in use, kernels are right, or compiled again."""
    fill(tmp_path / "more", 2, 3)
    with kcache.KernelCache(tmp_path / "more") as cache:
        kcache.export_bundle(cache, tmp_path / "another.kcb")
    layer = f"file://{bundle}"
    with kcache.KernelCache(tmp_path / "own", remote=layer, memory_size=0) as cache:
        options = checkout(tmp_path / "two")
        assert cache.lookup(WITH_HEADER, options=options) is not None
        content = bundle.read_bytes()
        changed = {
            "empty": b"",
            "cut in a value": content[:500],
            "cut in the middle": content[: len(content) // 8192 * 4096],
            "another": (tmp_path / "another.kcb").read_bytes(),
            "longer": content[:100] + bytes(5000) + content[100:],
        }[how]
        bundle.write_bytes(changed)
        for value in range(1, 5):
            kernel = cache.get_or_compile(source(value), options=ARCH)
            assert f", {value};".encode() in (kernel.ptx or b"")
        scaled = cache.get_or_compile(WITH_HEADER, options=options)
        with kcache.KernelCache(tmp_path / "alone") as alone:
            assert alone.get_or_compile(WITH_HEADER, options=options).ptx == scaled.ptx
        assert cache.stats().compiles > 0


def test_an_invalid_bundle_is_refused(tmp_path: Path, bundle: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader")
    bundle.chmod(0o666)
    for path, why in ((letter, "expected a bundle"), (bundle, "others can write")):
        with pytest.raises(ConfigError, match=why):
            kcache.KernelCache(tmp_path / "own", remote=f"file://{path}").lookup(source())
