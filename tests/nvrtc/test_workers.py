"""Workers: whatever is killed, forked or garbled, every request ends right, no process is left."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import FORK_DURING_USE, in_child, output_of, started, too_slow_in_qemu
from nvrtc.reference import ARCH, KERNEL, agreed, write
from nvrtc.talk import slow, used, worker

import kcache
from kcache import CompileError, KernelCache
from kcache.nvrtc.workers import pool as pools
from kcache.nvrtc.workers.process import NoWorkerError

pytestmark = [
    pytest.mark.usefixtures("nvrtc"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]

LONG = 60.0


def children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def reach(condition: Callable[[], object]) -> None:
    """Wait until `condition` returns a true value."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"the condition was not met within {LONG:g} s"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a process or a zombie after the pool is closed."""
    shared = pools.shared()
    shared.close()
    most = shared.most
    yield
    shared.most = most
    shared.close()
    reach(lambda: not shared.pids())
    assert not any(map(_is_worker, children(os.getpid())))


def _is_worker(pid: int) -> bool:
    try:
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"workers.worker" in said or state == "Z"


@contextmanager
def another_compiles(cache: KernelCache, count: int = 30) -> Iterator[int]:
    """Run a compile in another thread; yield the process id of its worker in mid-compile."""
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(cache.get_or_compile(slow(count), (), ARCH))
        except Exception as error:
            outcome.append(error)

    shared = pools.shared()
    shared.close()
    thread = threading.Thread(target=work)
    thread.start()
    reach(shared.pids)
    (pid,) = shared.pids()
    reach(lambda: used(pid) > 0.3)
    yield pid
    thread.join(LONG)
    assert isinstance(outcome[0], kcache.CompiledKernel), outcome


# -- crashes ---------------------------------------------------------------------------------------


@too_slow_in_qemu
def test_a_worker_that_is_killed_in_mid_compile_costs_no_kernel(cache: KernelCache) -> None:
    with another_compiles(cache) as pid:
        os.kill(pid, signal.SIGSEGV)
    assert cache.get_or_compile(slow(30), (), ARCH).cached


_NO_PYTHON_SIGNAL = """
import os, signal, sys
import kcache
from kcache.nvrtc.workers import pool
from nvrtc.reference import ARCH
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
cache = kcache.KernelCache(sys.argv[1])
kernel = 'extern "C" __global__ void k() {}'
cache.get_or_compile(kernel, (), ARCH)
(pid,) = pool.shared().pids()
os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(cache.get_or_compile(kernel + "//", (), ARCH).cached)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, signal.sigpending())
"""


def test_an_idle_worker_that_was_killed_does_not_end_a_program_with_sigpipe(tmp_path: Path) -> None:
    said = output_of(_NO_PYTHON_SIGNAL, tmp_path / "cache").splitlines()
    assert said == ["False", "True set()"]


def test_idle_workers_that_were_killed_fail_no_compile(cache: KernelCache) -> None:
    """Two idle workers that the kernel killed once counted as two crashes of a compile."""
    kernels = [(KERNEL.replace("V", str(n)), (), ARCH) for n in range(8)]
    shared = pools.shared(2)
    while len(shared.pids()) < 2:
        cache.compile_many(kernels, jobs=2)
        cache.clear()
    killed = shared.pids()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    agreed(cache, KERNEL.replace("V", "9"))


