"""Starts of nvcc: under `kcache run`, every way to start it is answered, and behaves like nvcc."""

import os
import pty
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvcc.conftest import Service, written

from kcache.dropin import build
from kcache.dropin import run_environment as env

CUBIN = ["-cubin", "-arch=sm_90", "-Iinclude", "k.cu", "-o", "k.cubin"]

#: Starts nvcc in as many ways as Python has.
PROGRAM = """\
import os, subprocess, sys
nvcc, *arguments = sys.argv[1:]
text = " ".join([nvcc, *arguments])
by_name = " ".join(["nvcc", *arguments])
os.environ["PATH"] = os.path.dirname(nvcc) + ":" + os.environ["PATH"]
starts = [
    lambda: subprocess.call([nvcc, *arguments]),
    lambda: subprocess.call([nvcc, *arguments], close_fds=False),
    lambda: subprocess.call(text, shell=True),
    lambda: subprocess.call(["bash", "-c", text + "; exit $?"]),
    lambda: os.system(text),
    lambda: os.popen(text).close() or 0,
    lambda: os.waitpid(os.posix_spawn(nvcc, [nvcc, *arguments], os.environ), 0)[1],
    lambda: os.waitpid(os.posix_spawnp(nvcc, [nvcc, *arguments], os.environ), 0)[1],
    lambda: os.spawnv(os.P_WAIT, nvcc, [nvcc, *arguments]),
    lambda: os.spawnve(os.P_WAIT, nvcc, [nvcc, *arguments], os.environ),
    lambda: subprocess.call(["nvcc", *arguments]),
    lambda: os.system(by_name),
    lambda: os.spawnvp(os.P_WAIT, "nvcc", ["nvcc", *arguments]),
    lambda: os.spawnvpe(os.P_WAIT, "nvcc", ["nvcc", *arguments], os.environ),
]
for start in starts:
    os.path.exists("k.cubin") and os.remove("k.cubin")
    assert start() == 0
    assert os.path.getsize("k.cubin")
print(len(starts))
"""


