"""cuda.core's program caches on a case of the corpus, beside `main_job`.

They are used as the documentation of `cuda.core.utils.make_program_cache_key` shows:
`Program.compile(cache=...)` refuses name expressions, and include paths too unless the caller
digests the headers. A caller would have to find those headers and read them again for each request;
here the digest is a constant that costs nothing, and no header is verified. A hit gives the CUBIN
without its lowered names.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.corpus import Case
from harness.measure import PRINT_PEAK, Round, run_python
from harness.raw_nvrtc import nvrtc_version

from contenders.contenders import peer_module

#: Stands for the digest of all headers.
DIGEST = b"headers"

_HIT = """\
from cuda.core import ObjectCode, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
cache = FileStreamProgramCache({directory!r})
key = make_program_cache_key(
    code={source!r}, code_type="c++", options=ProgramOptions(**{settings!r}), target_type="cubin",
    name_expressions={names!r}, extra_digest={digest!r},
)
found = cache.get(key)
if found is None:
    raise SystemExit("not a hit")
if not ObjectCode.from_cubin(found).code:
    raise SystemExit("no code")
"""


@dataclass
class CoreCache:
    """One case, with caches of cuda.core in `folder`, which exists.

    Whatever is called a hit raises RuntimeError where it is none.
    """

    case: Case
    folder: Path
    _directory: str = field(default="", init=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The arguments of `cuda.core.ProgramOptions`, as plain values."""
        flags = [option.removeprefix("--").replace("-", "_") for option in self.case.extra_options]
        return {
            "arch": self.case.arch,
            "std": self.case.std,
            "include_path": [str(path) for path in self.case.include_dirs] or None,
            "no_cache": True if nvrtc_version() >= (12, 9) else None,
            **dict.fromkeys(flags, True),
        }

    @cached_property
    def options(self) -> Any:
        return peer_module().ProgramOptions(**self.settings)

    @property
    def directory(self) -> str:
        """The directory of a FileStreamProgramCache that holds the kernel."""
        if not self._directory:
            self.cold()
        return self._directory

    @cached_property
    def memory_cache(self) -> Any:
        """An InMemoryProgramCache that holds the kernel."""
        made = peer_module(".utils").InMemoryProgramCache()
        made[self.key()] = self.disk_cache[self.key()]
        return made

    @cached_property
    def disk_cache(self) -> Any:
        return peer_module(".utils").FileStreamProgramCache(self.directory)

    def key(self) -> bytes:
        key: bytes = peer_module(".utils").make_program_cache_key(
            code=self.case.source,
            code_type="c++",
            options=self.options,
            target_type="cubin",
            name_expressions=self.case.names,
            extra_digest=DIGEST if self.case.include_dirs else None,
        )
        return key

    def request(self, cache: Any) -> tuple[bytes, bool]:
        """Returns the CUBIN, and whether the cache held it."""
        core = peer_module()
        key = self.key()
        found = cache.get(key)
        if found is not None:
            return core.ObjectCode.from_cubin(found).code, True
        program = core.Program(self.case.source, "c++", self.options)
        made = program.compile("cubin", self.case.names)
        cache[key] = made
        return made.code, False

    # -- tasks, for `measure.interleave` -------------------------------------------------------

    def cold(self) -> Round:
        """A compile into an empty FileStreamProgramCache, which then serves the hits."""
        place = tempfile.mkdtemp(dir=self.folder)
        with peer_module(".utils").FileStreamProgramCache(place) as cache:
            start = time.perf_counter()
            _, held = self.request(cache)
            seconds = time.perf_counter() - start
        if held:
            raise RuntimeError(f"{self.case.name}: a hit in an empty cache of cuda.core")
        self._directory = self._directory or place
        return {"peer cold": seconds}

    def disk(self) -> Round:
        return self._hits("peer disk", self.disk_cache, 20)

    def memory(self) -> Round:
        return self._hits("peer memory", self.memory_cache, 50)

    def _hits(self, name: str, cache: Any, loops: int) -> Round:
        request: Callable[[Any], tuple[bytes, bool]] = self.request
        request(cache)
        start = time.perf_counter()
        held = [request(cache)[1] for _ in range(loops)]
        seconds = (time.perf_counter() - start) / loops
        if not all(held):
            raise RuntimeError(f"{self.case.name}: not a hit in cuda.core's cache")
        return {name: seconds}

    @property
    def hit_code(self) -> str:
        """A program that gets the CUBIN and nothing else."""
        return _HIT.format(
            directory=self.directory,
            source=self.case.source,
            settings=self.settings,
            names=self.case.names,
            digest=DIGEST if self.case.include_dirs else None,
        )

    def fresh_process(self) -> Round:
        done = run_python(self.hit_code + PRINT_PEAK, self.folder)
        return {
            "peer process": done.seconds,
            "peer process cpu": done.cpu_seconds,
            "peer peak": float(done.output.split()[-1]),
        }
