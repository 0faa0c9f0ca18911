"""The chapter about starting: a new process gets a kernel from its cache, and what it loads."""

from functools import partial
from pathlib import Path

from contenders.contenders import FILE_STREAM
from harness.findings import Absent, Comparison, Fact, Ratio, Timing
from harness.main_job import SELF_CONTAINED, Job
from harness.measure import PRINT_PEAK, Round, Rounds, Summary, interleave, run_python
from harness.plan import Found, Plan

#: A miss. `cuda.bindings` compiles the same in its process.
_MISS = """\
import os, kcache
cache = kcache.KernelCache({directory!r} + str(os.getpid()))
options = kcache.CompileOptions(arch={arch!r}, std={std!r})
if cache.get_or_compile({source!r}, {names!r}, options).cached:
    raise SystemExit("a hit")
"""
_BINDINGS = """\
from cuda.bindings import nvrtc
_, program = nvrtc.nvrtcCreateProgram({source!r}.encode(), b"kernel.cu", 0, [], [])
for name in {names!r}:
    nvrtc.nvrtcAddNameExpression(program, name.encode())
flags = [b"--gpu-architecture={arch}", b"--std={std}", b"--no-cache"]
(status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
    raise SystemExit(str(status))
for kind in ("PTX", "CUBIN", "ProgramLog"):
    _, size = getattr(nvrtc, f"nvrtcGet{{kind}}Size")(program)
    getattr(nvrtc, f"nvrtcGet{{kind}}")(program, bytearray(size))
nvrtc.nvrtcDestroyProgram(program)
"""
#: How much longer the first miss of a process may take than a compile in the process.
ADDED_SECONDS = 0.060
_IMPORT = """\
from time import perf_counter
start = perf_counter()
{}
print(perf_counter() - start)
"""
_LOADED = """
import sys
print(any(name.partition(".")[0] == "cuda" for name in sys.modules))
print("libnvrtc" in open("/proc/self/maps").read())
"""
#: cuda.core with its own `compile(cache=)`, for a self-contained kernel.
_CORE_HIT = """\
from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache
cache = FileStreamProgramCache({directory!r})
program = Program({source!r}, "c++", ProgramOptions(arch={arch!r}))
if not program.compile("cubin", cache=cache).code:
    raise SystemExit("no code")
"""
#: CuPy compiles for the present device.
_CUPY_HIT = """\
import os
os.environ["CUPY_CACHE_DIR"] = {directory!r}
import cupy
cupy.RawModule(code={source!r}, backend="nvrtc").compile()
"""
#: Peer's task, our task, the name of ours, the name of the peer's, target.
_IMPORTS = (
    ("core import", "import", "`import kcache`, in the process", "`import cuda.core`", 1 / 10),
    ("cupy import", "import", "`import kcache`, in the process", "CuPy, `import cupy`", None),
)


