"""Integrations: measures the adapters beside the frameworks' own caches, and `--pch` in processes.

    python bench/integrations.py [--json] [--entries N] [--groups N] [program|triton|pch ...]

The times are medians of rounds in which both sides take turns; `ratio` is kcache's time to the
other's. `program` needs cuda-core, `triton` needs triton, `pch` NVRTC and the CCCL headers. No GPU.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS = 40
PAYLOAD = 100 << 10
FILES = ("k.source", "k.ttir", "k.ttgir", "k.llir", "k.ptx", "k.cubin", "k.json")
#: A kernel as DeepGEMM compiles it: one large header family, and precompiled headers if there are.
PROGRAM = """
import ctypes as c, sys, time
library, source, *options = sys.argv[1:]
nvrtc, program = c.CDLL(library), c.c_void_p()
text = open(source, "rb").read()
start = time.perf_counter()
nvrtc.nvrtcCreateProgram(c.byref(program), text, b"k.cu", 0, None, None)
nvrtc.nvrtcAddNameExpression(program, b"block_sum<float, 256, 4>")
given = (c.c_char_p * len(options))(*map(str.encode, options))
assert nvrtc.nvrtcCompileProgram(program, len(options), given) == 0
size = c.c_size_t()
nvrtc.nvrtcGetCUBINSize(program, c.byref(size))
print(time.perf_counter() - start, size.value)
"""


def in_turns(ours: Callable[[int], object], theirs: Callable[[int], object], rounds: int) -> dict:
    """Return the medians in microseconds, and their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for call, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call(number)
            taken.append(time.perf_counter() - start)
    one, other = (statistics.median(taken) * 1e6 for taken in times)
    return {"kcache_us": one, "other_us": other, "ratio": one / other}


def program(place: Path, entries: int, _groups: int) -> dict[str, dict]:
    """Hits and puts at the cap, beside cuda.core's FileStreamProgramCache."""
    from cuda.core.utils import FileStreamProgramCache

    from kcache.integrations.cuda_core import ProgramCache

    data, small = os.urandom(PAYLOAD), os.urandom(1000)
    found = {}
    for name, memory in (("a hit, memory tier", ""), ("a hit from the file, checksummed", "0")):
        os.environ["KCACHE_MEMORY_SIZE"] = memory
        ours, theirs = (
            ProgramCache(place / f"ours{memory}"),
            FileStreamProgramCache(place / "theirs"),
        )
        for number in range(64):
            ours[str(number)] = theirs[str(number)] = data
        gets = (lambda n, cache=cache: cache.get(str(n % 64)) for cache in (ours, theirs))
        found[name] = in_turns(*gets, rounds=100 * ROUNDS)
    full = ProgramCache(place / "full", max_size_bytes=entries * 1300)
    other = FileStreamProgramCache(place / "full-theirs", max_size_bytes=entries * 1000)
    for number in range(entries + 200):
        full[f"filled {number}"] = small
    for number in range(entries):
        other[f"filled {number}"] = small
    puts = (lambda n, cache=cache: cache.__setitem__(f"new {n}", small) for cache in (full, other))
    found[f"a put at the cap among {entries:,} entries"] = in_turns(*puts, rounds=ROUNDS)
    return found


def triton(place: Path, _entries: int, groups: int) -> dict[str, dict]:
    """Triton's `get_group` on a hit, and a group put among many at the cap."""
    from triton.runtime.cache import FileCacheManager

    from kcache.integrations import local_files
    from kcache.integrations import triton as adapter

    contents = {name: os.urandom(PAYLOAD // 20) for name in FILES}

    def manager(folder: str, kind: type, key: str) -> FileCacheManager:
        os.environ["TRITON_CACHE_DIR"] = str(place / folder)
        return kind(key)

    def put(folder: str, kind: type, key: str) -> None:
        made = manager(folder, kind, key)
        group = {name: made.put(data, name) for name, data in contents.items()}
        made.put_group("k.json", group)

    os.environ["KCACHE_DIR"] = str(place / "kcache")
    sides = {"local": adapter.CacheManager, "theirs": FileCacheManager}
    for folder in (*sides, "full", "empty"):
        (place / folder).mkdir()
    for number in range(64):
        for folder, kind in sides.items():
            put(folder, kind, f"K{number}")
    ours, theirs = (
        lambda n, side=side: manager(*side, f"K{n % 64}").get_group("k.json")
        for side in sides.items()
    )
    found = {"get_group on a hit": in_turns(ours, theirs, rounds=10 * ROUNDS)}
    local_files.GRACE = 0.0  # as if all groups were used long ago
    caches, size = {}, groups * sum(map(len, contents.values()))
    for folder in ("full", "empty"):
        os.environ |= {"KCACHE_DIR": str(place / f"of {folder}"), "KCACHE_MAX_SIZE": str(size)}
        caches[folder] = adapter._Shared()

    def put_there(folder: str, key: str) -> None:
        adapter._open = lambda: caches[folder]
        put(folder, adapter.CacheManager, key)

    for number in range(groups):
        put_there("full", f"K{number}")
    sides = [lambda n, side=side: put_there(side, f"N{n}") for side in caches]
    found[f"a group at the cap among {groups:,}, beside an empty cache"] = in_turns(*sides, ROUNDS)
    return found


def pch(place: Path, _entries: int, _groups: int) -> dict[str, dict]:
    """A second process that compiles with `--pch`: by kcache, and with a warm `--pch-dir`."""
    from harness import corpus

    from kcache.nvrtc import library

    path = library.find()
    case = corpus.load("cub_reduce")
    (place / "pre").mkdir()
    options = [f"-arch={case.arch}", f"-std={case.std}", "--pch", f"--pch-dir={place / 'pre'}"]
    options += [f"-I{folder}" for folder in case.include_dirs]
    source = str(corpus.KERNELS / "cub_reduce.cu")
    bare = [sys.executable, "-c", PROGRAM, str(path and path.path), source, *options]
    under = [sys.executable, "-m", "kcache", "run", "--", *bare]
    environment = {**os.environ, "KCACHE_DIR": str(place / "cache")}

    def seconds(command: list[str]) -> float:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[0])

    for command in (bare, under):  # the first fills, and the second finds
        seconds(command)
    times = [(seconds(under), seconds(bare)) for _ in range(5)]
    one, other = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    ratio = {"kcache_us": one, "other_us": other, "ratio": one / other}
    return {"a compile with --pch in a second process": ratio}


NEEDS = {"program": "cuda.core", "triton": "triton", "pch": "cuda.bindings"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the adapters beside the frameworks' own.")
    parser.add_argument("what", nargs="*", choices=[[], *NEEDS], help="by default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=5_000)
    arguments = parser.parse_args()
    found: dict[str, dict] = {}
    for what in arguments.what or NEEDS:
        if importlib.util.find_spec(NEEDS[what]) is None:
            print(f"{what}: {NEEDS[what]} is not installed", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as place:
            found |= globals()[what](Path(place), arguments.entries, arguments.groups)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, row in found.items():
        print(f"{row['ratio']:8.4f}  {row['kcache_us']:12.1f}  {row['other_us']:12.1f}  {name}")


if __name__ == "__main__":
    main()