@too_slow_in_qemu
def test_two_crashes_of_the_compiler_raise_a_compile_error(cache: KernelCache) -> None:
    shared = pools.shared()
    done = threading.Event()

    def kill() -> None:
        killed: set[int] = set()
        while not done.is_set():
            for pid in set(shared.pids()) - killed:
                if used(pid) > 0.3:
                    os.kill(pid, signal.SIGSEGV)
                    killed.add(pid)
            time.sleep(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(CompileError, match=r"bad\.cu: the compiler was killed by.*SIGSEGV"):
            cache.get_or_compile(slow(100), (), ARCH, source_name="bad.cu")
    finally:
        done.set()
        thread.join()
    agreed(cache, KERNEL.replace("V", "1"))


_EIGHT = """
import sys, threading
import kcache
from nvrtc.talk import slow
from nvrtc.reference import ARCH
cache = kcache.KernelCache(sys.argv[1], workers=8)
threads = [threading.Thread(target=cache.get_or_compile, args=(slow(400) + f"// {n}", (), ARCH))
           for n in range(8)]
for thread in threads: thread.start()
"""


@too_slow_in_qemu
def test_no_worker_outlives_the_program(tmp_path: Path) -> None:
    program = started(_EIGHT, tmp_path / "cache")
    try:
        reach(lambda: sum(used(pid) > 0.1 for pid in children(program.pid)) >= 2)
        workers = children(program.pid)
    finally:
        program.kill()
    program.communicate()
    end = time.monotonic() + 10  # a compile takes 20 s
    while any(used(pid) >= 0 for pid in workers):
        assert time.monotonic() < end, "a worker is still running"
        time.sleep(0.01)


_INTERRUPTED = """
import os, signal, sys, threading, time
import kcache
from kcache.nvrtc.workers import pool
from nvrtc.talk import slow, used
from nvrtc.reference import ARCH, KERNEL
cache = kcache.KernelCache(sys.argv[1])
main = threading.get_ident()
def interrupt():
    while not any(used(pid) > 0.3 for pid in pool.shared().pids()):
        time.sleep(0.002)
    os.killpg(0, signal.SIGINT)  # as the terminal does
os.setpgid(0, 0)
threading.Thread(target=interrupt).start()
try:
    cache.get_or_compile(slow(400), (), ARCH)
except KeyboardInterrupt:
    print("interrupted")
print(pool.shared().pids())
print(cache.get_or_compile(KERNEL.replace("V", "1"), (), ARCH).cached)
"""


def test_an_interrupt_in_mid_compile(tmp_path: Path) -> None:
    assert output_of(_INTERRUPTED, tmp_path / "cache").splitlines() == [
        "interrupted",
        "[]",
        "False",
    ]


# -- forks -----------------------------------------------------------------------------------------


def test_a_child_forked_in_mid_compile(cache: KernelCache, tmp_path: Path) -> None:
    write(tmp_path / "inc/x.h", "#define V 1\n")
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    source = "#include <x.h>\ntemplate<int N> __global__ void k(int* out) { *out = N + V; }"

    def child() -> None:
        assert pools.shared().pids() == []
        cache.get_or_compile(source, "k<3>", options)
        pools.shared().close()
        with pytest.raises(ChildProcessError):  # no process is left, not even a zombie
            os.waitpid(-1, os.WNOHANG)

    with another_compiles(cache):
        in_child(child)
    assert agreed(cache, source, options, ["k<3>"]).cached


# -- limits ----------------------------------------------------------------------------------------


@too_slow_in_qemu
def test_a_compile_that_takes_too_long(tmp_path: Path) -> None:
    error = pytest.raises(CompileError, match=r"long\.cu: .*exceeded the limit of 0\.5 s ")
    with KernelCache(tmp_path / "cache", compile_timeout=0.5) as cache, error:
        cache.get_or_compile(slow(1000), (), ARCH, source_name="long.cu")
    with KernelCache(tmp_path / "cache") as cache:  # on a busy machine, any compile takes too long
        agreed(cache, KERNEL.replace("V", "1"))
        assert cache.entry_count == 1


def test_without_workers_nothing_is_cached_and_the_reason_is_logged(tmp_path: Path) -> None:
    code = """
    import logging, sys
    import kcache
    from nvrtc.reference import *
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
    logging.getLogger("kcache").setLevel(logging.DEBUG)
    write(Path(sys.argv[1]) / "inc/x.h", "#define V 1\\n")
    options = PTX.replace(include_paths=[Path(sys.argv[1]) / "inc"])
    with kcache.KernelCache(Path(sys.argv[1]) / "cache") as cache:
        for source in (KERNEL.replace("V", "1"), "#include <x.h>\\n" + KERNEL):
            for _ in range(2):
                assert not agreed(cache, source, options).cached
        assert (cache.stats().uncacheable, cache.entry_count) == (4, 0)
        print(cache.why(KERNEL.replace("V", "1"), (), options).clauses)
    """
    no_python = "sys.executable = ''"
    no_recorder = (
        "from kcache.nvrtc.workers import process; process._CODE = process._CODE.replace("
        "'main()', 'from kcache.nvrtc.workers import import_table as table; "
        "table._RELOCATIONS.clear(); main()')"
    )
    for first, env, reason in (
        ("pass", {"KCACHE_WORKERS": "0"}, "switched off"),
        (no_python, {}, "no worker can be started"),
        (no_recorder, {}, "what NVRTC asks can't be recorded here"),
    ):
        text = code.replace("import kcache\n", f"import kcache\n    {first}\n", 1)
        said = output_of(text, tmp_path, environ=env)
        assert "is not cached: it was compiled in this process" in said
        assert reason in said


# -- a worker by itself ----------------------------------------------------------------------------


def test_a_worker_is_not_misled_by_its_directory(tmp_path: Path) -> None:
    """A worker imports nothing from the working directory, and ignores `PYTHON*` variables."""
    for name in ("json.py", "xxhash.py", "ctypes.py", "sitecustomize.py", "kcache.py"):
        write(tmp_path / name, "raise SystemExit")
    code = """
    import os, sys
    from nvrtc.reference import *
    sys.path[:] = filter(None, sys.path)  # the program itself imports nothing from there, either
    os.environ["PYTHONPATH"] = os.environ["PYTHONSTARTUP"] = sys.argv[1]
    os.environ["PYTHONHOME"] = "/nowhere"
    os.chdir(sys.argv[1])
    with kcache.KernelCache("cache") as cache:
        kernel = cache.get_or_compile(KERNEL.replace("V", "1"), (), ARCH)
        print(cache.stats().uncacheable)
    """
    assert output_of(code, tmp_path).strip() == "0"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "was killed by signal 9"),
        ("exit 0", "ended with status 0"),
        ("echo out of memory >&2; exit 3", "out of memory"),
        ("printf KCW1; exit 3", "ended with status"),
        ("printf 'junk that is no message at all'; exec sleep 600", "was killed by signal 9"),
    ],
)
def test_a_process_that_is_not_a_worker_is_an_error(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    with pytest.raises(NoWorkerError, match=reason), worker():
        pass


# -- the wire --------------------------------------------------------------------------------------


def test_a_program_that_closes_every_descriptor_keeps_what_it_opens_then(tmp_path: Path) -> None:
    """Programs that become daemons do this. The numbers of the pipes then belong to other files."""
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes(5000))
    code = f"""
    import os, threading
    from kcache.nvrtc.workers import pool
    from kcache.nvrtc.workers.messages import Status
    from nvrtc.talk import *
    from kcache.nvrtc import library
    pools = pool.WorkerPool(3)
    path = library.require().path
    threads = [threading.Thread(target=pools.compile, args=(path, ask(slow(3)))) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(pools.pids()) == 3
    os.closerange(3, 200)
    files = [os.open(os.path.join({str(tmp_path)!r}, str(each)), os.O_RDWR) for each in range(20)]
    for source in ("//", "// another"):
        assert pools.compile(path, ask(source))[1].status == Status.COMPILED
    pools.close()
    assert [os.lseek(each, 0, os.SEEK_CUR) for each in files] == [0] * 20
    """
    output_of(code)
    for number in range(20):
        assert (tmp_path / str(number)).read_bytes() == bytes(5000)


