"""`kcache run COMMAND` behaves as COMMAND alone: exit status, streams, signals, job control."""

import ctypes
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from core.helpers import not_emulated
from dropin.conftest import CLIENTS, KCACHE, Dropin, is_there

import kcache.dropin
from kcache.daemons.sockets import status


@pytest.fixture(params=[False, True], ids=["", "--stats"])
def stats(request: pytest.FixtureRequest) -> bool:
    """Whether `--stats` is given, so that the launcher stays as the program's parent."""
    return bool(request.param)


@pytest.fixture
def typed(stats: bool) -> str:
    """The beginning of a `kcache run` command line for a shell."""
    return " ".join((*KCACHE, "run", *(["--stats"] if stats else [])))


#: A shell script that prints properties of its process and of its signals.
TELLS = """
echo out; echo err >&2; cat
ulimit -n; umask; pwd; ps -o comm= -p $PPID >/dev/null; echo $#
yes | head -1; sh -c 'kill -PIPE $$'; echo $?
trap 'echo caught' INT; kill -INT $$; echo after
trap '' INT; trap; exit 3
"""


@pytest.mark.parametrize("script", [TELLS, "kill -TERM $$", "kill -KILL $$"])
def test_scripts(stats: bool, script: str, dropin: Dropin) -> None:
    bare, told = dropin.bare("sh", "-c", script), dropin.run("sh", "-c", script, stats=stats)
    errors = told.errors.replace(f"{told.line}\n", "") if stats else told.errors
    assert (told.code, told.output, errors) == (bare.code, bare.output, bare.errors)
    assert bool(told.line) == stats


@pytest.mark.parametrize(
    ("command", "code"), [("nosuchcommand", 127), ("/etc/passwd", 126), ("", 127)]
)
def test_a_command_that_can_not_run(stats: bool, command: str, code: int, dropin: Dropin) -> None:
    told = dropin.run(command, stats=stats)
    assert told.code == code
    assert f"kcache: error: {command}: " in told.errors


@pytest.mark.parametrize("place", [".", "nowhere/list.jsonl", "notes"])
def test_a_list_that_can_not_be_written_is_2(place: str, dropin: Dropin) -> None:
    (dropin.folder / "notes").write_text("mine")
    told = dropin.bare(*KCACHE, "run", "--record", place, "echo", "ran")
    assert (told.code, told.output) == (2, "")
    assert place in told.errors
    assert (dropin.folder / "notes").read_text() == "mine"


@pytest.mark.parametrize(("name", "stats"), [("./plain", True), ("plain", False)])
def test_a_script_without_a_first_line(name: str, stats: bool, dropin: Dropin) -> None:
    """A text file without `#!` is run by a shell, as the C library's `execvp` does, or `env`."""
    script = dropin.folder / "plain"
    script.write_text('echo "$0" "$@"\nexit 3\n')
    script.chmod(0o755)
    path = f"{dropin.folder}:{os.environ['PATH']}"
    bare = dropin.bare("env", name, "a b", PATH=path)
    told = dropin.run(name, "a b", stats=stats, PATH=path)
    assert (told.code, told.output) == (bare.code, bare.output) != (0, "")


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(
    typed: str, closed: str, real: Path, dropin: Dropin, tmp_path: Path
) -> None:
    """A program whose standard streams are closed can use the cache."""
    client = f"{sys.executable} {CLIENTS / 'odd.py'} {real} compiles 1"
    told = dropin.bare("sh", "-c", f"{typed} {client} {closed}")
    assert (told.code, told.errors.replace(f"{told.line}\n", "")) == (0, "")
    counts = json.loads(dropin.bare(*KCACHE, "stats", "--json").output)
    assert counts["misses"] == 1


def _links(folder: Path) -> list[str]:
    """Return the targets of the descriptors in a folder of /proc, except those closed meanwhile."""
    found: list[str] = []
    for each in folder.iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(each))
    return found


def test_the_server_keeps_no_descriptor_of_the_launcher(dropin: Dropin) -> None:
    read, write = os.pipe()
    code = "import os, sys; print(os.readlink(f'/proc/self/fd/{sys.argv[1]}'), flush=True); input()"
    command = (*KCACHE, "run", sys.executable, "-c", code, write)
    with dropin.starts(*command, pass_fds=[write]) as program:
        pipe = program.stdout.readline().strip()
        (path,) = dropin.runtime.glob("kcache-*/programs-*")
        about = status(str(path))
        folder = Path("/proc", str(about["process"]), "fd")
        assert pipe.startswith("pipe:")
        assert pipe not in _links(folder)
        program.communicate("\n")
    os.close(read)
    os.close(write)


