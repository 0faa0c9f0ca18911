"""`why`, and `on_miss="error"`: a miss is an error with the reason, and nothing is compiled."""

import asyncio
from pathlib import Path

import pytest

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

OPTIONS = kcache.CompileOptions(arch="sm_90")
SOURCE = '#include "scale.h"\n__global__ void k(float* x) { x[0] *= SCALE; }\n'


@pytest.fixture
def header(tree: Path) -> Path:
    """The header of `SOURCE`, in the working directory. The kernel is in the cache."""
    found = tree / "scale.h"
    found.write_text("#define SCALE 2\n")
    with kcache.KernelCache(tree / "cache") as cache:
        cache.get_or_compile(SOURCE, options=OPTIONS)
    return found


@pytest.fixture(params=["argument", "variable"])
def strict(
    request: pytest.FixtureRequest, header: Path, monkeypatch: pytest.MonkeyPatch
) -> kcache.KernelCache:
    """A cache that compiles nothing."""
    folder = header.parent / "cache"
    if request.param == "argument":
        return kcache.KernelCache(folder, on_miss="error")
    monkeypatch.setenv("KCACHE_ON_MISS", "error")
    return kcache.KernelCache(folder)


def test_the_error_has_the_reason_that_why_gives(strict: kcache.KernelCache, header: Path) -> None:
    with strict:
        assert strict.get_or_compile(SOURCE, options=OPTIONS).cached
        header.write_text("#define SCALE 3\n")
        reason = strict.why(SOURCE, options=OPTIONS).clauses
        with pytest.raises(kcache.MissError, match="^k is not in the cache, and ") as caught:
            strict.get_or_compile(SOURCE, options=OPTIONS)
        assert str(caught.value).endswith(f"=error allows no compile: {reason}")
        assert str(header) in reason
        assert isinstance(caught.value, kcache.CompileError)
        stats = strict.stats()
        assert (stats.hits, stats.misses, stats.compiles) == (1, 1, 0)
        header.write_text("#define SCALE 2\n")
        assert strict.get_or_compile(SOURCE, options=OPTIONS).cached


def test_every_way_to_ask(strict: kcache.KernelCache) -> None:
    other = kcache.CompileOptions(arch="sm_80")

    async def ask() -> object:
        return await strict.aget_or_compile(SOURCE, options=other)

    with strict:
        with pytest.raises(kcache.MissError, match="the target changed from sm_90 to sm_80"):
            asyncio.run(ask())
        there, missing = strict.compile_many([(SOURCE, (), OPTIONS), (SOURCE, (), other)])
        assert isinstance(there, kcache.CompiledKernel)
        assert isinstance(missing, kcache.MissError)
        assert strict.lookup(SOURCE, options=other) is None
        assert strict.stats().compiles == 0


def test_a_read_only_tier_answers(header: Path) -> None:
    layer = f"file://{header.parent / 'cache'}"
    with kcache.KernelCache(header.parent / "new", on_miss="error", remote=layer) as cache:
        assert cache.get_or_compile(SOURCE, options=OPTIONS).cached


@pytest.mark.parametrize("setting", ["disable", "recache"])
def test_a_cache_that_is_not_read_has_nothing(setting: str, header: Path) -> None:
    folder = header.parent / "cache"
    with (
        kcache.KernelCache(folder, on_miss="error", **{setting: True}) as cache,  # type: ignore[arg-type]
        pytest.raises(kcache.MissError, match=f"{setting} is set"),
    ):
        cache.get_or_compile(SOURCE, options=OPTIONS)


def test_each_answer_is_that_of_the_next_request(cache: kcache.KernelCache, tree: Path) -> None:
    def kinds() -> list[str]:
        before = cache.stats()
        told = cache.why(SOURCE, options=OPTIONS)
        assert cache.stats() == before, "a call of `why` was counted"
        assert told.hit is not bool(told.causes)
        assert str(told) == (
            f"It would be compiled: {told.clauses}." if told.causes else "It is in the cache."
        )
        assert cache.get_or_compile(SOURCE, options=OPTIONS).cached is told.hit
        return [cause.kind for cause in told.causes]

    (tree / "scale.h").write_text("#define SCALE 2\n")
    assert kinds() == ["never"]
    assert kinds() == []
    (tree / "scale.h").write_text("#define SCALE 3\n")
    assert kinds() == ["header_changed"]
    cache.clear()
    assert kinds() == ["cleared"]
    assert cache.why(SOURCE, options=OPTIONS.replace(arch="sm_80")).causes[0].kind == "arch"
