"""Values: what a program hands to another process, or copies, arrives whole."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import MappingProxyType

import pytest
from core.helpers import output_of

import kcache

OPTIONS = kcache.CompileOptions(
    arch="sm_90", defines={"N": 1, "M": None}, include_paths=["a"], extra_options=["-arch=sm_80"]
)
KERNEL = kcache.CompiledKernel(
    b"ptx", None, None, MappingProxyType({"f<int>": "_Z1f"}), "log", "0" * 64, True, 0.5, ("a.h",)
)
VALUES = [
    OPTIONS,
    KERNEL,
    kcache.CompileRequest("source", ("f<int>",), OPTIONS, {"a.h": "text"}, b"extra"),
    kcache.Stats(hits=3, saved_seconds=1.5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_it_survives_a_pickle(value: object, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(value, protocol))
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)


def test_equal_options_from_another_process_have_equal_hashes(tmp_path: Path) -> None:
    """The hash of text is another in each process, and options remember theirs."""
    file = tmp_path / "options"
    file.write_bytes(pickle.dumps(OPTIONS))
    code = f"""
import pickle, kcache
there = pickle.load(open({str(file)!r}, "rb"))
here = kcache.CompileOptions(
    arch="sm_90", defines=["N=1", "M"], include_paths=["a"], extra_options=["-arch=sm_80"]
)
assert there == here
print(hash(there) == hash(here), len({{there, here}}), there.target)
"""
    assert output_of(code).split() == ["True", "1", "sm_80"]


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_cache_shows_where_it_is_and_how_full_it_is(tmp_path: Path, backend: str) -> None:
    with kcache.KernelCache(tmp_path, backend=backend, max_size="2MiB") as cache:
        before = cache.stats()
        where = f"KernelCache({str(tmp_path)!r}, backend={backend!r}, "
        assert repr(cache) == f"{where}entries=0, size='0 B of 2.0 MiB')"
        cache.engine.put("ab" * 32, kcache.Entry({"ptx": bytes(5000)}, {}))
        assert re.fullmatch(
            re.escape(where) + r"entries=1, size='\d\.\d KiB of 2\.0 MiB'\)", repr(cache)
        )
        assert cache.stats() == before._replace(puts=1)
    assert repr(cache).startswith(where)
