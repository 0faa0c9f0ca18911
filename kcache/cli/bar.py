"""Bar: how far a long piece of work is, with the time that is left, on a terminal only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar"]

#: Columns of the bar itself, at most.
_WIDEST = 60
#: Columns that stay free at the end of the line: ^C has room in it, too.
_SPARE = 3


class Bar:
    """A line on standard error while the block runs: title, bar, count, and the time left.

    Nothing where standard error is no terminal. Threads: `show` may be called from any, before the
    block too.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._drawn: tuple[Progress, TaskID] | None = None

    def show(self, done: int) -> None:
        """Show that `done` of the total are done."""
        self._done = done
        if self._drawn is not None:
            progress, task = self._drawn
            progress.update(task, completed=done)

    def __enter__(self) -> Self:
        """Draw the bar."""
        if sys.stderr is not None and sys.stderr.isatty():  # pyright: ignore[reportUnnecessaryComparison]
            progress = _progress(self._title, self._total)
            progress.start()
            task = progress.add_task(self._title, total=self._total, completed=self._done)
            self._drawn = progress, task
        return self

    def __exit__(self, *_: object) -> None:
        """Erase it."""
        if self._drawn is not None:
            self._drawn[0].stop()


def _progress(title: str, total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    texts = len(title) + len(f" {total}/{total} 0:00:00 ")
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(min(_WIDEST, max(1, console.width - texts - _SPARE))),
        MofNCompleteColumn(),
        Remaining(compact=True),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
