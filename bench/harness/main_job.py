"""The main job: one kernel of the corpus, compiled bare, cold, and hit in every way there is.

The chapters compare them.
NVRTC's own cache is off everywhere: by an option in bare compiles, in the environment of new
processes, and in kcache's workers always.
"""

import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import kcache
from harness.corpus import Case, generated_source
from harness.measure import PRINT_PEAK, Process, Round, run_python
from harness.raw_nvrtc import compile_case

#: The kernel that is self-contained: 4 KB of source, no include, no name expression.
SELF_CONTAINED = generated_source(4096)

#: Makes sure that a worker is there, however long ago the last miss was.
_FIRST = 'extern "C" __global__ void first() {}\n'

_HIT = """\
from time import perf_counter
import kcache
cache = kcache.KernelCache({directory!r})
options = kcache.CompileOptions({options})
start = perf_counter()
kernel = cache.get_or_compile({source!r}, {names!r}, options)
seconds = perf_counter() - start
if not (kernel.cached and kernel.cubin):
    raise SystemExit("not a hit")
print(seconds)
"""


@dataclass
class Job:
    """One case, with a folder of its own and a cache directory in it that holds its kernel.

    Whatever is called a hit here raises RuntimeError if it compiled, and a miss if it did not.
    """

    case: Case
    folder: Path

    @cached_property
    def settings(self) -> dict[str, object]:
        """The arguments of `kcache.CompileOptions`, as plain values."""
        return {
            "arch": self.case.arch,
            "std": self.case.std,
            "include_paths": [str(path) for path in self.case.include_dirs],
            "extra_options": list(self.case.extra_options),
        }

    @cached_property
    def options(self) -> kcache.CompileOptions:
        return kcache.CompileOptions().replace(**self.settings)

    @cached_property
    def directory(self) -> Path:
        """A cache directory that holds the kernel."""
        place = self.folder / "cache"
        with kcache.KernelCache(place) as cache:
            self.request(cache)
        # Twice: the second request notes that the headers changed long ago.
        with kcache.KernelCache(place) as cache:
            self.hit(cache)
        return place

    @cached_property
    def memory_cache(self) -> kcache.KernelCache:
        """A cache that holds the kernel in memory."""
        cache = kcache.KernelCache(self.directory)
        self.hit(cache)
        return cache

    @cached_property
    def disk_cache(self) -> kcache.KernelCache:
        """A cache without a memory tier: every hit reads the disk."""
        cache = kcache.KernelCache(self.directory, memory_size=0)
        self.hit(cache)
        return cache

    @cached_property
    def once_cache(self) -> kcache.KernelCache:
        """A cache that holds the kernel in memory, and verified its headers once."""
        cache = kcache.KernelCache(self.directory, header_check="once")
        self.hit(cache)
        return cache

    def request(self, cache: kcache.KernelCache) -> kcache.CompiledKernel:
        return cache.get_or_compile(self.case.source, self.case.names, self.options)

    def hit(self, cache: kcache.KernelCache) -> kcache.CompiledKernel:
        kernel = self.request(cache)
        self._check(kernel)
        return kernel

    def _check(self, kernel: kcache.CompiledKernel) -> None:
        if not (kernel.cached and kernel.cubin):
            raise RuntimeError(f"{self.case.name}: not a hit")

    def empty_cache(self) -> kcache.KernelCache:
        """Returns a cache in a fresh directory, which has seen no header and no source yet."""
        return kcache.KernelCache(tempfile.mkdtemp(dir=self.folder))

    def hit_in_new_process(self) -> tuple[Process, float]:
        """Returns a process that gets the CUBIN, and the seconds of the look-up inside it.

        The last line of its output is the peak of its resident memory, in bytes.
        """
        # In this directory: the entry of a kernel that may depend on its paths is for one working
        # directory.
        done = run_python(self.hit_code + PRINT_PEAK, Path.cwd())
        return done, float(done.output.split()[0])

    @cached_property
    def hit_code(self) -> str:
        return _HIT.format(
            directory=str(self.directory),
            options=", ".join(f"{name}={value!r}" for name, value in self.settings.items()),
            source=self.case.source,
            names=self.case.names,
        )

    # -- tasks, for `measure.interleave` -------------------------------------------------------

    def bare(self) -> Round:
        """NVRTC alone: the floor."""
        return {"bare": compile_case(self.case).seconds}

    def miss(self) -> Round:
        """A later miss of a process, in a fresh directory; `inside` is the compile in the worker.

        The first miss of a process starts a worker: see the chapter about fresh processes.
        """
        with self.empty_cache() as cache:
            first = cache.get_or_compile(_FIRST, (), kcache.CompileOptions(arch="sm_90"))
            start = time.perf_counter()
            kernel = self.request(cache)
            seconds = time.perf_counter() - start
        if first.cached or kernel.cached:
            raise RuntimeError(f"{self.case.name}: a hit in an empty cache")
        return {"miss": seconds, "inside": kernel.compile_seconds}

    def fresh_process(self) -> Round:
        done, inside = self.hit_in_new_process()
        return {
            "process": done.seconds,
            "process cpu": done.cpu_seconds,
            "look-up": inside,
            "peak": float(done.output.split()[-1]),
        }

    def disk(self) -> Round:
        return self._hits("disk", self.disk_cache, 10)

    def memory(self) -> Round:
        return self._hits("memory", self.memory_cache, 20)

    def once(self) -> Round:
        return self._hits("once", self.once_cache, 200)

    def _hits(self, name: str, cache: kcache.KernelCache, loops: int) -> Round:
        request, source, names, options = (
            cache.get_or_compile,
            self.case.source,
            self.case.names,
            self.options,
        )
        kernel = request(source, names, options)
        start = time.perf_counter()
        for _ in range(loops):
            kernel = request(source, names, options)
        seconds = (time.perf_counter() - start) / loops
        self._check(kernel)
        return {name: seconds}
