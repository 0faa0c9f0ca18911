"""Places and names: a kernel is good elsewhere only after a proof, and then costs no compile."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from nvrtc.reference import KERNEL, PTX, agree, agreed, working_directory, write

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

TEXT = "#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n"


def counts(cache: kcache.KernelCache) -> tuple[int, int]:
    stats = cache.stats()
    return stats.compiles, stats.proofs


def header(value: int) -> str:
    return f"#define V {value}\n"


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["#include <n.h>\n" + KERNEL, KERNEL.replace("V", "1")])
def test_a_second_place_proves_and_a_third_gets_it(cache, tmp_path, source):
    for number, name in enumerate(("a/k.cu", "bb/other.cu", "c/c/k.cu")):
        folder = tmp_path / (str(number) * (number + 1))
        write(folder / "inc/n.h", header(1))
        with working_directory(folder):
            options = PTX.replace(include_paths=[folder / "inc"])
            kernel = agreed(cache, source, options, source_name=name)
            assert kernel.cached is (number > 0)
        assert counts(cache) == (1, min(number, 1))
    assert cache.stats().misses == 1


@pytest.mark.parametrize(
    ("there", "proofs"),
    [
        ({"cwd": "two"}, 1),
        ({"name": "other.cu"}, 1),
        ({"inc": "../two/inc"}, 1),
        ({"cwd": "two", "inc": "../one/inc"}, 1),
        ({}, 0),
    ],
)
def test_each_part_of_the_place_needs_a_proof(cache, tmp_path, there, proofs):
    for name in ("one", "two"):
        write(tmp_path / name / "inc/n.h", header(1))
    for place in ({}, there):
        with working_directory(tmp_path / place.get("cwd", "one")):
            options = PTX.replace(include_paths=[place.get("inc", "inc")])
            name = place.get("name", "k.cu")
            agreed(cache, "#include <n.h>\n" + KERNEL, options, source_name=name)
    assert counts(cache) == (1, proofs)


def test_what_an_outcome_shows_stays_and_the_rest_is_proven(cache, tmp_path):
    """A warning shows the name of the source, but not where its headers are."""
    source = "#include <n.h>\n" + KERNEL.replace("*out", "int unused; *out")
    for folder, name, expected in (
        ("a", "k.cu", (1, 0)),
        ("b", "k.cu", (1, 1)),
        ("c", "other.cu", (2, 1)),
        ("d", "k.cu", (2, 1)),
    ):
        write(tmp_path / folder / "n.h", header(1))
        options = PTX.replace(include_paths=[tmp_path / folder])
        agreed(cache, source, options, source_name=name)
        assert counts(cache) == expected


def test_a_writable_remote_and_warm_prove_eagerly(tmp_path, monkeypatch):
    pytest.importorskip("click", reason="the extra cli is not installed")
    from kcache.cli.app import app

    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
    write(tmp_path / "a/inc/n.h", header(1))
    write(tmp_path / "a/k.cu", "#include <n.h>\n" + KERNEL)
    write(
        tmp_path / "a/list.toml",
        f'[[kernels]]\nsource = "k.cu"\narch = "compute_80"\ninclude_paths = ["{tmp_path}/a/inc"]\n',
    )
    with working_directory(tmp_path / "a"):
        assert app.run(["warm", "-q", "list.toml"]) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "checkout/b")
    with working_directory(tmp_path / "checkout/b"), kcache.KernelCache() as cache:
        options = PTX.replace(include_paths=[tmp_path / "checkout/b/inc"])
        assert agreed(cache, "#include <n.h>\n" + KERNEL, options, source_name="other.cu").cached
        assert counts(cache) == (0, 0)


# -- where texts deceived --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "folder"), [("plain", "été"), ("option", "with space"), ("text", "x")]
)
def test_an_absolute_path_however_it_is_written(tmp_path, folder, how):
    """It leads to the first place from everywhere."""
    for place, value in (("a", 1), ("b", 1), ("c", 3)):
        write(tmp_path / folder / place / "y.h", header(value))
    path = tmp_path / folder / "a/y.h"
    before = {
        "plain": f'#include "{path}"\n',
        "text": f"{TEXT}#include TEXT({path})\n",
        "option": "",
    }[how]
    extra = ["-include", str(path)] if how == "option" else []
    with kcache.KernelCache(tmp_path / "cache", relocation="eager") as cache:
        for place in ("a", "c"):
            options = PTX.replace(include_paths=[tmp_path / folder / place], extra_options=extra)
            agree(cache, before + KERNEL, options)
        path.write_text(header(4))
        for place in ("b", "a"):
            options = PTX.replace(include_paths=[tmp_path / folder / place], extra_options=extra)
            agree(cache, before + KERNEL, options)


SELF = (
    "#ifndef ONCE\n#define ONCE\n#define V 1\nINCLUDE\n"
    + KERNEL
    + "#else\n#undef V\n#define V 2\n#endif\n"
)


@pytest.mark.parametrize(
    ("source", "relocation"),
    [
        (SELF.replace("INCLUDE", '#include "k.cu"'), "eager"),
        ('#if __has_include("k.cu")\n#define V 1\n#else\n#define V 2\n#endif\n' + KERNEL, "eager"),
        ('extern "C" __global__ void k(char* o) { *o = __builtin_FILE_NAME()[*o]; }\n', "lazy"),
        (
            '#include "n.h"\nextern "C" __global__ void k(int* o) { *o = sizeof(__FILE__) > 300; }\n',
            "eager",
        ),
    ],
)
def test_a_source_that_asks_for_its_own_name(tree, tmp_path, source, relocation):
    """The compiler answers from memory, and asks the system nothing."""
    write(tree / "n.h", header(1))
    with kcache.KernelCache(tmp_path / "cache", relocation=relocation) as cache:
        for name in ("one.cu", "k.cu", "sub/../k.cu", "third.cu"):
            agree(cache, source, PTX, source_name=name)
            cache.clear_memory()
    # A file of that name has nothing to say where the source has it.
    write(tree / "k.cu", "#undef V\n#define V 9\n")
    with kcache.KernelCache(tmp_path / "cache", relocation=relocation) as cache:
        for name in ("one.cu", "k.cu"):
            agree(cache, source, PTX, source_name=name)


def test_threads_under_two_names_that_fail_get_their_own_error(cache):
    """They share one failing compile only where the source has the same name."""
    requests = [
        kcache.CompileRequest("#error no\n", (), PTX, source_name=name)
        for name in ["a.cu", "b.cu"] * 3
    ]
    errors = cache.compile_many(requests, jobs=6)
    assert [error.log[:4] for error in errors] == ["a.cu", "b.cu"] * 3


def test_a_hit_in_a_layer_merges_into_the_manifest_here(tmp_path):
    write(tmp_path / "inc/n.h", header(1))
    options, source = PTX.replace(include_paths=[tmp_path / "inc"]), "#include <n.h>\n" + KERNEL
    with kcache.KernelCache(tmp_path / "layer") as layer:
        agreed(layer, source, options)
    write(tmp_path / "inc/n.h", header(2))
    with kcache.KernelCache(tmp_path / "cache") as cache:
        agreed(cache, source, options)
    write(tmp_path / "inc/n.h", header(1))
    remote = f"file://{tmp_path / 'layer'}?keep=1"
    with kcache.KernelCache(tmp_path / "cache", remote=remote) as cache:
        assert agreed(cache, source, options).cached
    with kcache.KernelCache(tmp_path / "cache") as cache:
        for value in (2, 1):
            write(tmp_path / "inc/n.h", header(value))
            assert agreed(cache, source, options).cached


# -- random requests from three places under three names: equal bytes, and no compile too many ----------

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
