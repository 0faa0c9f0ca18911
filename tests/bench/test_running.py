"""Runs: a chapter that fails costs itself, and a run that is cut short costs the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.findings import Findings
from harness.plan import QUICK, Found, Plan
from harness.run_chapters import Chapter, failed, run

from .sample import ratio

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"

#: `bench/ratios.py` with other chapters than its own, which need a compiler and minutes.
PROGRAM = """\
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {bench!r})
from harness.findings import Ratio
from harness.measure import Summary

def ratio(chapter, value):
    one = Summary(value, value, value, 1)
    return Ratio(chapter, "a figure", "diskcache", "s", one, one, one, target=2.0)

def fine(plan, folder):
    yield ratio("fine", 1.5)

def broken(plan, folder):
    yield ratio("broken", 3.0)
    raise OSError("the disk is full")

def stopped(plan, folder):
    raise KeyboardInterrupt

def noop(case):
    pass

names = {names!r}
sys.modules["contents"] = SimpleNamespace(
    CHAPTERS={{name: globals()[name] for name in names}}, TITLES={{n: n.title() for n in names}}
)
sys.modules["harness.raw_nvrtc"] = SimpleNamespace(compile_case=noop)
sys.modules["harness.main_job"] = SimpleNamespace(SELF_CONTAINED=None)
import ratios
sys.argv = ["ratios.py", "--results", {results!r}, *{arguments!r}]
ratios.main()
"""


def program(
    names: list[str], results: Path, *arguments: str, bench: Path = BENCH
) -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(
        bench=str(bench), names=names, results=str(results), arguments=list(arguments)
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def read(folder: Path, pattern: str = "*.json") -> Findings:
    (path,) = folder.glob(pattern)
    return Findings.from_json(json.loads(path.read_text(encoding="utf-8")))


def test_every_chapter_is_kept_when_it_ends() -> None:
    def measure(plan: Plan, folder: Path) -> Found:
        assert folder.is_dir()
        yield ratio("one", "a figure", "diskcache", float(plan.processes))

    def fail(plan: Plan, folder: Path) -> Found:
        yield ratio("two", "found before", "diskcache", 1.0)
        raise RuntimeError("no luck\nsecond line\nlast line")

    kept: list[tuple[int, list[str]]] = []
    chapters = {"one": Chapter("One", measure), "two": Chapter("Two", fail)}
    chapters["three"] = Chapter("Three", measure)
    found = run(chapters, QUICK, "command", lambda f: kept.append((len(f.ratios), list(f.took))))
    assert kept == [(1, ["one"]), (2, ["one", "two"]), (3, ["one", "two", "three"])]
    assert failed(found) == ["two"]
    assert found.took["two"].error == "RuntimeError: no luck ... last line"
    assert [each.figure for each in found.ratios] == ["a figure", "found before", "a figure"]


def test_the_program_writes_and_prints(tmp_path: Path) -> None:
    done = program(["fine"], tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    assert "[1/1] fine" in done.stderr
    assert "#### To diskcache" in done.stdout
    assert "1 of 1 targets are met." in done.stdout
    assert "Everything was measured." in done.stdout
    found = read(tmp_path, "*-quick.json")
    assert found.command == "python bench/ratios.py --quick"
    assert found.took["fine"].title == "Fine"
    (page,) = tmp_path.glob("*-quick.md")
    assert "#### Fine" in page.read_text(encoding="utf-8")


def test_a_chapter_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    done = program(["broken", "fine"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("failed: broken\n")
    assert "Traceback" in done.stderr
    assert "OSError: the disk is full" in done.stdout
    assert "1 of 2 targets are met." in done.stdout
    assert [each.chapter for each in read(tmp_path).ratios] == ["broken", "fine"]


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    done = program(["fine", "stopped", "broken"], tmp_path)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr
    assert [each.chapter for each in read(tmp_path).ratios] == ["fine"]


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "fine"], ["--from", "{}"], []])
def test_the_pages_are_of_whole_runs_that_are_kept(tmp_path: Path, arguments: list[str]) -> None:
    program(["fine"], tmp_path)
    (path,) = tmp_path.glob("*.json")
    words = [word.format(path) for word in arguments]
    done = program(["fine"], tmp_path, *words, "--write-docs")
    assert done.returncode == 2
    assert "--write-docs wants" in done.stderr


def test_an_earlier_run_is_written_into_the_pages(tmp_path: Path) -> None:
    """The command of docs/explanation/benchmarks.md, in a copy of the checkout."""
    pytest.importorskip("matplotlib", reason="drawing needs Matplotlib, of the extra `bench`")
    copy = tmp_path / "copy"
    for name in ("bench", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", copy)
    page = copy / "docs" / "explanation" / "benchmarks.md"
    command = re.search(
        r"^\.venv/bin/python bench/ratios\.py (.*)$", page.read_text(), re.MULTILINE
    )
    assert command is not None
    words = [str(copy / w) if w.startswith("bench/") else w for w in command[1].split()]
    done = program(["fine"], tmp_path, *words, bench=copy / "bench")
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "<!-- from 2026-11-23-quick.json -->" in text
    assert "Measured on 2026-11-23 by `python bench/ratios.py --quick`" in text
    shown = set(re.findall(r'src="charts/([^"]+)"', text))
    drawn = {path.name for path in (page.parent / "charts").iterdir()}
    assert shown
    assert drawn >= shown
    assert all("-light" in name or "-dark" in name for name in drawn)
