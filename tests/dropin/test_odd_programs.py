"""Programs that do unusual things get the same results with and without `kcache run`."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from core.helpers import EMULATED, as_root, not_emulated
from dropin.conftest import CLIENTS, KCACHE, Dropin, Told

ODD = CLIENTS / "odd.py"
#: glibc 2.34 has _Fork.
_FORK = ("forks_without_handlers",) if hasattr(ctypes.CDLL(None), "_Fork") else ()


def _both(dropin: Dropin, real: Path, *scene: object) -> tuple[Told, Told]:
    command = (sys.executable, ODD, real, *scene)
    bare, told = dropin.bare(*command), dropin.run(*command)
    assert bare.code == told.code == 0, told.errors + bare.errors
    return bare, told


def _same(dropin: Dropin, real: Path, *scene: object) -> Told:
    told = dropin.same(sys.executable, ODD, real, *scene)
    assert told.code == 0, told.errors
    return told


SCENES = (
    *("closes_all", "takes_the_number", "has_no_descriptor"),
    *("forks", *_FORK, "starts_another", "is_large 8", "has_many_headers 3000"),
    "has_two_headers_of_one_name",
    *(() if EMULATED else ("has_a_namespace_of_its_own",)),  # QEMU crashes in dlmopen
)


def test_programs(real: Path, dropin: Dropin, long: bool) -> None:
    scenes = [*SCENES, "is_large 64"] if long else SCENES
    told = _same(dropin, real, " / ".join(scenes))
    assert told.hits + told.misses >= 18, told.line
    assert "uncacheable 0" in told.line


def test_programs_that_the_real_one_compiles(real: Path, dropin: Dropin) -> None:
    """The server leaves some compiles to NVRTC. Of `compiles_again`, it answers the first one."""
    scenes = ("says_odd_things", "asks_for_optix", "fails_late", "includes_its_own_files")
    told = _same(dropin, real, " / ".join((*scenes, "compiles_again")))
    assert "not UTF-8: 5" in told.line


def test_without_a_descriptor_at_first(real: Path, dropin: Dropin) -> None:
    """A program without free descriptors gets a kernel, because the drop-in is already connected.

    Without the drop-in, this compile fails, because NVRTC can't load its other libraries.
    """
    bare, told = _both(dropin, real, "has_none_at_first")
    _, fails, later = bare.output.splitlines()
    assert fails.split()[1] != "0"
    _, first, second = told.output.splitlines()
    assert first == second
    assert first.split()[1] == "0"
    assert later in (fails, second)  # NVRTC 13.0 does not retry


# -- paths with another meaning --------------------------------------------------------------------


@as_root
def test_another_root_directory(real: Path, dropin: Dropin, include: Path, tmp_path: Path) -> None:
    other = tmp_path / "root" / str(include).lstrip("/")
    other.mkdir(parents=True)
    (other / "scale.h").write_text("#define SCALE 3\n")
    told = _same(dropin, real, "changes_its_root", include, tmp_path / "root")
    assert len(set(told.output.splitlines()[1:])) == 2
    assert (told.hits, told.misses) == (0, 1)


@as_root
def test_another_mount_namespace(real: Path, dropin: Dropin, include: Path, tmp_path: Path) -> None:
    """A program in another mount namespace gets the header that its path means there."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "scale.h").write_text("#define SCALE 3\n")
    client = f"{sys.executable} {CLIENTS / 'forms.py'} {include} {real}"
    script = f"{client}; unshare -m sh -c 'mount --bind {other} {include} && {client}'; {client}"
    bare = dropin.bare("sh", "-c", script)
    if len(bare.output.splitlines()) != 3:
        pytest.skip(f"no directory can be mounted here: {bare.errors}")
    told = dropin.run("sh", "-c", script)
    assert told.output == bare.output
    assert len(set(bare.output.splitlines())) == 2
    assert (told.hits, told.misses) == (1, 1), told.line
    assert "another user, root directory or mount namespace" in told.line


