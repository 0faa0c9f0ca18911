"""Talk: helpers for tests of workers: a worker process, requests to it, and its replies."""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nvrtc.reference import ARCH, KERNEL, Fresh

from kcache import KernelCache, environment
from kcache.nvrtc import library, options
from kcache.nvrtc.workers.messages import Ask, Reply, Status
from kcache.nvrtc.workers.process import WorkerProcess

#: An example of each harmless option.
EXAMPLES = (
    *sorted(options._PLAIN),
    *(
        f"{name}={value}"
        for name, values in options._VALUED.items()
        for value in sorted(values or ())
    ),
    *("--gpu-architecture=sm_80", "-arch=compute_90", "--std=c++14", "-std=c++20"),
    *("--maxrregcount=32", "-maxrregcount=64", "--define-macro=X=1", "--undefine-macro=X"),
    *("--include-path=/usr/include", "--diag-suppress=177,550", "--diag-warn=177"),
    *("--frandom-seed=1", "-frandom-seed=seed"),
    *("-DX=1", "-UX", "-I/usr/include"),
)
ARCH_FLAGS = ("--gpu-architecture=sm_80",)
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 1


def ask(
    source: str,
    flags: Sequence[str] = ARCH_FLAGS,
    *,
    names: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    source_name: str = "kernel.cu",
    directory: Path | str | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> Ask:
    return Ask(
        source,
        source_name,
        tuple(flags),
        tuple(names),
        dict(headers or {}),
        str(directory or os.getcwd()),
        dict(environment or {}),
    )


@contextmanager
def worker(path: str | None = None) -> Generator[WorkerProcess]:
    """Yield a new worker process, which is ended after the block."""
    process = WorkerProcess(path or library.require().path)
    try:
        process.start(environment.variables())
        yield process
    finally:
        process.end()


def fresh_of(reply: Reply) -> Fresh:
    """Return the reply of a worker in the form in which `compile_fresh` returns its result."""
    made = reply.artifact
    log = (made.raw_log or b"").decode(errors="replace").strip("\0 \n")
    if reply.status != Status.COMPILED:
        return Fresh(None, None, None, {}, log, failed=True)
    return Fresh(made.ptx, made.cubin, made.ltoir, {}, log, failed=False)


def slow(count: int) -> str:
    """Return a source that the compiler's frontend works on for `count / 20` seconds."""
    return "\n".join(
        f"template<int N> struct S{n} {{ static constexpr int v = S{n}<N-1>::v + 1; }};\n"
        f"template<> struct S{n}<0> {{ static constexpr int v = 0; }};\n"
        f"static_assert(S{n}<190>::v == 190);"
        for n in range(count)
    )


def used(pid: int) -> float:
    """Return the seconds of processor time that a process has used, or -1 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1.0
    if fields[0] == "Z":
        return -1.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def child(what: tuple[str, int]) -> bool:
    """Request a kernel in a process of `multiprocessing`; return whether the kernel was cached."""
    place, number = what
    with KernelCache(place) as cache:
        return cache.get_or_compile(KERNEL.replace("V", str(number)), (), ARCH).cached
