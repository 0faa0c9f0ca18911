"""Random requests from three places under three names: equal bytes, and no compile too many."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from nvrtc.reference import PTX, agreed, working_directory, write

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

SHORT, LONG, PIECES = 2, 2000, 8
#: What the kernel makes of its place, and whether it is good under other names and in other places.
USES = {
    "nothing": ("V", True, True),
    "a warning": ("V; int unused", False, True),
    "its name": ("V; assert(*out > 0)", False, True),
    "length of its name": ("V + sizeof(__FILE__)", False, False),
    "length of a header's name": ("V + LENGTH", False, False),
}


class Case:
    """One random request, and the trees that it is asked from."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.places = [folder / name for name in ("a", "bb/b", "c" * 40)]
        roots = chance.sample(["inc", "inc/sub", "other", "src", "."], chance.randrange(1, 4))
        self.absolute, self.linked = chance.random() < 0.5, chance.random() < 0.3
        self.roots = ["link" if self.linked and root == "inc" else root for root in roots]
        self.headers = (
            {"m.h": '#if __has_include("n.h")\n#include "n.h"\n#endif\n'}
            if chance.random() < 0.4
            else None
        )
        self.use = chance.choice([*USES])
        lines = chance.sample(
            ["#include <n.h>", '#include "n.h"', '#include "inc/n.h"', "#include <sub/n.h>"], 2
        )
        lines += ['#include "m.h"'] * (self.headers is not None)
        value, self.names_free, self.places_free = USES[self.use]
        self.source = (
            "\n".join(f"#if __has_include({line[9:]})\n{line}\n#endif" for line in lines)
            + "\n#ifndef V\n#define V 7\n#endif\n#ifndef LENGTH\n#define LENGTH 1\n#endif\n"
            + f'extern "C" __global__ void k(int* out) {{ *out = {value}; }}\n'
        )
        text = {
            path: f"#pragma once\n#undef V\n#define V {chance.randrange(1, 9)}\n"
            for path in ("inc/n.h", "inc/sub/n.h", "src/n.h", "n.h")
            if chance.random() < 0.6
        }
        for place in self.places:
            for name in ("inc/sub", "other", "src"):
                (place / name).mkdir(parents=True)
            for path, content in text.items():
                write(place / path, content + "#undef LENGTH\n#define LENGTH sizeof(__FILE__)\n")
            (place / "link").symlink_to("inc")
        self.reads = bool(text)

    def ask(self, cache: kcache.KernelCache, place: Path, name: str) -> bool:
        with working_directory(place):
            base = place if self.absolute else Path()
            options = PTX.replace(include_paths=[base / root for root in self.roots])
            kernel = agreed(cache, self.source, options, headers=self.headers, source_name=name)
        return kernel.cached


def run(seed: str, count: int, folder: Path) -> None:
    chance = random.Random(seed)
    for number in range(count):
        tree = folder / str(number)
        case = Case(chance, tree)
        names = chance.choice(
            (["k.cu", "other.cu", "third.cu"], ["src/k.cu", "src/l.cu", "src/mm.cu"])
        )
        asked: set[tuple[int, int]] = set()
        with kcache.KernelCache(
            tree / "cache", relocation=chance.choice(("lazy", "eager"))
        ) as cache:
            for place, name in ((0, 0), (1, 1), (2, 2), (0, 2), (0, 0)):
                hit = case.ask(cache, case.places[place], names[name])
                told = f"{seed}/{number}: {case.use}, {case.roots}, {place}, {name}"
                assert hit or (place, name) not in asked, f"{told}: compiled again"
                asked.add((place, name))
            compiles = cache.stats().compiles
        most = len(asked) if not case.places_free else 1 if case.names_free else len(names)
        assert compiles <= most, f"{told}: {compiles} compiles, {most} were enough"
        shutil.rmtree(tree)


def test_three_places_and_three_names(tmp_path: Path) -> None:
    run("short", SHORT, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(PIECES))
def test_three_places_and_three_names_at_length(tmp_path: Path, piece: int) -> None:
    run(f"long {piece}", LONG // PIECES, tmp_path)
