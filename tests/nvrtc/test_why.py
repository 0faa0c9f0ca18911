"""`KernelCache.why`: the reason for a miss, in the program itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

OPTIONS = kcache.CompileOptions(arch="sm_90")
SOURCE = '#include "scale.h"\n__global__ void k(float* x) { x[0] *= SCALE; }\n'


def test_each_answer_is_that_of_the_next_request(cache: kcache.KernelCache, tree: Path) -> None:
    def kinds() -> list[str]:
        before = cache.stats()
        told = cache.why(SOURCE, options=OPTIONS)
        assert cache.stats() == before, "an answer is not counted"
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