def run(service: Service, *command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return service.kcache("run", "--stats", "--", *command, cwd=cwd, LANG=None)


@pytest.mark.slow
def test_every_way_to_start_nvcc_is_answered(service: Service, project: Path) -> None:
    done = run(service, sys.executable, "-c", PROGRAM, service.nvcc, *CUBIN, cwd=project)
    assert done.returncode == 0, done.stderr
    starts = int(done.stdout)
    assert f"hits {starts - 2}; misses 2;" in done.stderr  # by the path of nvcc, and by its name
    again = run(service, sys.executable, "-c", PROGRAM, service.nvcc, *CUBIN, cwd=project)
    assert f"hits {starts}; misses 0;" in again.stderr
    assert again.stderr.endswith(f"programs: {starts} x nvcc\n")
    for counts in ("hits 0; misses 1;", "hits 1; misses 0;"):  # with another `PATH`
        assert counts in run(service, "nvcc", *CUBIN, cwd=project).stderr


STATIC = """
#include <unistd.h>
int main(int argc, char **argv) { return argc < 2 ? 2 : execv(argv[1], argv + 1); }
"""


@pytest.mark.slow
def test_a_static_program_and_a_script_start_it(service: Service, project: Path) -> None:
    """torch runs nvcc through ccache, which is static, so no library is preloaded into it."""
    (project / "static.c").write_text(STATIC)
    compiler = build.compiler()
    assert compiler is not None
    command = [compiler, "-static", "-o", project / "static", project / "static.c"]
    subprocess.run([*map(str, command)], check=True)
    for hits in (0, 1):
        done = run(service, project / "static", service.nvcc, *CUBIN, cwd=project)
        assert (done.returncode, f"hits {hits}; misses {1 - hits};" in done.stderr) == (0, True)
    (project / "bin").mkdir()
    script = project / "bin/nvcc"
    script.write_text(f'#!/bin/sh -e\nexec {service.nvcc} -DMORE "$@"\n')
    script.chmod(0o755)
    for hits in (0, 1):
        done = run(service, script, *CUBIN, cwd=project)
        assert (done.returncode, f"hits {hits}; misses {1 - hits};" in done.stderr) == (0, True)


# -- what happens to a start -----------------------------------------------------------------------


def test_an_error_is_nvccs(service: Service, project: Path) -> None:
    (project / "k.cu").write_text("int = 3;\n")
    by, alone = (call(*CUBIN, cwd=project) for call in (service.run, service.alone))
    assert (by.returncode, by.stdout, by.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert by.returncode != 0
    assert (service.counts["failed"], service.counts["misses"]) == (1, 0)


def test_a_warning_comes_back(service: Service, project: Path) -> None:
    (project / "include/header.h").write_text("#warning careful\n#define FACTOR 3\n")
    first, second = (service.run(*CUBIN, cwd=project) for _ in range(2))
    assert service.counts["hits"] == 1
    assert b"careful" in first.stderr
    assert (second.stdout, second.stderr) == (first.stdout, first.stderr)


def test_a_missing_nvcc_fails_as_it_does_in_a_shell(service: Service, project: Path) -> None:
    done = service.run(*CUBIN, cwd=project, program=project / "bin/nvcc")
    assert done.returncode == 127


def test_the_compiler_is_that_of_the_toolkit_unless_it_was_named(
    service: Service, project: Path
) -> None:
    """torch and DeepGEMM start `$CUDA_HOME/bin/nvcc` even if `PATH` has another nvcc."""
    (project / "other").mkdir()
    (project / "other/nvcc").write_text("#!/bin/sh\necho other\n")
    (project / "other/nvcc").chmod(0o755)
    told = {"PATH": f"{project}/other:{os.environ['PATH']}"}
    homes = {"CUDA_HOME": str(service.nvcc.parent.parent)}
    for arguments, variables, expected in (
        ([], homes, "release"),
        (["nvcc"], homes, "other"),
        ([], {}, "other"),
    ):
        done = service.start(
            service.client, *arguments, "--version", text=True, **told, **variables
        )
        assert expected in done.stdout


def test_without_a_service_nvcc_runs(service: Service, project: Path) -> None:
    done = service.run(*CUBIN, cwd=project, **{env.SOCKET: str(project / "nothing")})
    assert done.returncode == 0
    assert (project / "k.cubin").stat().st_size


def to_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"old")
    path.symlink_to("target")


def to_hard_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"old")
    path.hardlink_to(path.parent / "target")


def to_folder(path: Path) -> None:
    path.mkdir()


def to_nothing(path: Path) -> None:
    path.symlink_to("/dev/null")


def to_read_only(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o400)


def to_private(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare", [to_link, to_hard_link, to_folder, to_nothing, to_read_only, to_private]
)
def test_an_unusual_output_is_as_with_nvcc_alone(
    prepare: Callable[[Path], None], service: Service, project: Path
) -> None:
    output = project / "k.cubin"
    assert service.run(*CUBIN, cwd=project).returncode == 0

    def outcome(by: Callable[..., subprocess.CompletedProcess[bytes]]) -> tuple[object, ...]:
        if output.is_dir() and not output.is_symlink():
            output.rmdir()
        output.unlink(missing_ok=True)
        (project / "target").unlink(missing_ok=True)
        prepare(output)
        done = by(*CUBIN, cwd=project)
        status = output.lstat()
        found = written(project)
        return done.returncode, done.stderr, status.st_mode, status.st_nlink, found

    assert outcome(service.run) == outcome(service.alone)


