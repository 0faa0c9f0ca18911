"""Stepper: does something at the n-th line of an operation, in the frames of the files that matter."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stepper:
    """Runs an action at the n-th point; each object is for one run.

    A point is a line, or the entry to or the return from a function.

    Args:
        number: of the point, from 0; -1 only counts them.
        action: what to do there.
        files: parts of the paths of the files whose frames matter.
    """

    def __init__(self, number: int, action: Callable[[], object], files: tuple[str, ...]) -> None:
        self.points = 0
        self._number = number
        self._action = action
        self._files = files

    def run(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(before)

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._files):
            return None
        if event in ("call", "line", "return"):
            self.points += 1
            if self.points == self._number + 1:
                self._action()
        return self
