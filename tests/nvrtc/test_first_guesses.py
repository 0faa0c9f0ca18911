"""What one tries first: the one-line way in, arguments in each other's place, pickling, help."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest

import kcache

SOURCE = 'extern "C" __global__ void guess(int* out) { *out = 1; }'


@pytest.mark.usefixtures("nvrtc")
def test_one_line_compiles_and_then_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kcache.kernel_cache._shared", None)
    assert not kcache.compile(SOURCE, arch="sm_80").cached
    assert kcache.compile(SOURCE, arch="sm_80").cached
    file = tmp_path / "guess.cu"
    file.write_text("template <int N> __global__ void g(int* out) { *out = N; }")
    assert list(kcache.compile(file, "g<3>", arch="sm_80").lowered_names) == ["g<3>"]
    options = kcache.CompileOptions("sm_80")
    assert kcache.compile(SOURCE, options=options).cached
    assert kcache.compile(file, "g<3>", options).cached
    assert kcache.compile(file, "g<3>", kcache.CompileOptions("sm_90"), arch="sm_80").cached
    with pytest.raises(TypeError, match=r"'arhc' \(did you mean 'arch'\?\)"):
        kcache.compile(SOURCE, arhc="sm_80")


# No architecture and no GPU, perhaps no compiler: what is in the wrong place is told first.
@pytest.mark.parametrize("call", ["get_or_compile", "lookup", "why", "aget_or_compile"])
@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("x", {"arch": "sm_80"}, r"'arch' is an option; allowed: options=CompileOptions\("),
        ("x", {"optoins": 1}, r"unexpected argument 'optoins' \(did you mean 'options'\?\)"),
        ("x", {"names": kcache.CompileOptions()}, "names is a CompileOptions"),
        ("x", {"options": {"arch": "sm_80"}}, "options is dict; allowed: kcache.CompileOptions"),
        ("src/k.cu", {}, r"looks like a path; allowed: .* pathlib.Path\('src/k.cu'\)"),
    ],
)
def test_arguments_in_the_wrong_place(
    call: str, source: str, arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    def ask() -> None:
        result = getattr(cache, call)(source, **arguments)
        asyncio.run(result)  # only aget_or_compile comes here

    cache = kcache.KernelCache(tmp_path / "cache")
    with cache, pytest.raises((TypeError, kcache.ConfigError), match=message):
        ask()


def test_pickling_says_what_to_do_instead(tmp_path: Path) -> None:
    cache = kcache.KernelCache(tmp_path / "cache")
    with cache, pytest.raises(TypeError, match="open the same directory in the other process"):
        pickle.dumps(cache)


def test_async_with_closes(tmp_path: Path) -> None:
    async def use() -> kcache.KernelCache:
        async with kcache.KernelCache(tmp_path / "cache") as cache:
            return cache

    cache = asyncio.run(use())
    with pytest.raises(kcache.ConfigError, match="was closed"):
        cache.lookup(SOURCE)