def test_the_launcher_becomes_the_program(dropin: Dropin) -> None:
    script = "echo $$; wait; echo $(ps --no-headers --ppid $$ | wc -l)"
    with dropin.starts(*KCACHE, "run", "sh", "-c", script) as program:
        output, _ = program.communicate(timeout=60)
    own, children = output.split()
    assert int(own) == program.pid
    assert int(children) == 1  # the subshell that counts the children


def test_earlier_preloads_stay_first(dropin: Dropin) -> None:
    told = dropin.run("sh", "-c", "echo $LD_PRELOAD", LD_PRELOAD="libc.so.6")
    assert told.output.startswith("libc.so.6:")
    assert "libkcache_preload13.so:" in told.output


def test_one_inside_the_other_uses_the_outer_server(dropin: Dropin, real: Path) -> None:
    client = f"echo 'a[0] = 0;' | {sys.executable} {CLIENTS / 'repeated.py'} {real}"
    inner = " ".join((*KCACHE, "run", "--", "sh", "-c", f'"{client}"'))
    told = dropin.run("sh", "-c", f"{client}; {inner}; echo $LD_PRELOAD")
    first, second, preloaded = told.output.splitlines()
    assert first == second
    assert (told.hits, told.misses) == (1, 1)
    assert preloaded.count("libkcache_preload13.so") == 1


@pytest.mark.skipif(
    bool(list(Path(kcache.dropin.__file__).parent.rglob("libkcache_*.so"))),
    reason="the installed wheel has the libraries",
)
def test_without_libraries_commands_agree_why(dropin: Dropin, tmp_path: Path) -> None:
    told = (
        "kcache can't replace NVRTC here: it needs a C compiler at its first use, or a wheel for "
        "this platform"
    )
    environment = {
        "KCACHE_DROPIN_LIBRARIES": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": str(tmp_path),
    }
    program = ("run", "--stats", "/bin/sh", "-c", "exit 5")
    commands = (program, ("doctor",), ("doctor", "--program", "/bin/sh"), ("server", "start"))
    done = [dropin.bare(*KCACHE, *each, **environment) for each in commands]
    for each in done:
        assert told in " ".join(f"{each.output}\n{each.errors}".split())
    assert done[0].code == 5
    assert done[0].errors == f"kcache: warning: /bin/sh runs without the cache: {told}\n"
    assert done[3].code == 1
    if is_there("cuda.core"):
        shown = json.loads(dropin.bare(*KCACHE, "integrations", "--json", **environment).output)
        covered = {each["framework"]: (each["covered_by"], each["line"]) for each in shown}
        assert covered["cuda.bindings"] == ("not supported", told)
        assert covered["cuda.core"][0] == "an adapter"
    strict = dropin.bare(*KCACHE, *program, **environment, KCACHE_ON_MISS="error")
    assert strict.code == 125
    what = "does not run without the cache, because KCACHE_ON_MISS=error allows no compile"
    assert strict.errors == f"kcache: error: /bin/sh {what}: {told}\n"


@pytest.mark.parametrize("folder", ["a b", "a:b", "a$b"])
def test_libraries_where_the_loader_can_not_preload_from(folder: str, dropin: Dropin) -> None:
    """`kcache run` warns once, and does not preload: the loader would warn for each process."""
    named = dropin.folder / folder
    named.symlink_to(dropin.libraries)
    told = dropin.run("/bin/echo", "hello", stats=False, KCACHE_DROPIN_LIBRARIES=str(named))
    assert (told.code, told.output) == (0, "hello\n")
    assert re.fullmatch(r"kcache: warning: .* no program can preload from .*\n", told.errors)