@as_root
def test_another_user(real: Path, dropin: Dropin, include: Path) -> None:
    """A compile that another user may not do fails, although the server may read the header."""
    (include / "scale.h").chmod(0o600)
    bare, told = _both(dropin, real, "becomes_another_user", include)
    _, first, second = told.output.splitlines()
    assert first == bare.output.splitlines()[1]
    # The second result may differ from the one without, because the other user may not be able to
    # read NVRTC itself.
    assert second != first
    assert second.split()[1] != "0"


# -- the loader ------------------------------------------------------------------------------------


@as_root
@not_emulated("does not tell a program that its group is another one (AT_SECURE)")
def test_a_program_of_another_group(linked: Path, dropin: Dropin, include: Path) -> None:
    """A set-gid program uses the real NVRTC, because the loader ignores `LD_PRELOAD` for it."""
    program = Path(shutil.copy(linked, dropin.folder))
    os.chown(program, 0, 65534)
    program.chmod(0o2755)
    told = dropin.same(program, include)
    assert told.code == 0
    assert "none used NVRTC" in told.line
    assert told.errors == f"{told.line}\n"


def test_an_empty_environment(linked: Path, dropin: Dropin, include: Path) -> None:
    bare, told = dropin.bare(linked, include), dropin.run("env", "-i", linked, include)
    assert (told.code, told.output) == (0, bare.output)
    assert "none used NVRTC" in told.line


def test_the_first_of_two_libraries(real: Path, dropin: Dropin, tmp_path: Path) -> None:
    """A program gets the first NVRTC in `LD_LIBRARY_PATH`, as without the drop-in."""
    second = tmp_path / "second"
    second.mkdir()
    for path in real.parent.glob("libnvrtc*"):
        (second / path.name).symlink_to(path)
    (tmp_path / "first").mkdir()
    shutil.copy(real, tmp_path / "first" / real.name)  # without its builtins library
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); "
        "library.nvrtcGetPCHHeapSize(None); "  # loads the real NVRTC
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libnvrtc.so' in line})"
    )
    for order in (("first", "second"), ("second", "first")):
        variable = ":".join(str(tmp_path / name) for name in order)
        command = (sys.executable, "-c", code, real.name)
        told = dropin.same(*command, LD_LIBRARY_PATH=variable)
        wanted = tmp_path / "first" / real.name if order[0] == "first" else real
        assert told.output.strip() == str(wanted)


# -- the user's directories ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": "/proc/none", "KCACHE_DIR": "", "XDG_CACHE_HOME": ""},
        {"KCACHE_DIR": "/proc/none"},
        {"XDG_RUNTIME_DIR": "relative", "TMPDIR": "/proc/none"},
    ],
    ids=str,
)
def test_nothing_can_be_written(variables: dict[str, str], real: Path, dropin: Dropin) -> None:
    told = dropin.same(sys.executable, ODD, real, "compiles", 1, **variables)
    assert (told.code, bool(told.line)) == (0, True)
    assert told.errors == f"{told.line}\n"


def test_no_home_is_known(real: Path, dropin: Dropin) -> None:
    names = ("HOME", "KCACHE_DIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR")
    unset = [part for name in names for part in ("-u", name)]
    command = (sys.executable, ODD, real, "compiles", 1)
    bare = dropin.bare(*command)
    # The system knows no home of this user either: a test must not write to a real home.
    code = (
        "import os, sys, pwd; os.getuid = lambda: 1 << 30\n"
        "from kcache.__main__ import main; sys.argv[0] = 'kcache'; main()"
    )
    told = dropin.bare("env", *unset, sys.executable, "-c", code, "run", "--stats", "--", *command)
    assert (told.code, told.output) == (0, bare.output), told.errors


def test_arguments_are_passed_byte_for_byte(dropin: Dropin) -> None:
    code = "import os, sys; print([os.fsencode(each) for each in sys.argv[1:]])"
    arguments = [b"a\nb", b"\xff\xfe", "\N{SNOWMAN}".encode(), b"", b"--", b"--stats", b"-"]
    command = [os.fsencode(each) for each in (*KCACHE, "run", sys.executable, "-c", code)]
    for variables in ({}, {"LC_ALL": "C"}, {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}):
        done = subprocess.run(
            [*command, *arguments],
            env={**dropin.environment, **variables},
            capture_output=True,
            check=True,
        )
        assert done.stdout == f"{arguments}\n".encode()
