"""Every speed and memory target, as a ratio of two figures taken side by side.

    python bench/ratios.py --quick                  ten minutes on two quiet cores
    python bench/ratios.py --only start             one chapter
    python bench/ratios.py --write-docs             the full run, and its tables into the docs
    python bench/ratios.py --from FILE --write-docs the tables of an earlier run into the docs;
                                                    --from is repeatable, newest first

Prints Markdown, and writes the figures to a JSON file, `bench/results/<date>.json`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from contents import CHAPTERS, TITLES
from findings import Findings, as_markdown
from machine import describe_machine, load, today, versions
from main_job import SELF_CONTAINED
from plan import QUICK, Plan
from raw_nvrtc import compile_case

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "benchmarks.md"
BEGIN = "<!-- begin: written by bench/ratios.py -->"
END = "<!-- end: written by bench/ratios.py -->"


def run(chapters: Iterable[str], plan: Plan, command: str) -> Findings:
    """Runs chapters, each in a temporary folder of its own, and returns what they found."""
    found = Findings(today(), command, describe_machine(), versions())
    compile_case(SELF_CONTAINED)  # loads the compiler, once for all
    for name in chapters:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="kcache-bench-") as folder:
            found.add(CHAPTERS[name](plan, Path(folder)))
    found.machine["load after"] = load()
    return found


def write_results(found: Findings, folder: Path, suffix: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.date}{suffix}.json"
    path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return path


def write_docs(tables: str, page: Path = PAGE) -> None:
    """Replaces what is between the two marks in the page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise RuntimeError(f"{page.name} lacks the marks of the generated part")
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every ratio with a target.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer entries")
    parser.add_argument("--only", action="append", choices=CHAPTERS, help="one chapter; repeatable")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument(
        "--from",
        dest="earlier",
        action="append",
        type=Path,
        help="JSON file of an earlier run; repeatable, each keeps its date, command and machine",
    )
    parser.add_argument("--write-docs", action="store_true", help="write the tables to the docs")
    arguments = parser.parse_args()
    if arguments.write_docs and (arguments.quick or arguments.only):
        parser.error("--write-docs wants the full run: neither --quick nor --only")
    try:
        tables = "\n".join(as_markdown(found, TITLES) for found in _found(arguments))
        print(tables)
        if arguments.write_docs:
            write_docs(tables)
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def _found(arguments: argparse.Namespace) -> list[Findings]:
    """Reads or measures what the arguments ask for."""
    if arguments.earlier is not None:
        texts = (path.read_text(encoding="utf-8") for path in arguments.earlier)
        return [Findings.from_json(json.loads(text)) for text in texts]
    only = [name for name in CHAPTERS if name in (arguments.only or ())]
    options = [f"--only {name}" for name in only]
    options += ["--quick"] if arguments.quick else []
    options += ["--write-docs"] if arguments.write_docs else []
    command = " ".join(["python bench/ratios.py", *options])
    found = run(only or CHAPTERS, QUICK if arguments.quick else Plan(), command)
    suffix = "".join(f"-{word}" for word in (*only, *(["quick"] if arguments.quick else [])))
    path = write_results(found, arguments.results, suffix)
    print(f"wrote {path.name}", file=sys.stderr)
    return [found]


if __name__ == "__main__":
    main()
