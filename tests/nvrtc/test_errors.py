"""First steps and common mistakes: errors for wrong arguments, wrong names and a closed cache."""

import asyncio
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import kcache

ARCH = kcache.CompileOptions(arch="sm_90")
AXPY = "template <class T> __global__ void axpy(T a) {}"
SOURCE = 'extern "C" __global__ void guess(int* out) { *out = 1; }'
WRONG = "__global__ void f() { foo(); bar(); }"


@pytest.fixture
def cache(tmp_path: Path, nvrtc: object) -> kcache.KernelCache:
    return kcache.KernelCache(tmp_path / "cache")


def ask(cache: kcache.KernelCache) -> object:
    return cache.get_or_compile(WRONG, options=ARCH)


def aask(cache: kcache.KernelCache) -> object:
    return asyncio.run(cache.aget_or_compile(WRONG, options=ARCH))


@pytest.mark.parametrize("ask", [ask, aask])
def test_a_compile_error_has_few_internal_frames_and_the_first_error(
    cache: kcache.KernelCache, ask: Callable[[kcache.KernelCache], object]
) -> None:
    with cache, pytest.raises(kcache.CompileError) as caught:
        ask(cache)
    frames = traceback.extract_tb(caught.value.__traceback__)
    ours = Path(kcache.__file__).parent
    assert sum(Path(frame.filename).is_relative_to(ours) for frame in frames) <= 4
    assert "#" not in str(frames[-1].line)  # the last line that a traceback shows before the error
    said = str(caught.value)
    assert said.startswith('kernel.cu(1): error: identifier "foo" is undefined')
    assert said.splitlines()[1:] == caught.value.log.splitlines()
    assert '"bar"' in said


def test_a_compile_error_ends_with_at_most_40_lines_of_the_log(cache: kcache.KernelCache) -> None:
    source = "\n".join(f"__device__ int v{n} = w{n};" for n in range(30))
    with cache, pytest.raises(kcache.CompileError) as caught:
        cache.get_or_compile(source, options=ARCH)
    first, *shown, last = str(caught.value).splitlines()
    log = caught.value.log.splitlines()
    assert first == 'kernel.cu(1): error: identifier "w0" is undefined'
    assert (shown, len(shown)) == (log[:40], 40)
    assert last == f"... (the log has {len(log)} lines; all are in the attribute log)"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("axpy<flot>", 'identifier "flot" is undefined'),
        ("axpi<float>", 'identifier "axpi" is undefined'),
        ("axpy", "cannot determine which instance"),
    ],
)
def test_wrong_name_expressions(cache: kcache.KernelCache, name: str, what: str) -> None:
    with cache, pytest.raises(kcache.CompileError) as caught:
        cache.get_or_compile(AXPY, ["axpy<int>", name], ARCH)
    assert f"kernel.cu: the name expression {name!r} is wrong: {what}" in str(caught.value)


def test_an_unused_template(cache: kcache.KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    empty = AXPY.replace("axpy", "scale").replace("T>", "T, int N = sizeof(T)>")
    with cache:
        for _ in range(2):
            cache.get_or_compile(empty, options=ARCH)
            cache.clear()
        cache.get_or_compile(empty, "scale<int>", ARCH)
        cache.get_or_compile(f"{AXPY}; template __global__ void axpy(int);", options=ARCH)
        cache.get_or_compile(AXPY, options=ARCH.replace(lto=True))  # not searched for kernels
    (warned,) = (each.getMessage() for each in caplog.records)
    assert warned == (
        "kernel.cu was compiled without a kernel, because no name expression names an instance "
        "of its template scale; expected one such as scale<float>"
    )


def test_an_unknown_lowered_name_is_an_error_that_lists_the_known_ones(
    cache: kcache.KernelCache,
) -> None:
    with cache:
        for _ in range(2):  # first compiled, then from the cache
            names = cache.get_or_compile(AXPY, ["axpy<float>", "axpy<int>"], ARCH).lowered_names
            with pytest.raises(KeyError) as caught:
                names["axpy<flot>"]
            assert str(caught.value) == (
                "'axpy<flot>' is not a name expression of this kernel (did you mean 'axpy<float>'?); "
                "expected one of: 'axpy<float>', 'axpy<int>'"
            )
            assert names.get("axpy<flot>") is None
            assert "axpy<flot>" not in names


def test_an_unknown_argument_suggests_the_one_that_is_like_it(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'maxsize' \(did you mean 'max_size'\?\)"):
        kcache.KernelCache(tmp_path, maxsize=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'includepaths' \(did you mean 'include_paths'\?\)"):
        kcache.CompileOptions(includepaths=["x"])  # type: ignore[call-arg]
    with pytest.raises(kcache.ConfigError, match=r"'fastmath' \(did you mean 'fast_math'\?\)"):
        ARCH.replace(fastmath=True)
    with pytest.raises(TypeError, match="'colour'; expected one of arch, "):
        kcache.CompileOptions(colour="red")  # type: ignore[call-arg]


def test_a_closed_cache_raises(cache: kcache.KernelCache) -> None:
    cache.get_or_compile(AXPY, "axpy<int>", ARCH)
    cache.close()
    cache.close()
    calls: list[Callable[[], object]] = [
        lambda: cache.get_or_compile(AXPY, "axpy<int>", ARCH),
        lambda: cache.lookup(AXPY, "axpy<int>", ARCH),
        lambda: cache.why(AXPY, "axpy<int>", ARCH),
        lambda: cache.compile_many([(AXPY, "axpy<int>", ARCH)]),
        lambda: asyncio.run(cache.aget_or_compile(AXPY, "axpy<int>", ARCH)),
        cache.clear,
        cache.trim,
    ]
    for call in calls:
        with pytest.raises(kcache.ConfigError, match="this KernelCache was closed"):
            call()
    assert cache.stats().misses == 1
    assert "KernelCache(" in repr(cache)


# -- what one tries first --------------------------------------------------------------------------


@pytest.mark.usefixtures("nvrtc")
def test_one_line_compiles_and_then_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kcache.kernel_cache._shared", {})
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


# An argument in the wrong place is reported before a missing architecture, GPU or compiler.
@pytest.mark.parametrize("call", ["get_or_compile", "lookup", "why", "aget_or_compile"])
@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("x", {"arch": "sm_80"}, r"'arch' is an option; expected options=CompileOptions\("),
        ("x", {"optoins": 1}, r"unexpected argument 'optoins' \(did you mean 'options'\?\)"),
        ("src/k.cu", {}, r"looks like a path; expected .* pathlib.Path\('src/k.cu'\)"),
    ],
)
def test_arguments_in_the_wrong_place(
    call: str, source: str, arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    def ask() -> None:
        result = getattr(cache, call)(source, **arguments)
        asyncio.run(result)  # only aget_or_compile has not raised yet

    cache = kcache.KernelCache(tmp_path / "cache")
    with cache, pytest.raises((TypeError, kcache.ConfigError), match=message):
        ask()


def test_pickling_raises_with_a_hint(tmp_path: Path) -> None:
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
