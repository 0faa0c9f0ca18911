"""Records: what a program hands to another process, or copies, arrives whole."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

import kcache

OPTIONS = kcache.CompileOptions(
    arch="sm_90", defines={"N": 1, "M": None}, include_paths=["a"], extra_options=["-arch=sm_80"]
)
KERNEL = kcache.CompiledKernel(
    b"ptx", None, None, MappingProxyType({"f<int>": "_Z1f"}), "log", "0" * 64, True, 0.5, ("a.h",)
)
RECORDS = [
    OPTIONS,
    KERNEL,
    kcache.CompileRequest("source", ("f<int>",), OPTIONS, {"a.h": "text"}, b"extra"),
    kcache.Stats(hits=3, saved_seconds=1.5),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_it_survives_a_pickle(record: object, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(record, protocol))
    assert again == record
    assert type(again) is type(record)
    assert repr(again) == repr(record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_it_can_be_copied(record: object) -> None:
    assert copy.copy(record) == record
    assert copy.deepcopy(record) == record


def test_names_stay_read_only() -> None:
    again = pickle.loads(pickle.dumps(KERNEL))
    with pytest.raises(TypeError):
        again.lowered_names["g"] = "_Z1g"


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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "1", "sm_90"]
