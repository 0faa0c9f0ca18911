"""Programs with different directories, environments and NVRTCs each get the right kernel."""

import shutil
import sys
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, KCACHE, Dropin, Told

CLIENT = CLIENTS / "forms.py"


@pytest.fixture
def folders(dropin: Dropin) -> list[Path]:
    """Three directories: two with equal headers, and one with a different header."""
    folders = [dropin.folder / name for name in ("one", "same", "other")]
    for folder, scale in zip(folders, (2, 2, 3), strict=True):
        folder.mkdir()
        (folder / "scale.h").write_text(f"#define SCALE {scale}\n")
    return folders


def _twice(dropin: Dropin, script: str) -> tuple[Told, Told]:
    """Run a shell script twice with the drop-in; assert that its output is the same as without."""
    first, second = dropin.same("sh", "-c", script), dropin.run("sh", "-c", script)
    assert first.output == second.output, second.errors
    return first, second


def _in_each(folders: list[Path], real: Path, *options: str) -> str:
    client = " ".join(map(str, (sys.executable, CLIENT, ".", real, *options)))
    return "; ".join(f"(cd {folder} && {client})" for folder in folders)


def test_other_working_directories(folders: list[Path], real: Path, dropin: Dropin) -> None:
    """Programs in different directories hit, also with a server that the user has started."""
    script = ("sh", "-c", _in_each(folders, real))
    first = dropin.same(*script)
    assert (first.hits, first.misses) == (1, 2), first.line
    assert "uncacheable 0" in first.line
    assert dropin.bare(*KCACHE, "server", "start").code == 0
    try:
        for _ in range(2):
            told = dropin.run(*script)
            assert told.output == first.output, told.errors
            assert (told.hits, told.misses) == (3, 0), told.line  # the counts of this run
    finally:
        assert dropin.bare(*KCACHE, "server", "stop").code == 0


def test_debug_information(folders: list[Path], real: Path, dropin: Dropin, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folders[0])
    each = _in_each([*folders, tmp_path / "link"], real, "-lineinfo")
    first, second = _twice(dropin, each)
    assert len(set(first.output.split("\n"))) == 5
    assert (second.hits, second.misses) == (4, 0), second.line


def test_programs_with_other_variables(
    folders: list[Path], real: Path, dropin: Dropin, nvrtc: tuple[int, int]
) -> None:
    client = f"{sys.executable} {CLIENT} . {real}"
    each = [client, f"FINALIZER_USE_LEGACY_ELF_BUILDER=1 {client}", f"env -u PWD {client}", client]
    first, second = _twice(dropin, f"cd {folders[0]}; {'; '.join(each)}")
    assert len(set(first.output.split("\n"))) == 3 or nvrtc < (13, 5)  # ignored by older NVRTC
    assert (second.hits, second.misses) == (4, 0), second.line


def test_another_nvrtc(folders: list[Path], real: Path, dropin: Dropin, tmp_path: Path) -> None:
    """An NVRTC in another folder is loaded from there, even if it has the same content."""
    other = tmp_path / "nvrtc"
    other.mkdir()
    for path in real.parent.glob("libnvrtc*"):
        if path.stat().st_size:
            shutil.copy(path, other / path.name)
    script = ("sh", "-c", f"{_in_each(folders, real)}; {_in_each(folders, other / real.name)}")
    first = dropin.same(*script)
    assert (first.hits, first.misses) == (4, 2), first.line
    assert "uncacheable 0" in first.line