_METHODS = """
import multiprocessing, sys, threading
import kcache
from nvrtc.reference import *
from nvrtc.talk import child

if __name__ == "__main__":
    method, place = sys.argv[1:]
    context = multiprocessing.get_context(method)
    cache = kcache.KernelCache(place)
    assert cache.get_or_compile(KERNEL.replace("V", "100"), (), ARCH)
    def work(n):
        cache.get_or_compile(KERNEL.replace("V", str(n)), (), ARCH)
    thread = threading.Thread(target=work, args=(0,))
    thread.start()
    with context.Pool(2) as pool:
        print(pool.map(child, [(place, n) for n in (10, 11, 12)], chunksize=1))
    thread.join()
    print(all(agreed(cache, KERNEL.replace("V", str(n))).cached for n in (0, 10, 11, 12)))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_of_multiprocessing(tmp_path: Path, method: str) -> None:
    script = write(tmp_path / "program.py", _METHODS)
    code = "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    said = output_of(code, script, method, tmp_path / "cache").splitlines()
    assert said == [str([False] * 3), "True"]


def test_another_user_gets_another_worker(tmp_path: Path) -> None:
    """A worker from before the change could read files that the program may not read any more."""
    code = """
    import os, sys
    from kcache.nvrtc.workers import pool, process
    from nvrtc.talk import *
    from kcache.nvrtc import library
    if os.getuid() != 0:
        sys.exit()
    pools = pool.WorkerPool(1)
    path = library.require().path
    pools.compile(path, ask("//"))
    (first,) = pools.pids()
    before = process.credentials()
    os.setgroups([65534])
    assert process.credentials() != before
    pools.compile(path, ask("//"))
    assert pools.pids() != [first]
    os.setegid(65534)
    os.seteuid(65534)
    pools.close()
    """
    output_of(code)


FORKS = """
import os, signal, subprocess, sys, threading, time
import kcache
begun, real = threading.Event(), subprocess._fork_exec
def slow(*args):
    begun.set()
    time.sleep(0.3)
    return real(*args)
