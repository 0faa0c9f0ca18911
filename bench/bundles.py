"""Bundles: measures an export beside `tar`, and a hit in a bundle beside a hit on disk.

    python bench/bundles.py [--json] [--entries N] [--size BYTES]

The times are medians of rounds that take turns. `tar` reads the files of the same cache and writes
one file, and so does the export, which checks every entry besides. Needs no NVRTC and no GPU.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import kcache
from kcache.remote.bundle import Bundle
from kcache.remote.seal import Sealer

ROUNDS = 5
#: Runs one export, import or verification. Prints the seconds and the peak of its memory.
CHILD = """
import json, resource, sys, time
import kcache
import kcache.admin.bundles, kcache.nvrtc.manifest, sqlite3
what, directory, path = sys.argv[1:]
with kcache.KernelCache(directory, max_size="16GiB", memory_size=0) as cache:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if what == "export":
        kcache.export_bundle(cache, path)
    elif what == "import":
        kcache.import_bundle(cache, path)
    else:
        kcache.verify_bundle(path)
    seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak_mb": peak / 1024, "before_mb": before / 1024}))
"""


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def fill(directory: Path, entries: int, size: int) -> None:
    """Put entries of random bytes, which nothing can compress, into a cache."""
    with kcache.KernelCache(directory, max_size="16GiB", memory_size=0) as cache:
        for number in range(entries):
            entry = kcache.Entry(
                {"cubin": os.urandom(size)},
                {"kind": "kernel", "source_name": f"k{number}.cu", "arch": "sm_90"},
            )
            if not cache.engine.put(key(number), entry):
                raise RuntimeError("an entry was not stored")


def child(what: str, directory: Path, path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, what, str(directory), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def per_call(task: Callable[[str], object], keys: list[str]) -> float:
    start = time.perf_counter()
    for each in keys:
        task(each)
    return (time.perf_counter() - start) / len(keys)


def exporting(place: Path, rounds: int) -> dict[str, float]:
    """Return the medians of an export and of tar, which take turns, and the memory of each step."""
    cache, bundle, tar = place / "cache", place / "kernels.kcb", place / "kernels.tar"
    exports, tars = [], []
    for _ in range(rounds):
        bundle.unlink(missing_ok=True)
        tar.unlink(missing_ok=True)
        exports.append(child("export", cache, bundle))
        tars.append(timed(["tar", "-cf", str(tar), "-C", str(cache), "file"]))
    size = bundle.stat().st_size
    tar.unlink()
    verified = child("verify", cache, bundle)
    imported = child("import", place / "other", bundle)
    export, other = statistics.median(each["seconds"] for each in exports), statistics.median(tars)
    return {
        "bytes": size,
        "export_seconds": export,
        "tar_seconds": other,
        "export_speed_per_tar_speed": other / export,
        "export_peak_mb": max(each["peak_mb"] for each in exports),
        "verify_seconds": verified["seconds"],
        "verify_peak_mb": verified["peak_mb"],
        "import_seconds": imported["seconds"],
        "import_peak_mb": imported["peak_mb"],
    }


def hitting(place: Path, entries: int, rounds: int) -> dict[str, float]:
    """Return the medians of a get from a bundle and from a directory, read-only as a layer is."""
    keys = [key(number) for number in range(0, entries, max(1, entries // 1000))]
    bundle = Bundle(place / "kernels.kcb", sealer=Sealer())
    with kcache.KernelCache(
        place / "cache", read_only=True, memory_size=0, max_size="16GiB"
    ) as cache:
        disk = cache.engine.backend.get
        per_call(disk, keys)
        per_call(bundle.get, keys)
        pairs = [(per_call(bundle.get, keys), per_call(disk, keys)) for _ in range(rounds)]
    bundle.close()
    mounted = statistics.median(one for one, _ in pairs)
    plain = statistics.median(other for _, other in pairs)
    return {
        "bundle_get_us": mounted * 1e6,
        "directory_get_us": plain * 1e6,
        "bundle_get_per_directory_get": mounted / plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", help="where the caches are made")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kcache-bench-", dir=given.folder))
    try:
        fill(place / "cache", given.entries, given.size)
        found = {"entries": given.entries, **exporting(place, given.rounds)}
        found |= hitting(place, given.entries, given.rounds)
    finally:
        shutil.rmtree(place)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:32} {value:,.3f}")


if __name__ == "__main__":
    main()
