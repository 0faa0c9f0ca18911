"""Random include trees, edits, moves and variables, compared with nvcc alone after each step."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nvcc.conftest import Service

FOLDERS = ("a", "b", "c/d")
NAMES = ("one.h", "two.h", "three.h")
STEPS = 8
PROGRAMS, MANY_PROGRAMS = 4, 200
PIECES = 4


class Tree:
    """A project with headers in several directories, which random steps change."""

    def __init__(self, folder: Path, choices: random.Random) -> None:
        self.folder, self.choices = folder, choices
        self.variables: dict[str, str] = {}
        for name in FOLDERS:
            (folder / "src" / name).mkdir(parents=True)
        for name in NAMES:
            self._write(choices.choice(FOLDERS), name)
        includes = "".join(
            f"#if __has_include({name})\n#include {name}\n#endif\n"
            for name in (self._spelled(name) for name in choices.sample(NAMES, len(NAMES)))
        )
        (folder / "src/k.cu").write_text(
            f'#define SUM 0\n{includes}extern "C" __global__ void k(int* p)'
            " { p[0] = VALUE_ONE + VALUE_TWO * 1000 + VALUE_THREE * 1000000; }\n"
        )

    def _spelled(self, name: str) -> str:
        return self.choices.choice((f'"{name}"', f"<{name}>"))

    def _write(self, folder: str, name: str) -> None:
        value = f"VALUE_{name.removesuffix('.h').upper()}"
        other = self.choices.choice(NAMES)
        once = self.choices.choice(("#pragma once\n", ""))
        below = f"#if __has_include_next(<{other}>)\n#define NEXT 1\n#endif\n"
        text = f"#undef {value}\n#define {value} {self.choices.randrange(1000)}\n"
        path = self.folder / "src" / folder / name
        path.unlink(missing_ok=True)
        path.write_text(once + text + self.choices.choice((below, "")))

    @property
    def arguments(self) -> list[str]:
        source = self.folder / "src"
        found = [f"-I{source / name}" for name in FOLDERS]
        values = [f"-DVALUE_{name.removesuffix('.h').upper()}=0" for name in NAMES]
        return ["-ptx", "-arch=sm_90", *found, *values, str(source / "k.cu"), "-o"]

    # -- steps -------------------------------------------------------------------------------------

    def write(self) -> None:
        """Edit a header, or add one that shadows another."""
        self._write(self.choices.choice(FOLDERS), self.choices.choice(NAMES))

    def remove(self) -> None:
        found = sorted(self.folder.rglob("*.h"))
        if found:
            self.choices.choice(found).unlink()

    def link(self) -> None:
        """Replace a header by a link to another one."""
        found = sorted(self.folder.rglob("*.h"))
        if len(found) > 1:
            link, target = self.choices.sample(found, 2)
            if not target.is_symlink():
                link.unlink()
                link.symlink_to(target.resolve())

    def set_variable(self) -> None:
        self.variables = {"CPATH": str(self.folder / "src" / self.choices.choice(FOLDERS))}

    def append_flags(self) -> None:
        self.variables = {"NVCC_APPEND_FLAGS": f"-DSUM2={self.choices.randrange(2)}"}

    def unset(self) -> None:
        self.variables = {}

    def move(self) -> None:
        moved = self.folder.with_name(f"{self.folder.name}x")
        shutil.move(self.folder, moved)
        self.folder = moved


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("piece", range(PIECES))
def test_random_programs_are_never_stale(
    service: Service, tmp_path: Path, long: bool, piece: int
) -> None:
    for seed in range(piece, MANY_PROGRAMS if long else PROGRAMS, PIECES):
        choices = random.Random(seed)
        tree = Tree(tmp_path / f"program{seed}", choices)
        steps: list[Callable[[], None]] = [
            *(tree.write,) * 3, tree.remove, tree.link, tree.set_variable, tree.append_flags,
            tree.unset, tree.move,
        ]  # fmt: skip
        for number in range(STEPS):
            step = choices.choice(steps)
            step()
            where = f"seed {seed}, step {number}: {step.__name__}"
            made = _compile(service.run, tree, tmp_path / "by.ptx")
            assert made == _compile(service.alone, tree, tmp_path / "alone.ptx"), where
            if made[0] == 0:
                before = service.counts["hits"]
                assert _compile(service.run, tree, tmp_path / "by.ptx") == made, where
                assert service.counts["hits"] == before + 1, where


def _compile(by: Callable[..., object], tree: Tree, output: Path) -> tuple[object, bytes]:
    output.unlink(missing_ok=True)
    done = by(*tree.arguments, output, cwd=tree.folder, **tree.variables)
    return done.returncode, output.read_bytes() if output.exists() else b""  # type: ignore[attr-defined]
