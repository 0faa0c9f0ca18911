"""Programs into which the drop-in can't be preloaded run as without `kcache run`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from core.helpers import as_root, not_emulated
from dropin.conftest import CLIENTS, KCACHE, Dropin, compile_linked

#: Starts a process, so that the loader runs twice; uses memory, also thread-local memory.
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char *kept = malloc(100);
    snprintf(kept, 100, "%d arguments", argc);
    fprintf(stderr, "%s\\n", kept);
    fflush(stderr);
    puts(kept);
    fflush(stdout);
    free(kept);
    if (argc > 1)
        return 3;
    if (fork() == 0)
        return execl(argv[0], argv[0], "again", (char *)0);
    int status = 0;
    wait(&status);
    return WEXITSTATUS(status) + 4;
}
"""
#: More thread-local memory than the loader reserves for libraries that are loaded later.
THREAD_LOCAL = '__attribute__((tls_model("initial-exec"))) __thread char large[1 << 14];'


def _compiled(folder: Path, *commands: str, **sources: str) -> Path:
    """Build a program from C sources and return its path, or skip the test if that fails."""
    for name, text in sources.items():
        (folder / f"{name}.c").write_text(text)
    for command in commands:
        words = command.split()
        if shutil.which(words[0]) is None:
            pytest.skip(f"{words[0]} is not installed")
        made = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"{command}: {made.stderr.strip()}")
    return folder / "program"


def _is_as_without(program: Path, dropin: Dropin) -> None:
    bare, told = dropin.bare(program), dropin.run(program, stats=False)
    if bare.code != 7:
        pytest.skip(f"the program does not run here: {bare.errors}")
    assert bare.output == "1 arguments\n2 arguments\n"
    assert (told.code, told.output, told.errors) == (bare.code, bare.output, bare.errors)


@pytest.mark.parametrize(
    "compiler",
    [
        "gcc -fsanitize=address",
        "gcc -fsanitize=address -static-libasan",
        "gcc -fsanitize=thread",
        "gcc -fsanitize=undefined",
        "clang -fsanitize=address",
        "clang -fsanitize=address -shared-libasan",
        "gcc -static",
        "gcc -static-pie",
        "gcc -m32",
        "gcc -m32 -static",
        "musl-gcc",
        "musl-gcc -static",
    ],
)
def test_programs(compiler: str, dropin: Dropin, tmp_path: Path) -> None:
    program = _compiled(tmp_path, f"{compiler} program.c -o program", program=SOURCE)
    _is_as_without(program, dropin)


def test_a_library_with_much_memory_for_each_thread(dropin: Dropin, tmp_path: Path) -> None:
    """A program runs with a library that needs much thread-local memory, such as jemalloc."""
    program = _compiled(
        tmp_path,
        "gcc -shared -fPIC large.c -o liblarge.so",
        "gcc program.c -o program -L. -Wl,--no-as-needed -llarge -Wl,-rpath,$ORIGIN",
        program=SOURCE,
        large=THREAD_LOCAL,
    )
    _is_as_without(program, dropin)


# -- programs that are linked with NVRTC, or open it -----------------------------------------------


