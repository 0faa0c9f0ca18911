"""Machine: edit a random include tree, and compare cache and compiler after each step.

This is a program of its own, because a compile that fails changes NVRTC until the process ends.
`python -m nvrtc.machine MODE SEED STEPS FOLDER` prints one line of JSON with counts, or fails and
prints the steps that led to the failure. The modes are:

*plain*: with the usual rules.
*trust*: the stamp of a file is trusted at once, not only after two seconds. For each stamp and digest
in the manifests on disk, a file must have had this digest when it had this stamp.
*together*: after each step, three threads and a process request kernels at the same time: some with
debug information, some for link time, and some that do not compile.
"""

import contextlib
import json
import os
import random
import struct
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from core.helpers import fork, run_all, wait
from nvrtc.reference import agree, compile_fresh, next_tick
from nvrtc.trees import World

import kcache
from kcache.nvrtc import files
from kcache.nvrtc.entries import MANIFEST, look_into
from kcache.nvrtc.manifest import Manifest

MODES = ("plain", "trust", "together")
#: A run stores fewer than the 16 dependency sets that a manifest can have, because a manifest with
#: 16 sets loses its oldest one, and a state seen before would then be a miss.
MOST_STORED = 14


class Run:
    """One random tree with one cache."""

    def __init__(self, mode: str, seed: str, folder: Path) -> None:
        self.mode = mode
        self.chance = random.Random(seed)
        self.folder = folder
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        top = folder / "tree"
        top.mkdir(parents=True)
        os.chdir(top)
        self.world = World(top, self.chance)
        self.cache = self.open()
        #: Maps the states of the tree that were compiled to the directories in which the tree was.
        self.states: dict[str, set[str]] = {}
        self.stored = 0
        self.refusal = ""
        #: Maps the stamps of files to the digests that the files had when they had these stamps.
        self.history: dict[files.Stamp, bytes] = {}

    def open(self) -> kcache.KernelCache:
        return kcache.KernelCache(self.folder / "cache")

    def go(self, steps: int) -> Counter[str]:
        if self.mode == "trust":
            files.FRESH_NS = -(10**12)
        self.note_files()
        self.check()
        for _ in range(steps - 1):
            if self.stored >= MOST_STORED:
                self.world.source += "// another\n"
                self.stored = 0
                self.states.clear()
            if self.mode == "trust":
                next_tick()  # two changes within one tick could have the same stamp
            if self.refusal and self.chance.random() < 0.8:
                self.log.append(f"heal {self.world.heal(self.refusal)}")
            else:
                self.log.append(self.world.step())
            self.reopen()
            self.note_files()
            self.check()
            self.check_stamps()
            if self.mode == "together" and not self.refusal:
                self.check_together()
        return self.counts

    def reopen(self) -> None:
        roll = self.chance.random()
        if roll < 0.2:
            self.cache.close()
            self.cache = self.open()
        elif roll < 0.3:
            self.cache.clear_memory()

    def note_files(self) -> None:
        if self.mode == "trust":
            for path in filter(Path.is_file, map(self.world.top.joinpath, self.world.files())):
                digest = xxhash.xxh3_128_digest(path.read_bytes())
                known = self.history.setdefault(files.stamp_of(path.stat()), digest)
                assert known == digest, "two contents have the same stamp: the test itself is wrong"

    def check_stamps(self) -> None:
        """Assert that each stamp in the manifests is stored with the digest that belongs to it."""
        if self.mode != "trust":
            return
        with kcache.open_engine(self.folder / "cache") as engine:
            for info in engine.backend.scan():
                opened = look_into(engine.backend, info)
                if opened and opened.entry is not None and opened.item.kind == MANIFEST:
                    for dependency_set in Manifest.from_entry(opened.entry).dependency_sets:
                        self.check_set(dependency_set)

    def check_set(self, dependency_set: Any) -> None:
        joined = dependency_set.answers().digests
        digests = [joined[at : at + 16] for at in range(0, len(joined), 16)]
        for raw in dependency_set.stamps.values():
            for stamp, digest in zip(
                struct.iter_unpack("<5q", raw[: 40 * len(digests)]), digests, strict=True
            ):
                if any(stamp):
                    self.counts["stamps"] += 1
                    assert self.history[stamp] == digest, "a stamp is stored with a wrong digest"

    def check(self) -> None:
        """Assert that the cache and the compiler agree, and that a state seen before is a hit."""
        world = self.world
        options = world.options()
        arguments: dict[str, Any] = {"headers": world.headers, "source_name": world.source_name}
        self.counts["steps"] += 1
        uncacheable = self.cache.stats().uncacheable
        kernel = agree(self.cache, world.source, options, **arguments)
        if kernel is None:
            self.refusal = compile_fresh(world.source, options.flags(), **arguments).log
            self.counts["refused"] += 1
            return
        self.refusal = ""
        self.counts["hits"] += kernel.cached
        if self.cache.stats().uncacheable > uncacheable:
            self.counts["uncacheable"] += 1
            self.log.append("  (not cached)")
            return
        self.stored += not kernel.cached
        state = world.state()
        if state in self.states:
            self.counts["seen before"] += 1
            # If a kernel includes a header by two paths, it may only be valid at its own location.
            moved = str(world.top) not in self.states[state]
            self.counts["moved"] += moved
            self.counts["moved and hit"] += moved and kernel.cached
            assert kernel.cached or moved, "a miss where the whole tree was compiled before"
        self.states.setdefault(state, set()).add(str(world.top))

    def check_together(self) -> None:
        """Assert that cache and compiler agree if threads and a process request kernels together."""
        world = self.world
        kinds: list[dict[str, Any]] = [{}, {"debug": True}, {"lto": True}, {"arch": "sm_90"}]
        arguments: dict[str, Any] = {"headers": world.headers, "source_name": world.source_name}
        asked = [
            (f"{world.source}// {self.counts['steps']} {n}\n", world.options().replace(**kind))
            for n, kind in enumerate(self.chance.sample(kinds, 3))
        ]
        expected = [compile_fresh(source, o.flags(), **arguments) for source, o in asked]

        def ask(cache: kcache.KernelCache, number: int) -> None:
            source, options = asked[number]
            if self.chance.random() < 0.3:
                with contextlib.suppress(kcache.CompileError):
                    cache.get_or_compile(f"#error {number}\n", (), options)
            kernel = cache.get_or_compile(source, (), options, **arguments)
            same = expected[number][:3] == (kernel.ptx, kernel.cubin, kernel.ltoir)
            assert same, f"STALE: {options}, cached={kernel.cached}"

        def ask_all() -> None:
            with self.open() as cache:
                for number in range(3):
                    ask(cache, number)

        child = fork(ask_all)
        assert run_all(*(partial(ask, self.cache, n) for n in range(3))) == [None] * 3
        assert wait(child) == 0, "the other process got another kernel than the compiler makes"
        self.counts["together"] += 6


def main(mode: str, seed: str, steps: str, folder: str) -> None:
    run = Run(mode, f"{mode}/{seed}", Path(folder))
    try:
        counts = run.go(int(steps))
    except BaseException:
        print(*run.log, vars(run.world), folder, sep="\n", file=sys.stderr)
        raise
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
