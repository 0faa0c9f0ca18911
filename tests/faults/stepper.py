"""Stepper: call a function at the n-th line of an operation, counted only in certain files."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stepper:
    """Calls a function at the n-th point of an operation. An object can be used for one run.

    A point is a line, or the entry to a function, or the return from a function.

    Args:
        number: number of the point, from 0. With -1, the points are only counted.
        action: the function to call at the point.
        files: parts of paths. Only points in files whose paths contain one of them are counted.
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
