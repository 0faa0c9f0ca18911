"""Everything that is measured, side by side, in one run on one machine.

    python bench/ratios.py --quick                   fewer rounds, fewer entries: a quarter hour
    python bench/ratios.py                           the full run (--full says the same)
    python bench/ratios.py --only start              one chapter; repeatable
    python bench/ratios.py --from FILE --write-docs  the figures of an earlier run into the docs;
                                                     --from is repeatable, newest first

Writes `<date>.json`, `<date>.md` and the charts `<date>/*.svg` into `bench/results/`; a part of the
whole has its name after the date, such as `<date>-quick`. Prints the tables of targets, of ratios
to every peer and floor, and what could not be measured here. Exits with 1 if a chapter failed: the
others are measured and written all the same, after each chapter.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from contents import CHAPTERS, TITLES
from harness.findings import Findings
from harness.main_job import SELF_CONTAINED
from harness.plan import QUICK, Plan
from harness.raw_nvrtc import compile_case
from harness.run_chapters import Chapter, failed, replace_text, run
from report.chart_specs import all_charts
from report.evidence import RESULTS, Evidence
from report.notation import aligned
from report.pages import CHARTS, charts_in, pages, picture, write_pages
from report.tables import summary, whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure everything, side by side.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer rounds, fewer entries")
    size.add_argument("--full", action="store_true", help="all rounds and entries: the default")
    parser.add_argument(
        "--only", action="append", choices=CHAPTERS, default=[], help="one chapter; repeatable"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for what is written")
    parser.add_argument(
        "--from",
        dest="earlier",
        action="append",
        type=Path,
        help="JSON file of an earlier run in that folder; repeatable, newest first",
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="write the figures into README.md and docs/"
    )
    arguments = parser.parse_args()
    if arguments.write_docs and not arguments.earlier and (arguments.quick or arguments.only):
        parser.error("--write-docs wants the full run, or --from")
    if arguments.write_docs and not _are_kept(arguments):
        parser.error(f"--write-docs wants results in {os.path.relpath(RESULTS)}, to be committed")
    try:
        evidence = _evidence(arguments)
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted; what the finished chapters found is written\n")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(aligned("\n\n".join(summary(evidence))))
    if arguments.write_docs:
        _write_docs(evidence)
    without = failed(evidence.runs[0])
    if without:
        parser.exit(1, f"failed: {', '.join(without)}\n")


def _are_kept(arguments: argparse.Namespace) -> bool:
    """Whether the results are where a test finds those that a page is written from."""
    folders = {path.resolve().parent for path in arguments.earlier or ()} or {
        arguments.results.resolve()
    }
    return folders == {RESULTS.resolve()}


def _evidence(arguments: argparse.Namespace) -> Evidence:
    """Reads or measures what the arguments ask for."""
    if arguments.earlier:
        return Evidence.read(arguments.earlier)
    only = [name for name in CHAPTERS if name in arguments.only]
    words = [*(f"--only {name}" for name in only), *(["--quick"] if arguments.quick else [])]
    command = " ".join(["python bench/ratios.py", *words])
    suffix = "".join(f"-{word}" for word in (*only, *(["quick"] if arguments.quick else [])))
    folder: Path = arguments.results
    folder.mkdir(parents=True, exist_ok=True)
    plan = QUICK if arguments.quick else Plan()
    _load_compiler()
    chapters = {name: Chapter(TITLES[name], CHAPTERS[name]) for name in only or CHAPTERS}
    found = run(chapters, plan, command, lambda found: write_results(found, folder, suffix))
    name = f"{found.date}{suffix}"
    evidence = Evidence((found,), (f"{name}.json",))
    charts = _draw(evidence, folder / name)
    page = f"# Benchmarks of {found.date}\n\n{whole(evidence, lambda c: picture(c, name))}"
    replace_text(folder / f"{name}.md", page)
    drawn = f" and {charts} charts" if charts else ""
    print(f"wrote {name}.json, {name}.md{drawn} in {os.path.relpath(folder)}\n", file=sys.stderr)
    return evidence


def _load_compiler() -> None:
    """Compiles something, so that no chapter's first compile loads the library."""
    try:
        compile_case(SELF_CONTAINED)
    except Exception as error:  # any exception: chapters without a compiler can still run
        print(f"the compiler can't be used: {error}", file=sys.stderr)


def write_results(found: Findings, folder: Path, suffix: str) -> Path:
    path = folder / f"{found.date}{suffix}.json"
    replace_text(path, json.dumps(found.to_json(), indent=1) + "\n")
    return path


def _draw(evidence: Evidence, folder: Path) -> int:
    """Draws every chart into `folder`; returns how many there are, 0 without Matplotlib."""
    try:
        from report.draw import write_charts

        return len(write_charts(all_charts(evidence), folder))
    except ImportError as error:
        print(f"no charts: {error}; the dependency group `bench` has Matplotlib", file=sys.stderr)
        return 0


def _write_docs(evidence: Evidence) -> None:
    """Writes the generated parts, and the charts that the pages then show, and no others."""
    from report.draw import write_charts

    for part in write_pages(evidence):
        print(f"{part.page.name}: {part.name}: nothing was measured", file=sys.stderr)
    shown = charts_in(pages())
    drawn = {name: chart for name, chart in all_charts(evidence).items() if name in shown}
    files = set(write_charts(drawn, CHARTS))
    for path in set(CHARTS.glob("*.svg")) - files:
        path.unlink()
    print(f"wrote the pages, and {len(files)} charts for them", file=sys.stderr)


if __name__ == "__main__":
    main()
