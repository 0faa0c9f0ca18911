"""A bundle as a layer: kernels are read from it where it is, by processes of any checkout."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from core.helpers import fork, wait
from nvrtc.reference import ARCH, KERNEL

import kcache
from kcache.errors import BundleError, ConfigError
from kcache.remote.signing import make_keys, write_keys

pytestmark = pytest.mark.usefixtures("nvrtc")
WITH_HEADER = '#include "scale.h"\n__global__ void scale(float* x) { *x *= SCALE; }\n'


def checkout(folder: Path) -> kcache.CompileOptions:
    """Makes a checkout; returns the options that compile in it."""
    folder.mkdir()
    (folder / "scale.h").write_text("#define SCALE 2\n")
    return kcache.CompileOptions(arch="sm_90", include_paths=[folder])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of two kernels that are proven to be good in any checkout."""
    path = tmp_path / "kernels.kcb"
    with kcache.KernelCache(tmp_path / "maker", relocation="eager") as cache:
        cache.get_or_compile(KERNEL.replace("V", "1"), options=ARCH)
        cache.get_or_compile(WITH_HEADER, options=checkout(tmp_path / "one"))
    with kcache.KernelCache(tmp_path / "maker") as cache:
        kcache.export_bundle(cache, path)
    return path


def test_another_checkout_compiles_nothing_and_nothing_is_written(
    tmp_path: Path, bundle: Path
) -> None:
    options = checkout(tmp_path / "two")
    before = bundle.stat()
    with kcache.KernelCache(tmp_path / "maker") as cache:
        made = cache.get_or_compile(WITH_HEADER, options=options)
    with kcache.KernelCache(tmp_path / "own", remote=f"file://{bundle}") as cache:
        kernel = cache.get_or_compile(WITH_HEADER, options=options)
        assert (kernel.cubin, kernel.ptx) == (made.cubin, made.ptx)
        assert kernel.cached
        cache.get_or_compile(KERNEL.replace("V", "1"), options=ARCH)
        stats = cache.stats()
        assert (stats.layer_hits, stats.misses, stats.compiles) == (2, 0, 0)
        assert cache.entry_count == 0

        def child() -> None:
            cache.clear_memory()
            assert cache.get_or_compile(WITH_HEADER, options=options).cached

        assert wait(fork(child)) == 0
    after = bundle.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_a_damaged_bundle_costs_a_compile_and_is_told_of(
    tmp_path: Path, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(bundle.read_bytes())
    for at in range(100, len(data) - 300, 50):
        data[at] ^= 1
    bundle.write_bytes(data)
    with (
        caplog.at_level(logging.WARNING, "kcache"),
        kcache.KernelCache(tmp_path / "own", remote=f"file://{bundle}") as cache,
    ):
        kernel = cache.get_or_compile(KERNEL.replace("V", "1"), options=ARCH)
        assert not kernel.cached
        assert cache.stats().corrupt + cache.stats().errors > 0
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "how", ["empty", "cut in a value", "cut in the middle", "another", "longer"]
)
def test_a_bundle_that_is_written_over_while_it_is_open(
    tmp_path: Path, bundle: Path, how: str
) -> None:
    """Into the same file, which nobody should do: what comes of it is right, or compiled."""
    with kcache.KernelCache(tmp_path / "more") as cache:
        for value in range(2, 6):
            cache.get_or_compile(KERNEL.replace("V", str(value)), options=ARCH)
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
        for value in range(1, 6):
            kernel = cache.get_or_compile(KERNEL.replace("V", str(value)), options=ARCH)
            assert f", {value};".encode() in (kernel.ptx or b"")
        scaled = cache.get_or_compile(WITH_HEADER, options=options)
        with kcache.KernelCache(tmp_path / "alone") as alone:
            assert alone.get_or_compile(WITH_HEADER, options=options).ptx == scaled.ptx
        assert cache.stats().compiles > 0


def test_what_is_no_bundle_is_refused(tmp_path: Path, bundle: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader")
    with pytest.raises(ConfigError, match="no bundle"):
        kcache.KernelCache(tmp_path / "own", remote=f"file://{letter}").lookup(
            KERNEL.replace("V", "1"), options=ARCH
        )
    bundle.chmod(0o666)
    with pytest.raises(ConfigError, match="others can write"):
        kcache.KernelCache(tmp_path / "own", remote=f"file://{bundle}").lookup(
            KERNEL.replace("V", "1"), options=ARCH
        )


def test_with_a_key_only_signed_bundles_are_used(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ours", "theirs"):
        write_keys(str(tmp_path / name), make_keys()[0])
    monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / "ours"))
    signed = tmp_path / "signed.kcb"
    with kcache.KernelCache(tmp_path / "maker") as cache:
        kcache.export_bundle(cache, signed)
    source = KERNEL.replace("V", "1")
    with kcache.KernelCache(tmp_path / "a", remote=f"file://{signed}") as cache:
        assert cache.get_or_compile(source, options=ARCH).cached
    with kcache.KernelCache(tmp_path / "b", remote=f"file://{bundle}") as cache:
        assert not cache.get_or_compile(source, options=ARCH).cached
    monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / "theirs"))
    with kcache.KernelCache(tmp_path / "c", remote=f"file://{signed}") as cache:
        assert not cache.get_or_compile(source, options=ARCH).cached
        assert cache.stats().errors
    with pytest.raises(BundleError):
        kcache.verify_bundle(signed)
