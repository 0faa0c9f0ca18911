"""Run chapters: runs each in a folder of its own, and keeps what it finds at once."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.findings import Findings, Took
from harness.machine import describe_machine, load, today, versions
from harness.plan import Found, Plan

#: Called with the findings after each chapter.
Keep = Callable[[Findings], object]


@dataclass(frozen=True, slots=True)
class Chapter:
    """What measures one thing: its title, and a function of a plan and an empty folder."""

    title: str
    measure: Callable[[Plan, Path], Found]


def run(chapters: Mapping[str, Chapter], plan: Plan, command: str, keep: Keep) -> Findings:
    """Runs chapters and returns what they found.

    One that fails is reported and keeps what it had found by then; the others are run all the same.
    `keep` is called after each, so that a run that is cut short has lost nothing but the last.
    """
    found = Findings(today(), command, describe_machine(), versions())
    start = time.perf_counter()
    for number, (name, chapter) in enumerate(chapters.items(), 1):
        _say(f"[{number}/{len(chapters)}] {name} ...")
        found.took[name] = _run(chapter, plan, found)
        keep(found)
        _report(name, found.took[name], time.perf_counter() - start)
    return found


def _run(chapter: Chapter, plan: Plan, found: Findings) -> Took:
    before, start = load(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kcache-bench-", ignore_cleanup_errors=True) as folder:
        error = _attempt(lambda: found.add(chapter.measure(plan, Path(folder))))
    return Took(chapter.title, round(time.perf_counter() - start, 1), before, load(), error)


def _attempt(work: Callable[[], object]) -> str:
    """Returns what ended the work early, in one line, and prints all of it; "" if nothing did."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """Returns an error in one line: of more than one, the first, and the last, which says why."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    text = lines[0] if len(lines) == 1 else f"{lines[0][:60].rstrip()} ... {lines[-1].strip()}"
    return f"{type(error).__name__}: {text}"


def _report(name: str, took: Took, total: float) -> None:
    end = f"failed: {took.error}" if took.error else "done"
    _say(f"      {name} {end}; {took.seconds:.0f} s, {minutes(total)} in all")


def minutes(seconds: float) -> str:
    """Returns a time as "3 min 05 s"."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest:02} s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def failed(found: Findings) -> list[str]:
    """Returns the chapters that failed."""
    return [name for name, took in found.took.items() if took.error]


def replace_text(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