subprocess._fork_exec = slow
cache, sm_80 = kcache.KernelCache(sys.argv[1]), kcache.CompileOptions(arch="sm_80")
thread = threading.Thread(target=cache.get_or_compile, args=("__global__ void k() {}", "k", sm_80))
thread.start()
assert begun.wait(60)
pid = os.fork()
if not pid:
    time.sleep(300)
thread.join(100)
print("waits" if thread.is_alive() else "compiled")
os.kill(pid, signal.SIGKILL)
"""


def test_a_fork_beside_the_start_of_a_worker_holds_up_no_compile(tmp_path: Path) -> None:
    """The child would hold the pipe by which `Popen` learns that the worker has started."""
    assert output_of(FORKS, str(tmp_path)) == "compiled"


BESIDE = (
    """
import importlib, os, signal, sys, threading, time
import kcache
module, name, use, place = sys.argv[1:]
sm_80 = kcache.CompileOptions(arch="sm_80")
begun, slowed = threading.Event(), importlib.import_module(module)
real = getattr(slowed, name)
def slow(*args):
    begun.set()
    time.sleep(0.3)
    return real(*args)
setattr(slowed, name, slow)
"""
    + FORK_DURING_USE
)
FIRST_USES = [
    ("kcache.kernel_cache", "open_configured", "kcache.compile('//', (), sm_80)"),
    ("kcache.nvrtc.files", "FileDigests", "kcache.KernelCache(place).why('//', (), sm_80)"),
]


@pytest.mark.parametrize(("module", "name", "use"), FIRST_USES)
def test_a_fork_beside_a_first_use_leaves_no_child_waiting(
    module: str, name: str, use: str, tmp_path: Path
) -> None:
    """Once, the child waited for a lock that a thread of its parent had held at the fork."""
    output_of(BESIDE, module, name, use, tmp_path, environ={"KCACHE_DIR": str(tmp_path / "cache")})
