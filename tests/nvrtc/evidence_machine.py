"""Random steps over two releases of a header, after each of which somebody asks for a kernel.

`python -m nvrtc.evidence_machine SEED STEPS FOLDER` is a program of its own. It prints one line of
JSON with what was counted, or ends with the steps that led to a failure. Each kernel is compared
with a bare compile. After each step, the manifests on disk are read: each stamp in them must have
been that of a file when it had the digest beside it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import xxhash
from nvrtc.reference import KERNEL, PTX, compile_fresh, next_tick

import kcache
from kcache.nvrtc import files
from kcache.nvrtc.entries import MANIFEST, look_into
from kcache.nvrtc.manifest import Manifest

SOURCES = ["#include <n.h>\n" + KERNEL + f"// {n}\n" for n in range(2)]
PLACES = ("one", "two/2")
#: Of the clock by which a file is fresh or not; the first trusts what was written just now.
STEPS = (3 * files.FRESH_NS, 0, -3 * files.FRESH_NS)
#: What the second process runs: it answers each line that it reads.
SECOND = "from nvrtc.evidence_machine import answer_all; answer_all()"


class Clock:
    """A clock that can be stepped, for one process."""

    def __init__(self) -> None:
        self.offset = STEPS[0]
        self._true = files.file_clock_ns
        files.file_clock_ns = self.now

    def now(self) -> int:
        return self._true() + self.offset


def options_of(folder: Path, place: str) -> kcache.CompileOptions:
    return PTX.replace(include_paths=[folder / place / name for name in ("first", "inc")])


def ask(cache: kcache.KernelCache, folder: Path, place: str, number: int) -> tuple[bool, bytes]:
    kernel = cache.get_or_compile(SOURCES[number], (), options_of(folder, place))
    return kernel.cached, kernel.ptx or b""


@functools.cache
def truth(number: int, value: str) -> bytes:
    """Return the bare compile's machine code where the header says this."""
    return compile_fresh(value + KERNEL + f"// {number}\n", PTX.flags()).ptx or b""


