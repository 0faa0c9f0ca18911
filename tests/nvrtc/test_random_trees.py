"""The promise as a whole: random include trees, random edits, and never anything but the truth.

After every step the cache must give what a fresh compile gives; and where the tree is one that was
compiled before, it must give it without compiling.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, agree, working_directory

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

RUNS = 8
STEPS = 40
#: A manifest keeps 16 header sets, so older trees may have been forgotten.
REMEMBERED = 12

FOLDERS = ("", "one", "two", "two/deep", "three")
PATHS = ("one", "two", "three")
NAMES = ("a.h", "b.h", "c.h", "deep/d.h", "e.h", "f.h")
PROBED = ("p.h", "q.h", "e.h")


def macro(name: str) -> str:
    return "X_" + name.replace("/", "_").removesuffix(".h")


DEFAULTS = "".join(
    f"#ifndef {macro(name)}\n#define {macro(name)} 0\n#endif\n" for name in (*NAMES, *PROBED[:2])
)
KERNEL = (
    DEFAULTS
    + 'extern "C" __global__ void k(int* out) {\n'
    + "".join(f"    out[{n}] = {macro(name)};\n" for n, name in enumerate((*NAMES, *PROBED[:2])))
    + "}\n"
)


class Tree:
    """A project folder with headers, and what can happen to one."""

    def __init__(self, top: Path, chance: random.Random) -> None:
        self.top = top
        self.chance = chance
        self.history: dict[str, list[str]] = {}
        self.moves = 0
        for folder in FOLDERS:
            (top / folder).mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            for folder in chance.sample(("one", "two", "three"), k=chance.choice((1, 1, 2))):
                self.write(f"{folder}/{name}", self.header(name))
        self.source = (
            "#define WRAPPED(x) __has_include(x)\n#define NAMED(x) <x>\n"
            + "".join(self.include(name) for name in chance.sample(NAMES, k=3))
            + "".join(self.probe(name) for name in PROBED)
            + KERNEL
        )

    def include(self, name: str) -> str:
        forms = (f"#include <{name}>", f'#include "{name}"', f"#include NAMED({name})")
        return self.chance.choice(forms) + "\n"

    def probe(self, name: str) -> str:
        forms = (f"__has_include(<{name}>)", f'__has_include("{name}")', f"WRAPPED(<{name}>)")
        word = macro(name)
        value = self.chance.randrange(1, 99)
        found = f"#ifndef {word}\n#define {word} {value}\n#endif\n"
        return f"#if {self.chance.choice(forms)}\n{found}#endif\n"

    def header(self, name: str) -> str:
        word = macro(name)
        guard = f"G_{word}_{self.chance.randrange(2)}"
        later = NAMES[NAMES.index(name) + 1 :]
        inner = "".join(self.include(n) for n in later if self.chance.random() < 0.4)
        if self.chance.random() < 0.3:
            inner += self.probe(self.chance.choice(PROBED))
        value = self.chance.randrange(100, 999)
        body = f"{inner}#ifndef {word}\n#define {word} {value}\n#endif\n"
        if self.chance.random() < 0.5:
            return f"#pragma once\n{body}"
        return f"#ifndef {guard}\n#define {guard}\n{body}#endif\n"

    def write(self, path: str, text: str) -> None:
        self.history.setdefault(path, []).append(text)
        file = self.top / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def files(self) -> dict[str, str]:
        found = sorted(path for path in self.top.rglob("*") if path.is_file())
        return {str(path.relative_to(self.top)): path.read_text() for path in found}

    # -- edits -----------------------------------------------------------------------------------

    def any_file(self) -> str:
        return self.chance.choice(sorted(self.files()) or ["one/a.h"])

    def step(self) -> str:
        """Do one random thing to the tree; return its name."""
        edits = (
            self.change,
            self.change,
            self.revert,
            self.revert,
            self.shadow,
            self.delete,
            self.appear,
            self.disappear,
            self.touch,
            self.replace,
            self.change_secretly,
            self.move,
            self.nothing,
        )
        edit = self.chance.choice(edits)
        edit()
        return edit.__name__

    def change(self) -> None:
        path = self.any_file()
        name = next((n for n in NAMES if path.endswith(n)), "f.h")
        self.write(path, self.header(name))

    def revert(self) -> None:
        path = self.chance.choice(sorted(self.history))
        self.write(path, self.chance.choice(self.history[path][-3:]))

    def shadow(self) -> None:
        name = self.chance.choice(NAMES)
        self.write(f"{self.chance.choice(FOLDERS)}/{name}".lstrip("/"), self.header(name))

    def delete(self) -> None:
        (self.top / self.any_file()).unlink(missing_ok=True)

    def appear(self) -> None:
        path = f"{self.chance.choice(FOLDERS)}/{self.chance.choice(PROBED)}".lstrip("/")
        self.write(path, "// found\n")

    def disappear(self) -> None:
        for folder in FOLDERS:
            (self.top / folder / self.chance.choice(PROBED)).unlink(missing_ok=True)

    def touch(self) -> None:
        path = self.top / self.any_file()
        if path.exists():
            os.utime(path)

    def replace(self) -> None:
        path = self.any_file()
        aside = self.top.parent / "aside"
        aside.write_text(self.header(next((n for n in NAMES if path.endswith(n)), "f.h")))
        self.history.setdefault(path, []).append(aside.read_text())
        (self.top / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside, self.top / path)

    def change_secretly(self) -> None:
        """Change a digit, and put size and mtime back to what they were."""
        path = self.top / self.any_file()
        if not path.exists():
            return
        status = path.stat()
        text = path.read_text()
        digits = [n for n, letter in enumerate(text) if letter.isdigit() and text[n - 1] == " "]
        if digits:
            at = self.chance.choice(digits)
            path.write_text(text[:at] + str(1 + int(text[at]) % 9) + text[at + 1 :])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def move(self) -> None:
        self.moves += 1
        target = self.top.parent / f"moved{self.moves}"
        if self.chance.random() < 0.5:
            shutil.copytree(self.top, target)
            shutil.rmtree(self.top)
        else:
            self.top.rename(target)
        self.top = target

    def nothing(self) -> None:
        pass


def run(place: Path, seed: int) -> int:
    """Do `STEPS` steps and check each; return how often a known tree came back."""
    chance = random.Random(seed)
    tree = Tree(place / "tree", chance)
    relative = chance.random() < 0.5
    known: list[dict[str, str]] = []
    returned = 0
    with kcache.KernelCache(place / "cache", memory_size=chance.choice((0, "64MB"))) as cache:
        for number in range(STEPS):
            done = f"seed {seed}, step {number}: {tree.step()}"
            folders = [path if relative else str(tree.top / path) for path in PATHS]
            options = ARCH.replace(include_paths=folders)
            with working_directory(tree.top):
                kernel = agree(cache, tree.source, options)
                if kernel is None:
                    continue
                state = tree.files()
                if state in known[-REMEMBERED:]:
                    assert kernel.cached, f"{done}: a known tree missed"
                    returned += 1
                    known.remove(state)
                known.append(state)
                again = agree(cache, tree.source, options)
                assert again is not None
                assert again.cached, f"{done}: asked twice, compiled twice"
        stats = cache.stats()
        assert (stats.errors, stats.corrupt) == (0, 0)
    return returned


def test_every_step_agrees_with_a_fresh_compile_and_known_trees_hit(tmp_path: Path) -> None:
    assert RUNS * STEPS >= 300
    returned = [run(tmp_path / str(seed), seed) for seed in range(RUNS)]
    assert sum(returned) >= RUNS
