"""Mutants: apply one deliberate fault after another to a copy of the tree, and run its tests.

    python tests/mutants/run.py [--seconds N] [--list] [TEXT...]

With TEXT arguments, only faults with one of the texts in their names are tried. For each fault, the
program prints whether a test noticed it, and which test. It exits with 1 if no test noticed a
fault, or if the text that a fault replaces no longer exists.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("kcache", "backends", "tests", "bench", "docs", "examples", "pyproject.toml", "README.md")
CAUGHT, MISSED, GONE, LATE = "caught", "MISSED", "GONE: `old` must occur once", "no time"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`, and one of `tests` has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def is_there(self, root: Path) -> bool:
        """Return whether `file` contains `old` exactly once."""
        path = root / self.file
        return path.is_file() and path.read_text(encoding="utf-8").count(self.old) == 1


def read() -> list[Mutant]:
    """Return all faults."""
    text = Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8")
    return [Mutant(**each) for each in tomllib.loads(text)["mutant"]]


def copy_to(folder: Path) -> None:
    """Copy what the tests need into `folder`, without compiled files."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", ".*")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder)


def try_out(mutant: Mutant, root: Path, number: int, seconds: float) -> tuple[str, str]:
    """Run the tests of a fault; return the outcome, and the first test that failed."""
    if not mutant.is_there(root):
        return GONE, ""
    path = root / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    # Python uses a compiled module if its source has the same size and the same time in seconds.
    os.utime(path, (number, number))
    try:
        return _run(mutant, root, seconds)
    finally:
        path.write_text(before, encoding="utf-8")


def _run(mutant: Mutant, root: Path, seconds: float) -> tuple[str, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout=60", "-m", "not slow", *shlex.split(mutant.tests)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KCACHE_")}
    places = os.pathsep.join([str(root), str(root / "backends")])
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**inherited, "PYTHONPATH": places},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return LATE, ""
        output.seek(0)
        failed = _FAILED.search(output.read())
    return (CAUGHT, failed[1]) if failed else (MISSED, f"pytest ended with {process.returncode}")


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Try deliberate faults on the tests.")
    parser.add_argument(
        "names", nargs="*", metavar="TEXT", help="only faults with it in their name"
    )
    parser.add_argument(
        "--seconds", type=float, default=240, help="time limit for one fault's tests"
    )
    parser.add_argument(
        "--list", action="store_true", help="only print whether each fault can be made"
    )
    given = parser.parse_args()
    chosen = [m for m in read() if not given.names or any(text in m.name for text in given.names)]
    outcomes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if not given.list:
            copy_to(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            start = time.monotonic()
            if given.list:
                outcome, by = ("there" if mutant.is_there(ROOT) else GONE), mutant.file
            else:
                outcome, by = try_out(mutant, Path(folder), number, given.seconds)
            outcomes.append(outcome)
            print(f"{outcome:8} {time.monotonic() - start:5.0f} s  {mutant.name}: {by}", flush=True)
    print(", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes)))
    return int(any(each in (MISSED, GONE, LATE) for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