class Machine:
    """Two places with the same headers, two releases each, and who asks for their kernels."""

    def __init__(self, seed: str, folder: Path) -> None:
        self.chance, self.folder = random.Random(seed), folder
        self.clock, self.log, self.counts = Clock(), [], Counter[str]()
        #: Stamp of a file -> the digest that it had under it.
        self.history: dict[files.Stamp, bytes] = {}
        for place in PLACES:
            for name, value in (("first", None), ("v1", 1), ("v2", 2)):
                (folder / place / name).mkdir(parents=True)
                if value is not None:
                    (folder / place / name / "n.h").write_text(f"#define V {value}\n")
            (folder / place / "inc").symlink_to("v1")
        with kcache.KernelCache(folder / "layer") as layer:
            ask(layer, folder, PLACES[0], 0)
        self.cache = self.open()
        self.second = subprocess.Popen(
            [sys.executable, "-c", SECOND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def open(self) -> kcache.KernelCache:
        remote = self.chance.choice((None, f"file://{self.folder / 'layer'}?keep=1"))
        return kcache.KernelCache(self.folder / "cache", remote=remote)

    # -- steps -----------------------------------------------------------------------------------

    def _header(self) -> Path:
        folder = self.folder / self.chance.choice(PLACES) / self.chance.choice(("v1", "v2"))
        return folder / "n.h"

    def edit(self) -> str:
        header, value = self._header(), self.chance.randrange(1, 4)
        header.write_text(f"#define V {value}\n")
        return f"{header} = {value}"

    def edit_by_rename_with_old_times(self) -> str:
        header, value = self._header(), self.chance.randrange(1, 4)
        new = header.with_suffix(".new")
        new.write_text(f"#define V {value}\n")
        status = header.stat()
        os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
        new.rename(header)
        return f"{header} renamed to {value}"

    def switch_link(self) -> str:
        link = self.folder / self.chance.choice(PLACES) / "inc"
        to = {"v1": "v2", "v2": "v1"}[os.readlink(link)]
        link.unlink()
        link.symlink_to(to)
        return f"{link} -> {to}"

    def swap_directories(self) -> str:
        folder = self.folder / self.chance.choice(PLACES)
        for name, to in (("v1", "aside"), ("v2", "v1"), ("aside", "v2")):
            (folder / name).rename(folder / to)
        return f"{folder}: v1 and v2 swapped"

    def shadow(self) -> str:
        header = self.folder / self.chance.choice(PLACES) / "first/n.h"
        if header.exists():
            header.unlink()
            return f"{header} removed"
        header.write_text(f"#define V {self.chance.randrange(1, 4)}\n")
        return f"{header} appears"

    def replace_first(self) -> str:
        folder = self.folder / self.chance.choice(PLACES) / "first"
        shutil.rmtree(folder)
        folder.mkdir()
        return f"{folder} made anew"

    def step_clock(self) -> str:
        self.clock.offset = self.chance.choice(STEPS)
        return f"clock {self.clock.offset}"

    def reopen(self) -> str:
        self.cache.close()
        self.cache = self.open()
        return "opened again"

    def forget(self) -> str:
        self.cache.clear_memory()
        return "memory cleared"

    def go(self, steps: int) -> Counter[str]:
        changes: list[Callable[[], str]] = [
            *(self.edit, self.edit_by_rename_with_old_times, self.switch_link, self.shadow),
            *(self.swap_directories, self.replace_first, self.step_clock, self.reopen, self.forget),
        ]
        for _ in range(steps):
            next_tick()
            self.log.append(self.chance.choice(changes)())
            self.note_files()
            self.check(self.chance.choice((self.one, self.one, self.two_threads, self.other)))
            self.counts["steps"] += 1
        self.cache.close()
        self.second.stdin.close()  # type: ignore[union-attr]
        assert self.second.wait(60) == 0
        self.check_stamps()
        return self.counts

    # -- who asks --------------------------------------------------------------------------------

    def one(self, asked: list[tuple[str, int]]) -> list[tuple[bool, bytes]]:
        return [ask(self.cache, self.folder, *each) for each in asked]

    def two_threads(self, asked: list[tuple[str, int]]) -> list[tuple[bool, bytes]]:
        found: dict[int, tuple[bool, bytes]] = {}

        def run(n: int) -> None:
            found[n] = ask(self.cache, self.folder, *asked[n])

        threads = [threading.Thread(target=run, args=(n,)) for n in range(len(asked))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return [found[n] for n in range(len(asked))]

    def other(self, asked: list[tuple[str, int]]) -> list[tuple[bool, bytes]]:
        """Have the second process ask, which has a clock and a memory of its own."""
        offset = self.chance.choice(STEPS)
        question = [str(self.folder), offset, self.chance.random() < 0.5, asked]
        assert self.second.stdin is not None
        assert self.second.stdout is not None
        self.second.stdin.write(json.dumps(question) + "\n")
        answer = json.loads(self.second.stdout.readline())
        return [(cached, bytes.fromhex(ptx)) for cached, ptx in answer]

    def check(self, way: Callable[[list[tuple[str, int]]], list[tuple[bool, bytes]]]) -> None:
        asked = [(self.chance.choice(PLACES), self.chance.randrange(2)) for _ in range(2)]
        self.log.append(f"  {way.__name__} {asked}")
        for (place, number), (cached, ptx) in zip(asked, way(asked), strict=True):
            folder = self.folder / place
            shadow, header = folder / "first/n.h", folder / "inc/n.h"
            text = (shadow if shadow.exists() else header).read_text()
            assert ptx == truth(number, text), f"STALE: {place} {number}, cached={cached}"
            self.counts["hits" if cached else "misses"] += 1
        self.check_stamps()

    # -- what is stored --------------------------------------------------------------------------

    def note_files(self) -> None:
        for header in self.folder.glob("**/n.h"):
            digest = xxhash.xxh3_128_digest(header.read_bytes())
            known = self.history.setdefault(files.stamp_of(header.stat()), digest)
            assert known == digest, "two contents under one stamp: the test itself is wrong"

    def check_stamps(self) -> None:
        with kcache.open_engine(self.folder / "cache") as engine:
            for info in engine.backend.scan():
                opened = look_into(engine.backend, info)
                if opened is None or opened.entry is None or opened.item.kind != MANIFEST:
                    continue
                for dependency_set in Manifest.from_entry(opened.entry).dependency_sets:
                    self.check_set(dependency_set)

    def check_set(self, dependency_set: Any) -> None:
        for raw in dependency_set.stamps.values():
            raw_set, start = dependency_set.raw, dependency_set.sections().digests_at
            contents = [raw_set[at : at + 16] for at in range(start, len(raw_set), 16)]
            for number, digest in enumerate(contents):
                stamp = tuple(
                    int.from_bytes(raw[at : at + 8], "little", signed=True)
                    for at in range(40 * number, 40 * number + 40, 8)
                )
                if any(stamp):
                    self.counts["stamps"] += 1
                    assert self.history[stamp] == digest, "a stamp beside another's digest"  # type: ignore[index]


def answer_all() -> None:
    """Answer the first process's questions until there are no more."""
    clock, cache = Clock(), None
    for line in sys.stdin:
        folder, clock.offset, anew, asked = json.loads(line)
        if anew and cache is not None:
            cache.close()
            cache = None
        cache = cache or kcache.KernelCache(Path(folder) / "cache")
        found = [ask(cache, Path(folder), place, number) for place, number in asked]
        print(json.dumps([(cached, ptx.hex()) for cached, ptx in found]), flush=True)
    if cache is not None:
        cache.close()


def main(seed: str, steps: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with chdir(folder):
        machine = Machine(seed, folder)
        try:
            counts = machine.go(steps)
        except BaseException:
            print(f"seed {seed}", *machine.log[-40:], sep="\n", file=sys.stderr)
            machine.second.kill()
            raise
        print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
