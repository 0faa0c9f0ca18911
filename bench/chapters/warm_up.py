"""The chapter about `kcache warm`: kernels for several architectures, cold, then all there."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.corpus import KERNELS, Case, MissingHeadersError, load
from harness.findings import Absent, Comparison, Fact, Timing
from harness.measure import Rounds, clean_environment
from harness.plan import Found, Plan

#: The share of the first run's time that the second run may take.
TARGET = 1 / 20


def warm(plan: Plan, folder: Path) -> Found:
    """`kcache warm` over kernels of the corpus, in an empty cache and again: whole processes."""
    cases: list[Case] = []
    for name in plan.warmed:
        try:
            cases.append(load(name))
        except MissingHeadersError as error:
            yield Absent("warm", f"`{name}`", str(error))
    path = folder / "kernels.json"
    path.write_text(json.dumps(kernel_list(cases, plan.archs)), encoding="utf-8")
    rounds, compiled = Rounds(), set[int]()
    for _ in range(plan.costly):
        place = tempfile.mkdtemp(dir=folder)
        first, _, made = run_warm(path, place)
        if made["failed"] or made["compiled"] != len(cases) * len(plan.archs):
            raise RuntimeError(f"kcache warm: not everything was compiled: {made}")
        second, _, found = run_warm(path, place)
        compiled.add(found["compiled"] + found["failed"])
        rounds.add({"first": first, "second": second})
    kernels = f"{len(cases)} kernels for {', '.join(plan.archs)}"
    yield Comparison("warm", rounds).ratio(
        f"`kcache warm` of {kernels}, again", "second", "the first time", "first", target=TARGET
    )
    yield Fact(
        "warm",
        f"compiles of `kcache warm` of {kernels}, again",
        ", ".join(map(str, sorted(compiled))),
        "0",
        compiled == {0},
    )
    for key, row in {"first": "cold", "second": "again: all there"}.items():
        yield Timing("warm", row, f"`kcache warm`: {kernels}", rounds.summary(key))


def kernel_list(cases: Sequence[Case], archs: Sequence[str]) -> dict[str, object]:
    """Returns a list of kernels, as `kcache warm` reads it."""
    kernels = [
        {
            "source": str(KERNELS / f"{case.name}.cu"),
            "names": list(case.names),
            "std": case.std,
            "include_paths": [str(path) for path in case.include_dirs],
            "extra_options": list(case.extra_options),
        }
        for case in cases
    ]
    return {"defaults": {"archs": list(archs)}, "kernels": kernels}


class Warmed(NamedTuple):
    """One `kcache warm`: its seconds, the processor time of it and its workers, what it says."""

    seconds: float
    processor: float
    made: dict[str, int]


def run_warm(path: Path, place: str, jobs: int | None = None) -> Warmed:
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "kcache", "warm", str(path), "--json", "--directory", place]
    if jobs is not None:
        command += ["-j", str(jobs)]
    # Only compiles that a user waits for are measured. Each proof would be one more compile.
    environment = clean_environment() | {"KCACHE_RELOCATION": "lazy"}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            said = (errors.read() + output.read()).decode(errors="replace")
            raise RuntimeError(f"kcache warm failed:\n{said}")
        return Warmed(seconds, used.ru_utime + used.ru_stime, json.loads(output.read()))
