"""`KernelCache.why`: the reason for a miss, in the program itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

SOURCE = '#include "scale.h"\n__global__ void k(float* x) { x[0] *= SCALE; }\n'


def test_each_answer_is_that_of_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    header = tmp_path / "scale.h"
    header.write_text("#define SCALE 2\n")
    options = kcache.CompileOptions(arch="sm_90")
    with kcache.KernelCache(tmp_path / "cache") as cache:

        def kinds() -> list[str]:
            before = cache.stats()
            told = cache.why(SOURCE, options=options)
            assert cache.stats() == before, "an answer is not counted"
            assert told.hit is not bool(told.causes)
            assert cache.get_or_compile(SOURCE, options=options).cached is told.hit
            return [cause.kind for cause in told.causes]

        assert kinds() == ["never"]
        assert kinds() == []
        header.write_text("#define SCALE 3\n")
        assert kinds() == ["header_changed"]
        cache.clear()
        assert kinds() == ["cleared"]
        assert cache.why(SOURCE, options=options.replace(arch="sm_80")).causes[0].kind == "arch"


def test_it_says_that_the_cache_is_not_looked_into(tmp_path: Path) -> None:
    options = kcache.CompileOptions(arch="sm_90")
    source = "__global__ void k() {}"
    with kcache.KernelCache(tmp_path, recache=True) as cache:
        cache.get_or_compile(source, options=options)
        (cause,) = cache.why(source, options=options).causes
    assert cause.kind == "recache"
    assert "recache is set" in cause.what


def test_a_question_is_not_recorded(tmp_path: Path) -> None:
    options = kcache.CompileOptions(arch="sm_90")
    recording = tmp_path / "list.jsonl"
    with kcache.KernelCache(tmp_path / "cache") as cache, cache.record(recording):
        cache.why("__global__ void k() {}", options=options)
    assert not recording.exists() or not recording.read_text()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with kcache.KernelCache(tmp_path) as cache, pytest.raises(kcache.ConfigError, match="source"):
        cache.why("", options=kcache.CompileOptions(arch="sm_90"))