@pytest.fixture(scope="module")
def confined(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A client that can't open any file when it first calls NVRTC."""
    return compile_linked(real, "confined.c", tmp_path_factory.mktemp("confined") / "program")


@pytest.mark.parametrize(
    ("confinement", "server"),
    [*((each, True) for each in ("nothing", "files 3", "full", "chroot")), ("full", False)],
)
def test_a_program_that_is_linked_has_nvrtc_from_the_start(
    confinement: str, server: bool, confined: Path, dropin: Dropin, tmp_path: Path
) -> None:
    if confinement == "chroot" and os.geteuid() != 0:
        pytest.skip("only root may do it")
    arguments = [*confinement.split(), str(tmp_path)]
    bare = dropin.bare(confined, *arguments)
    where = () if server else ("env", "KCACHE_DROPIN_SOCKET=/nonexistent")
    told = dropin.run(*where, confined, *arguments)
    assert bare.code == told.code == 3, told.errors
    wanted = bare.output.splitlines()
    if server and confinement in ("files 3", "full"):  # NVRTC itself can't compile then
        assert wanted[3] == "7"
        wanted[3] = "0"
    assert told.output.splitlines() == wanted


@not_emulated("has no ptrace, which LeakSanitizer needs")
def test_a_program_with_a_sanitizer_that_is_linked(real: Path, dropin: Dropin) -> None:
    try:
        program = compile_linked(
            real, "confined.c", dropin.folder / "program", "-fsanitize=address"
        )
    except subprocess.CalledProcessError:
        pytest.skip("AddressSanitizer is not installed")
    # With the sanitizer, NVRTC's RPATH has no effect, so NVRTC does not find its builtins library.
    dropin.environment["LD_LIBRARY_PATH"] = str(real.parent)
    told = dropin.same(program, "nothing")
    assert (told.code, told.misses, "\n0\n" in told.output) == (3, 1, True)


@pytest.mark.parametrize("name", ["libnvrtc.so.13.99", "libnvrtc.so.99", "/no/libnvrtc.so.13"])
def test_a_library_that_is_not_there(name: str, dropin: Dropin) -> None:
    code = f"import ctypes\ntry: ctypes.CDLL({name!r})\nexcept OSError as error: print(error)"
    assert "cannot open shared object file" in dropin.same(sys.executable, "-c", code).output


# -- what a program inherits -----------------------------------------------------------------------

IGNORES = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execvp(sys.argv[1], sys.argv[1:])
"""
INHERITS = """
import signal, subprocess, sys
print(signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, []))
subprocess.run(sys.argv[1:], input="a[1] = 1;", text=True)
sys.exit(4)
"""


@pytest.mark.parametrize("stats", [False, True], ids=["", "--stats"])
def test_signals_that_are_ignored_or_blocked(stats: bool, real: Path, dropin: Dropin) -> None:
    """The program inherits an ignored SIGCHLD and blocked signals, which the launcher handles."""
    client = (sys.executable, "-c", INHERITS, sys.executable, CLIENTS / "repeated.py", real)
    starts = (sys.executable, "-c", IGNORES)
    bare = dropin.bare(*starts, *client)
    run = (*KCACHE, "run", *(["--stats"] if stats else []), "--")
    told = dropin.bare(*starts, *run, *client)
    assert (told.code, told.output) == (bare.code, bare.output) == (4, bare.output), told.errors
    assert told.misses == (1 if stats else -1)
    assert "warning" not in told.errors


@as_root
def test_a_pid_namespace_of_the_program(dropin: Dropin) -> None:
    """`kcache run` leaves the place of the first process in a PID namespace to the program."""
    script = "(exec sleep 60) >/dev/null 2>&1 & /bin/echo one; /bin/echo two; kill -9 $!"
    unshared = ("unshare", "--pid")
    bare = dropin.bare(*unshared, "sh", "-c", script)
    if bare.output != "one\ntwo\n":
        pytest.skip(f"no PID namespace can be made here: {bare.errors}")
    told = dropin.bare(*unshared, *KCACHE, "run", "--", "sh", "-c", script)
    assert (told.code, told.output) == (bare.code, bare.output)
    assert "PID namespace" in told.errors


# -- unsafe interface libraries --------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "KCACHE_DROPIN_LIBRARIES"])
def test_libraries_in_an_unsafe_directory(variable: str, dropin: Dropin, tmp_path: Path) -> None:
    """Interface libraries are not used if others can write to a directory above them."""
    folder = tmp_path / "above" / "home"
    folder.mkdir(parents=True)
    environment = {variable: str(folder)}
    if variable == "XDG_CACHE_HOME":
        environment["KCACHE_DROPIN_LIBRARIES"] = ""
    else:
        shutil.copytree(dropin.libraries, folder, dirs_exist_ok=True)
    show = ("sh", "-c", "echo $LD_PRELOAD")
    good = dropin.run(*show, stats=False, **environment)
    assert str(folder) in good.output or not good.errors  # a wheel has libraries of its own
    for writable in (folder, folder.parent):
        mode = writable.stat().st_mode
        writable.chmod(0o777)
        told = dropin.run(*show, stats=False, **environment)
        writable.chmod(mode)
        assert str(folder) not in told.output
        if str(folder) in good.output:
            assert f"others can write to {writable}" in told.errors


@pytest.mark.parametrize("name", ["libkcache_nvrtc13.so", "x86_64/libkcache_preload13.so"])
def test_a_library_with_unsafe_rights(name: str, dropin: Dropin, tmp_path: Path) -> None:
    folder = tmp_path / "libraries"
    shutil.copytree(dropin.libraries, folder)
    if not (folder / name).exists():
        pytest.skip(f"{name} is not built on this architecture")
    (folder / name).chmod(0o777)
    told = dropin.run("sh", "-c", "echo $LD_PRELOAD", KCACHE_DROPIN_LIBRARIES=str(folder))
    assert told.output == "\n"
    assert f"others can write to {folder / name}" in told.errors