@pytest.mark.slow
def test_a_pipe_as_output_gets_the_bytes(service: Service, project: Path) -> None:
    assert service.run(*CUBIN, cwd=project).returncode == 0
    expected = (project / "k.cubin").read_bytes()
    (project / "k.cubin").unlink()
    os.mkfifo(project / "k.cubin")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((project / "k.cubin").read_bytes()))
    reader.start()
    done = service.run(*CUBIN, cwd=project)
    reader.join(60)
    alone_fails = done.returncode != 0  # ptxas may have to seek in its output
    assert alone_fails or read == [expected]
    assert stat.S_ISFIFO((project / "k.cubin").stat().st_mode)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_leaves_no_lock(
    number: signal.Signals, service: Service, project: Path
) -> None:
    """After the signal, the next start compiles without waiting for the first one."""
    (project / "include/header.h").write_text("#define FACTOR 3\n#include <cuda/std/tuple>\n")
    process = service.begin(*CUBIN, cwd=project, start_new_session=True)
    while not _is_compiling(process.pid):
        assert process.poll() is None
    os.killpg(process.pid, number)
    assert process.wait(60) == -number
    assert service.run(*CUBIN, cwd=project).returncode == 0
    assert service.run(*CUBIN, cwd=project).returncode == 0
    assert service.counts["hits"] == 1


@pytest.mark.slow
def test_a_stopped_start_delays_others_no_longer_than_the_limit(
    service: Service, project: Path
) -> None:
    (project / "include/header.h").write_text("#define FACTOR 3\n#include <cuda/std/tuple>\n")
    service.restart(KCACHE_WAIT="1")
    with service.begin(*CUBIN, cwd=project, start_new_session=True) as process:
        while not _is_compiling(process.pid):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            assert service.run(*CUBIN, cwd=project).returncode == 0
            assert process.poll() is None
            assert service.run(*CUBIN, cwd=project).returncode == 0
            assert service.counts["hits"] == 1
        finally:
            os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(60) == 0


def _is_compiling(process: int) -> bool:
    """Return whether a child of `process` is the compiler."""
    tasks = Path(f"/proc/{process}/task/{process}/children")
    return any(
        Path(f"/proc/{child}/comm").read_text().strip() != "kcache-nvcc"
        for child in tasks.read_text().split()
    )


@pytest.mark.slow
def test_text_for_a_terminal_is_not_stored(service: Service, project: Path) -> None:
    (project / "include/header.h").write_text("#warning careful\n#define FACTOR 3\n")
    environment = {**service.environment, env.SOCKET: service.socket, "TERM": "xterm"}
    texts = []
    for command in ([service.client, service.nvcc], [service.client, service.nvcc], [service.nvcc]):
        master, slave = pty.openpty()
        with subprocess.Popen(
            [*command, *CUBIN], cwd=project, env=environment, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            texts.append(b"".join(_until_end(master)))
            assert process.wait(60) == 0
        os.close(master)
    assert texts[0] == texts[1] == texts[2]
    assert b"\x1b[" in texts[0]
    assert service.counts["hits"] == 0


def _until_end(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(descriptor, 1 << 16)
        except OSError:  # the other end is closed
            return


@pytest.mark.slow
def test_many_starts_at_once_compile_once(service: Service, project: Path) -> None:
    started = [service.begin(*CUBIN, cwd=project) for _ in range(8)]
    assert [process.wait(120) for process in started] == [0] * 8
    assert (service.counts["misses"], service.counts["hits"]) == (1, 7)


@pytest.mark.parametrize("streams", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_text_does_not_reach_what_is_opened_in_place_of_a_closed_stream(
    streams: str, service: Service, project: Path
) -> None:
    (project / "warns.cu").write_text("#warning old\n")
    command = ["sh", "-c", f'"$@" {streams}', "sh"]
    start = [service.nvcc, "-cubin", "-arch=sm_90", "warns.cu", "-o", "warns.cubin"]
    environment = {**service.environment, env.SOCKET: service.socket}
    ends = [
        subprocess.run(each, cwd=project, env=environment, timeout=280, check=False).returncode
        for each in ([*command, service.client, *start], [*command, *start])
    ]
    assert ends[0] == ends[1]