#: Runs a command as the first process of a PID namespace, as a container does.
_FIRST = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def first(dropin: Dropin) -> list[str]:
    """The beginning of a command that runs `kcache run` as the first process of a PID namespace."""
    probe = subprocess.run([*_FIRST, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no PID namespace: {probe.stderr.strip()}")
    return [*_FIRST, *KCACHE, "run"]


def test_first_in_a_container(stats: bool, first: list[str], dropin: Dropin, real: Path) -> None:
    """As the first process, `kcache run` hides orphans from the program, and counts are kept."""
    script = (
        "import os, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], input='a[1] = 1;', text=True, check=True)\n"
        "os.system('(sleep 0.1 &)')\n"  # an orphan
        "try:\n    os.waitpid(-1, 0)\n"
        "except ChildProcessError:\n    sys.exit(7)\n"
    )
    client = [sys.executable, CLIENTS / "repeated.py", real]
    flags = ["--stats"] if stats else []
    told = dropin.bare(*first, *flags, "--", sys.executable, "-c", script, *client)
    assert told.code == 7, told.errors
    assert told.misses == (1 if stats else -1)
    counts = dropin.bare(*KCACHE, "stats", "--json")
    assert json.loads(counts.output)["misses"] == 1
    assert list(dropin.runtime.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_in_a_container(number: signal.Signals, first: list[str], dropin: Dropin) -> None:
    script = f"trap 'exit 9' {number.name[3:]}; echo ready; while :; do sleep 0.1; done"
    with dropin.starts(  # without a terminal
        *first, "sh", "-c", script, start_new_session=True
    ) as namespace:
        assert namespace.stdout.readline() == "ready\n"
        children = Path(f"/proc/{namespace.pid}/task/{namespace.pid}/children").read_text()
        os.kill(int(children), number)
        assert namespace.wait(60) == 9


# -- at a terminal ---------------------------------------------------------------------------------


class Terminal:
    """An interactive shell on a pseudo-terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.shell, self.fd = pty.fork()
        if self.shell == 0:
            variables = {**environment, "PS1": "$ ", "ENV": "", "TERM": "dumb"}
            os.execve("/bin/bash", ["bash", "--norc", "--noediting", "-i"], variables)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str) -> str:
        """Wait for `text` and return what came before it. Remove both from `seen`."""
        while text not in self.seen:
            assert select.select([self.fd], [], [], 60)[0], f"expected {text!r}, got {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> None:
        os.kill(self.shell, signal.SIGKILL)
        os.waitpid(self.shell, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(dropin: Dropin) -> Iterator[Terminal]:
    terminal = Terminal(dropin.environment)
    terminal.expect("$ ")
    yield terminal
    terminal.close()


#: A Python program, because dash loses a Ctrl-C that comes while it starts a command.
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("be" "gun", flush=True)
while True:
    signal.pause()
"""


def test_ctrl_c(typed: str, terminal: Terminal, dropin: Dropin) -> None:
    (dropin.folder / "interrupted.py").write_text(INTERRUPTED)
    terminal.type(f"{typed} {sys.executable} {dropin.folder}/interrupted.py | cat\n")
    terminal.expect("begun")
    terminal.type("\x03")
    terminal.expect("$ ")
    terminal.type("echo st''atus ${PIPESTATUS[0]}\n")  # the status of the job
    terminal.expect("status 130")


@pytest.mark.parametrize("stats", [True])  # without `--stats`, the launcher becomes the program
def test_a_program_that_handles_ctrl_c(typed: str, terminal: Terminal) -> None:
    script = 'trap "echo cau""ght; exit 9" INT; echo be""gun; while :; do sleep 0.05; done'
    terminal.type(f"{typed} sh -c '{script}'; echo st''atus $?\n")
    terminal.expect("begun")
    terminal.type("\x03")
    terminal.expect("caught")
    terminal.expect("status 9")


#: Signals arrive through a descriptor, so none is lost between a check and the wait for a line.
STOPPABLE = """
import os, select, signal, sys
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGCONT, lambda *_: None)
print("be" "gun", flush=True)
while True:
    ready = select.select([0, read], [], [])[0]
    if read in ready:
        os.read(read, 99)
        print("resu" "med", flush=True)
    if 0 in ready:
        print("go" "t", sys.stdin.readline().strip(), flush=True)
        sys.exit(4)
"""


def test_ctrl_z_and_back(typed: str, terminal: Terminal, dropin: Dropin) -> None:
    (dropin.folder / "stoppable.py").write_text(STOPPABLE)
    terminal.type(f"{typed} {sys.executable} {dropin.folder}/stoppable.py\n")
    terminal.expect("begun")
    for _ in range(3):
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.expect("$ ")
        terminal.type("echo the she''ll\n")
        terminal.expect("the shell")
        terminal.expect("$ ")
        terminal.type("fg\n")
        terminal.expect("resumed")
    terminal.type("word\n")
    terminal.expect("got word")
    terminal.expect("$ ")
    terminal.type("echo st''atus $?\n")
    terminal.expect("status 4")


#: Prints the number of each signal that it receives, and ends after the last one.
COUNTS = """
import signal
wanted = signal.valid_signals() - {signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("ready", flush=True)
number = 0
while number != signal.SIGRTMAX:
    number = signal.sigwait(wanted)
    print(int(number), flush=True)
"""


@not_emulated("handles some signals itself")
def test_every_signal_for_the_launcher_reaches_the_program_once(dropin: Dropin) -> None:
    """A signal reaches the program once, if it is sent to the launcher or to its process group."""
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    command = (*KCACHE, "run", "--stats", sys.executable, "-c", COUNTS)
    with dropin.starts(*command, stderr=subprocess.PIPE, process_group=0) as launcher:

        def line() -> str:
            assert select.select([launcher.stdout], [], [], 20)[0], "the program received no signal"
            return str(launcher.stdout.readline())

        try:
            assert line() == "ready\n"
            for number in sorted(numbers - {signal.SIGRTMAX}):
                for send in (os.kill, os.killpg):
                    send(launcher.pid, number)
                    assert line() == f"{number:d}\n"
            os.kill(launcher.pid, signal.SIGRTMAX)  # is the last one to be forwarded
            assert line() == f"{signal.SIGRTMAX:d}\n"
            assert launcher.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)


def test_the_launcher_holds_no_pipe_of_the_program(dropin: Dropin) -> None:
    read, write = os.pipe()
    code = f"import os, signal; [os.close(each) for each in (0, 1, {write})]; signal.pause()"
    command = (*KCACHE, "run", "--stats", sys.executable, "-c", code)
    with dropin.starts(*command, pass_fds=[write], process_group=0) as launcher:
        os.close(write)
        try:
            for end in (launcher.stdout, read):
                assert select.select([end], [], [], 20)[0], "the pipe is still open"
            assert (launcher.stdout.read(), os.read(read, 1)) == ("", b"")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    os.close(read)


# -- the program's environment and directory -------------------------------------------------------


def _with_environment(dropin: Dropin, environment: list[bytes], *command: object) -> str:
    """Run a command with exactly these bytes as its environment; return its output."""
    libc = ctypes.CDLL(None)
    words = [os.fsencode(str(word)) for word in command]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 1)
        argv = (ctypes.c_char_p * (len(words) + 1))(*words)
        libc.execve(words[0], argv, (ctypes.c_char_p * (len(environment) + 1))(*environment))
        os._exit(99)
    os.close(write)
    with open(read, errors="surrogateescape") as output:
        told = output.read()
    assert os.waitpid(child, 0)[1] == 0
    return told


@not_emulated("gives a program its environment in another order")
def test_the_environment_is_the_launchers_byte_for_byte(stats: bool, dropin: Dropin) -> None:
    """The program gets the launcher's environment, even variables that Python can't represent."""
    needed = ("KCACHE_DROPIN_LIBRARIES", "KCACHE_DIR", "XDG_RUNTIME_DIR", "PATH")
    own = [os.fsencode(f"{name}={dropin.environment[name]}") for name in needed]
    odd = [b"=C:=C:\\x", b"=", b"no_value", b"A=1", b"A=2", b"EMPTY=", b"B=\xff"]
    program = ("/usr/bin/env", "-0")
    for locale in ([], [b"LC_CTYPE=C"], [b"LC_ALL=C"]):
        environment = [*own, *odd, *locale]
        bare = _with_environment(dropin, environment, *program)
        flags = ["--stats"] if stats else []
        told = _with_environment(dropin, environment, *KCACHE, "run", *flags, "--", *program)
        added = set(told.split("\0")) - set(bare.split("\0"))
        assert sorted(name.partition("=")[0] for name in added) == [
            "KCACHE_DROPIN_SOCKET",
            "LD_PRELOAD",
        ]
        assert [e for e in told.split("\0") if e not in added] == bare.split("\0")


def test_variables_of_python_are_the_programs_alone(stats: bool, dropin: Dropin) -> None:
    variables = {"PYTHONINSPECT": "1", "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}
    told = dropin.run("sh", "-c", "exit 3", stats=stats, **variables)
    assert (told.code, told.output, told.errors.strip()) == (3, "", told.line)


def test_neither_service_nor_launcher_keeps_the_directory_busy(real: Path, dropin: Dropin) -> None:
    """No process keeps the launcher's directory busy, though a relative cache directory works."""
    body = f"{sys.executable} {CLIENTS / 'odd.py'} {real} compiles 1; readlink /proc/*/cwd"
    told = dropin.run("sh", "-c", f"cd /; {body}", KCACHE_DIR="relative")
    assert str(dropin.folder) not in told.output.splitlines()
    assert (told.misses, (dropin.folder / "relative").is_dir()) == (1, True), told.errors


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_ignored_signals_stay_ignored(shell: str, typed: str, dropin: Dropin) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    show = "grep SigIgn /proc/self/status"
    for ignored in ("", "trap '' PIPE XFSZ;", "trap '' PIPE INT HUP;"):
        bare = dropin.bare(shell, "-c", f"{ignored} {show}; exit 3")
        told = dropin.bare(shell, "-c", f"{ignored} {typed} {show}; exit 3")
        assert (told.code, told.output) == (bare.code, bare.output) == (3, bare.output)


def test_no_signal_of_the_launcher_is_left_to_the_program(dropin: Dropin) -> None:
    blocked = ("env", "--block-signal=CHLD")
    show = ("grep", "-E", "SigBlk|ShdPnd", "/proc/self/status")
    told = dropin.bare(*blocked, *KCACHE, "run", *show)
    assert told.output == dropin.bare(*blocked, *show).output
