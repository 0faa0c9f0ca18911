"""Evidence: what several runs found out together, each chapter by the newest that has it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from harness.findings import Absent, Fact, Findings, Point, Ratio, Timing
from harness.names import OURS, PEERS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Runs, newest first, and the names of the files that hold them.

    A chapter's findings are those of one run, never a mixture of two.
    """

    runs: tuple[Findings, ...]
    files: tuple[str, ...]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Evidence":
        """Reads results files. Raises OSError and ValueError where there is none."""
        texts = [path.read_text(encoding="utf-8") for path in paths]
        runs = tuple(Findings.from_json(json.loads(text)) for text in texts)
        return cls(runs, tuple(path.name for path in paths))

    def chapters(self) -> dict[str, Findings]:
        """Returns the run of each chapter, in the order in which chapters are run."""
        found: dict[str, Findings] = {}
        for run in self.runs:
            for name in (*run.took, *(each.chapter for each in everything(run))):
                found.setdefault(name, run)
        return found

    def number(self, run: Findings) -> int:
        """Returns which run it is, counted from 1."""
        return 1 + next(n for n, each in enumerate(self.runs) if each is run)

    def title(self, chapter: str) -> str:
        took = self.chapters()[chapter].took.get(chapter)
        return took.title if took else chapter.capitalize()

    # The next methods yield what all chapters found, or one of them.

    def ratios(self, chapter: str | None = None) -> Iterator[Ratio]:
        for name, run in self._of(chapter):
            yield from (each for each in run.ratios if each.chapter == name)

    def facts(self, chapter: str | None = None) -> Iterator[Fact]:
        for name, run in self._of(chapter):
            yield from (each for each in run.facts if each.chapter == name)

    def timings(self, chapter: str | None = None) -> Iterator[Timing]:
        for name, run in self._of(chapter):
            yield from (each for each in run.timings if each.chapter == name)

    def points(self, chapter: str | None = None) -> Iterator[Point]:
        for name, run in self._of(chapter):
            yield from (each for each in run.points if each.chapter == name)

    def absent(self, chapter: str | None = None) -> Iterator[Absent]:
        for name, run in self._of(chapter):
            yield from (each for each in run.absent if each.chapter == name)

    def _of(self, chapter: str | None) -> Iterator[tuple[str, Findings]]:
        for name, run in self.chapters().items():
            if chapter in (None, name):
                yield name, run


def everything(run: Findings) -> Iterator[Ratio | Fact | Timing | Point | Absent]:
    return chain(run.ratios, run.facts, run.timings, run.points, run.absent)


def compared(fact: Fact) -> tuple[str, str] | None:
    """Returns what a fact compares and whom it is about, or None where it is about us alone.

    The figure of such a fact is "what: who".
    """
    what, _, who = fact.figure.rpartition(": ")
    return (what, who) if what and (who in PEERS or who.startswith(OURS)) else None


def is_promise(fact: Fact) -> bool:
    """Whether a fact has a target that is ours to meet; what a peer does is not."""
    whom = compared(fact)
    return bool(fact.target) and (whom is None or whom[1].startswith(OURS))
