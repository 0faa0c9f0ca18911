"""Request.key, hash_source, hash_options: requests have the same key only if they are equal."""

import hashlib
import pickle
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from core.helpers import output_of

import kcache
from kcache import CompileOptions, hash_options, hash_source
from kcache.nvrtc.request import Request, digest_fields

OPTIONS = CompileOptions(
    arch="sm_90", defines={"N": 1, "M": None}, include_paths=["a"], extra_options=["-arch=sm_80"]
)
GIVEN: dict[str, Any] = {
    "source": "__global__ void f() {}",
    "names": ("f<int>", "f<float>"),
    "options": OPTIONS,
    "headers": {"a.h": "1", "b.h": "2"},
    "extra_key": b"extra",
    "source_name": "k.cu",
    "compiler": "1f6e",
}

#: Another value for each part of a key.
OTHERS: dict[str, list[Any]] = {
    "source": ["__global__ void g() {}", "__global__ void f() {} "],
    "options": [
        OPTIONS.replace(extra_options=["-arch=sm_80a"]),
        OPTIONS.replace(extra_options=["-arch=compute_80"]),
        OPTIONS.replace(defines={"N": 1}),
        OPTIONS.replace(defines={"M": None, "N": 1}),
        OPTIONS.replace(include_paths=()),
        OPTIONS.replace(lto=True),
    ],
    "compiler": ["1f6f", ""],
    "names": [(), ("f<int>",), ("f<float>", "f<int>"), ("f<int>f<float>",), ("f<int>f", "<float>")],
    "headers": [{}, {"a.h": "1"}, {"a.h": "2", "b.h": "1"}, {"a.h": "1", "c.h": "2"}],
    "extra_key": [b"", b"extra\0", b"extr"],
}

IN_A_PROCESS = """
import kcache
from kcache.nvrtc.request import Request
options = kcache.CompileOptions(arch="sm_90", defines={"A": 1, "B": 2})
headers = {name: name for name in {"a.h", "b.h", "c.h", "d.h", "e.h"}}
made = Request.make("s", ("n", "m"), options, headers, b"x", source_name="k.cu", compiler="c")
print(made.key, kcache.hash_source("text"), kcache.hash_options(["-a", "-b"]),
      kcache.hash_options(options))
"""


def test_every_process_computes_the_same_digests() -> None:
    seeds = ("0", "1", "4242", "random")
    assert len({output_of(IN_A_PROCESS, environ={"PYTHONHASHSEED": s}) for s in seeds}) == 1


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_separates_keys(field: str) -> None:
    given = [GIVEN, *(GIVEN | {field: value} for value in OTHERS[field])]
    assert len({Request.make(**each).key for each in given}) == len(given)


def test_a_variable_is_not_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(*more: str) -> str:
        options = CompileOptions(arch="sm_90", extra_options=("--restrict", *more))
        return Request.make(**GIVEN | {"options": options}).key

    option = key("variable=NVVM_IR_VER_CHK=0")
    monkeypatch.setenv("NVVM_IR_VER_CHK", "0")
    assert key() != option


def test_the_digest_is_sha256_over_length_prefixed_fields() -> None:
    parts = ((b"label", b""), (b"name", b"value"), (b"", b"\0\xff"))
    image = b"".join(
        len(name).to_bytes(4, "little") + len(value).to_bytes(8, "little") + name + value
        for name, value in parts
    )
    found = digest_fields("label", [("name", b"value"), ("", b"\0\xff")])
    assert found == hashlib.sha256(image).hexdigest()


def test_options_are_order_sensitive_and_length_prefixed() -> None:
    lists = (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["ab", "c", ""], [])
    assert len({hash_options(options) for options in lists}) == len(lists)
    assert hash_options(["ab", "c"]) == hash_options(("ab", "c"))


def test_hash_options_takes_compile_options_for_their_flags() -> None:
    options = CompileOptions(arch="sm_90", fast_math=True)
    assert hash_options(options) == hash_options(options.flags())
    assert hash_options(options) != hash_options(options.replace(fast_math=False))


def test_hash_source_is_the_sha256_of_the_utf8_text() -> None:
    text = "// größer \u4e2d\r\n\0"
    assert hash_source(text) == hashlib.sha256(text.encode()).hexdigest()


# -- copies, and values from another process -------------------------------------------------------

COMPILED = kcache.CompiledKernel(
    b"ptx", None, None, MappingProxyType({"f<int>": "_Z1f"}), "log", "0" * 64, True, 0.5, ("a.h",)
)
VALUES = [
    OPTIONS,
    COMPILED,
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
    """Unpickled options don't keep the hash of the other process, where texts have other hashes."""
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
