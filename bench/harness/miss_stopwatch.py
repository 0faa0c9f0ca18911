"""Miss stopwatch: measures each part of kcache that a miss runs through.

The parts are functions of the library, wrapped while a miss runs; each is charged its own time less
that of the parts inside it. They are implementation details: one that the library no longer has is
left out, and what it did is then charged to the part around it.
"""

import functools
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, Self

#: Part -> functions, as "module:qualified name".
PARTS = {
    "compiling": ("kcache.nvrtc.workers.process:WorkerProcess.ask",),
    "starting a worker": ("kcache.nvrtc.workers.process:WorkerProcess.__init__",),
    "waiting for a slot": ("kcache.nvrtc.workers.slots:Slots._take",),
    "taking over the digests": ("kcache.nvrtc.frontend:Frontend._remember",),
    "making the header set": ("kcache.nvrtc.frontend:_header_set",),
    "comparing it with the files": ("kcache.nvrtc.manifest:StoredHeaderSet.holds",),
    "making the manifest": ("kcache.kernels.store:KernelWriter._store_manifest",),
    "storing": ("kcache.engine.engine:CacheEngine.put",),
}
#: The work in the worker and on the way to it and back. The compile is the larger part of it.
COMPILING = "compiling"
#: The whole miss. Its own time is what no part explains.
REST = "everything else"
WHOLE = ("kcache.kernel_cache:KernelCache.get_or_compile",)


class Stopwatch:
    """Seconds by part, while it is entered. One thread only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._replaced: list[tuple[object, str, object]] = []

    def __enter__(self) -> Self:
        for part, names in {**PARTS, REST: WHOLE}.items():
            for name in names:
                self._wrap(part, name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for owner, name, function in reversed(self._replaced):
            setattr(owner, name, function)
        self._replaced.clear()

    def _wrap(self, part: str, name: str) -> None:
        module, _, path = name.partition(":")
        *outer, last = path.split(".")
        try:
            owner: object = functools.reduce(getattr, outer, import_module(module))
            function = getattr(owner, last)
        except (ImportError, AttributeError):
            print(f"{name} is gone: {part!r} is charged to another part", file=sys.stderr)
            return
        self._replaced.append((owner, last, function))
        setattr(owner, last, self._timed(part, function))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inner, now = self._inner, time.perf_counter

        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            inner.append(0.0)
            start = now()
            try:
                return function(*arguments, **named)
            finally:
                whole = now() - start
                own = whole - inner.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                if inner:
                    inner[-1] += whole

        return wrapper
