"""Measure: counts what each scenario costs, in a process of its own; `python -m guard.measure`."""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from guard.scenarios import Operation, prepared, trust_files_at_once
from harness.stat_counter import Looks

__all__ = ["HASHES", "MARK", "instructions"]

#: With what kcache makes keys and checks envelopes; `openssl_sha256` is one, too.
HASHES = ("sha256", "xxh3_128_digest")
#: The rest is not about files, or happens only where something is imported or a process begun.
_AUDITED = {
    *("open", "os.chmod", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename"),
    *("os.rmdir", "os.scandir", "os.symlink", "os.truncate", "os.utime", "fcntl.fcntl"),
    *("fcntl.lockf", "import", "subprocess.Popen", "mmap.__new__", "ctypes.dlopen"),
}

#: Looked at before and after an operation, to be found among the system calls: nothing is there.
MARK = "/kcache-guard"


def mark(name: str) -> None:
    try:
        os.stat(f"{MARK}/{name}")
    except OSError:
        pass


def calls(operation: Operation, name: str) -> None:
    """Does it between two marks, for strace."""
    mark(f"begin {name}")
    operation()
    mark(f"end {name}")


def allocated(operation: Operation) -> tuple[int, int]:
    """Returns (bytes allocated at the peak, bytes that are left), as tracemalloc counts them."""
    tracemalloc.start()
    try:
        result = operation()
        left, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return peak, left


class Audit:
    """Python's own word of what is opened, listed, made, renamed or removed (PEP 578).

    On every system, unlike strace; but it knows nothing of what C code does. `stat` is no event of
    Python's, and is counted by `Looks`.
    """

    def __init__(self) -> None:
        self._seen: list[str] | None = None
        sys.addaudithook(self._hook)  # for the rest of the process: it can't be removed

    def _hook(self, event: str, _: tuple[object, ...]) -> None:
        if self._seen is not None and event in _AUDITED:
            self._seen.append(event.removeprefix("os."))

    def events(self, operation: Operation) -> list[str]:
        """Returns the events in their order, and then one "stat" for each file looked at."""
        self._seen = seen = []
        try:
            with Looks() as looks:
                operation()
        finally:
            self._seen = None
        return [*seen, *["stat"] * looks.count]


def hashed(operation: Operation) -> dict[str, int]:
    """Returns how often a hash of bytes is begun, by its name: what C does takes no instructions."""
    counts = dict.fromkeys(HASHES, 0)

    def profile(frame: FrameType, event: str, function: object) -> None:
        if event == "c_call":
            name = getattr(function, "__name__", "")
            for known in HASHES:
                counts[known] += name.endswith(known)

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return counts


def instructions(operation: Operation) -> int:
    """Returns how many bytecode instructions the operation executes; the same at each call."""
    counted = _by_monitoring if sys.version_info >= (3, 12) else _by_trace
    return counted(operation) - counted(_nothing)


def _nothing() -> None:
    pass


def _by_trace(operation: Operation) -> int:
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(None)
    return count


def _by_monitoring(operation: Operation) -> int:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # from Python 3.12 on
    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
    count = 0

    def step(code: CodeType, offset: int) -> None:
        nonlocal count
        count += 1

    monitoring.use_tool_id(tool, "guard")
    try:
        monitoring.register_callback(tool, event, step)
        monitoring.set_events(tool, event)
        try:
            operation()
        finally:
            monitoring.set_events(tool, 0)
    finally:
        monitoring.free_tool_id(tool)
    return count


def main(kind: str, folder: str, compiler: str) -> None:
    """Measures all scenarios in an empty folder; prints a JSON object of the results."""
    trust_files_at_once()
    gc.disable()  # its garbage is not the scenario's
    found: dict[str, object] = {}
    audit = Audit() if kind == "audit" else None
    for name, operation in prepared(Path(folder), compiler=compiler == "yes"):
        if kind == "calls":
            calls(operation, name)
        elif audit is not None:
            found[name] = audit.events(operation)
        elif kind == "hashes":
            found[name] = hashed(operation)
        elif kind == "bytes":
            found[name] = allocated(operation)
        else:
            found[name] = instructions(operation)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