def start(plan: Plan, folder: Path) -> Found:
    """A new process gets the CUBIN of a self-contained kernel, and nothing else."""
    job = Job(SELF_CONTAINED, folder)
    codes = {
        "bare": "pass",
        "hit": job.hit_code,
        "import": _IMPORT.format("import kcache"),
    }
    case = SELF_CONTAINED
    given = {"arch": case.arch, "std": case.std, "source": case.source, "names": case.names}
    codes["miss"] = _MISS.format(directory=str(folder / "miss-"), **given)
    if _failure(bindings := _BINDINGS.format(**given), folder) is None:
        codes["bindings"] = bindings
    loaded = run_python(job.hit_code + _LOADED, folder).output.split()[-2:]
    peers = {**_core(folder), **_cupy(folder)}
    for name, code in peers.items():  # fills the peers' caches
        reason = _failure(code, folder)
        if reason is None:
            codes[name] = code
        elif name in {"core hit", "cupy import", "cupy hit"}:
            who = {"core hit": FILE_STREAM, "cupy import": "CuPy"}.get(name, "CuPy, a hit")
            yield Absent("start", who, reason)
    for code in codes.values():  # compiles every module once
        run_python(code, folder)
    rounds = interleave(
        plan.processes, [partial(_process, name, code, folder) for name, code in codes.items()]
    )
    yield from _ratios(rounds, [name for name in codes if name in peers])
    yield from _misses(codes, rounds)
    for what, found in zip(("a `cuda` module", "libnvrtc"), loaded, strict=True):
        answer = "yes" if found == "True" else "no"
        figure = f"the hit in a fresh process loads {what}"
        yield Fact("start", figure, answer, "no", answer == "no")
    rows = {
        "bare": "bare interpreter",
        "hit": "kcache, hit",
        "miss": "kcache, the first miss",
        "bindings": "cuda.bindings, a compile in the process",
        "core hit": f"{FILE_STREAM}, hit",
        "cupy hit": "CuPy, hit",
        "cupy import": "CuPy, `import cupy` alone",
    }
    for name in codes:
        if name in rows:
            yield Timing("start", rows[name], "process: start to end", rounds.summary(name))


def _misses(codes: dict[str, str], rounds: Rounds) -> Found:
    """The first miss of a process beside a compile in the process."""
    if "bindings" in codes:
        figure = "a process with one miss, from start to end"
        against = "bare NVRTC by cuda.bindings, likewise"
        yield Comparison("start", rounds).ratio(figure, "miss", against, "bindings")
        added = Summary.of(rounds.less("miss", "bindings")).median
        yield Fact(
            "start",
            "the first miss of a process, beyond a compile in it by cuda.bindings",
            f"{added * 1e3:.0f} ms",
            "60 ms at most",
            added <= ADDED_SECONDS,
        )


def _core(folder: Path) -> dict[str, str]:
    case = SELF_CONTAINED
    return {
        "core hit": _CORE_HIT.format(
            directory=str(folder / "core"), source=case.source, arch=case.arch
        ),
        "core import": _IMPORT.format("import cuda.core"),
    }


def _cupy(folder: Path) -> dict[str, str]:
    source = SELF_CONTAINED.source
    return {
        "cupy import": _IMPORT.format("import cupy"),
        "cupy hit": _CUPY_HIT.format(directory=str(folder / "cupy"), source=source),
    }


def _failure(code: str, folder: Path) -> str | None:
    """Returns the last line of what a process says that fails, or None if it succeeds."""
    try:
        run_python(code, folder)
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return None


def _process(name: str, code: str, folder: Path) -> Round:
    done = run_python(code + PRINT_PEAK if "hit" in name else code, folder)
    values = {name: done.seconds, f"{name} cpu": done.cpu_seconds}
    output = done.output.split()
    if "hit" in name:
        values[f"{name} peak"] = float(output.pop())
    if output:
        values[f"{name} inside"] = float(output[-1])
    return values


def _ratios(rounds: Rounds, peers: list[str]) -> Found:
    ratio = Comparison("start", rounds).ratio
    for peer, who, target in (("core hit", FILE_STREAM, 1 / 8), ("cupy hit", "CuPy", None)):
        if peer not in peers:
            continue
        figure = "fresh process gets the CUBIN, hot (each less a bare interpreter)"
        yield ratio(figure, "hit", who, peer, less="bare", target=target)
        yield ratio("the same in CPU time", "hit cpu", who, f"{peer} cpu", less="bare cpu")
        yield Ratio(
            "start",
            "peak resident memory of that process",
            f"{who}, likewise",
            "B",
            rounds.summary("hit peak"),
            rounds.summary(f"{peer} peak"),
            rounds.ratio("hit peak", f"{peer} peak"),
        )
    for peer, ours, figure, against, target in _IMPORTS:
        if peer in peers:
            yield ratio(figure, f"{ours} inside", against, f"{peer} inside", target=target)
