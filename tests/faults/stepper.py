"""Stepper: does something at the n-th point of an operation, in the frames of the files that matter.

A *line* stepper stops where Python's own tracing does: at each line, and at the entry to and the
return from each function. A *signal* stepper stops only where the interpreter runs the handlers of
signals: after a call, at the entry to a function, and at the head of a loop. A line stepper finds
more: it also interrupts the end of a `with` block, which no signal can.
"""

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

#: Instructions that run the handlers of signals at their end.
_LOOKING = ("CALL", "JUMP_BACKWARD", "RESUME")
_CODE: dict[CodeType, dict[int, str]] = {}


class Interrupt(BaseException):
    """What a signal's handler raises here; nothing in kcache expects it."""


def interrupt() -> None:
    raise Interrupt


class Stepper:
    """Runs an action at the n-th point; each object is for one run.

    Args:
        number: of the point, from 0; -1 only counts them.
        action: what to do there.
        files: parts of the paths of the files whose frames matter.
        signals: whether to stop only where signals are handled.
    """

    def __init__(
        self,
        number: int,
        action: Callable[[], object] = interrupt,
        *,
        files: tuple[str, ...] = ("/kcache/", "/kcache_backends/", "contextlib.py"),
        signals: bool = False,
    ) -> None:
        self.points = 0
        self._number = number
        self._action = action
        self._files = files
        self._signals = signals
        self._previous: dict[int, str] = {}

    def run(self, work: Callable[[], object]) -> bool:
        """Run `work`; tell whether the point was reached. An `Interrupt` ends here."""
        before = sys.gettrace()
        # CPython 3.12 traces instructions only if some frame wants it when tracing begins.
        sys._getframe().f_trace_opcodes = self._signals
        sys.settrace(self)
        try:
            work()
        except Interrupt:
            pass
        finally:
            sys.settrace(before)
        return self.points > self._number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._files):
            return None
        if self._signals:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            if event == "call":
                self._previous[id(frame)] = "RESUME"
            elif event == "opcode" and self._looks_for_signals(frame):
                self._step()
        elif event in ("call", "line", "return"):
            self._step()
        return self

    def _step(self) -> None:
        self.points += 1
        if self.points == self._number + 1:
            self._action()

    def _looks_for_signals(self, frame: FrameType) -> bool:
        """Tell whether the instruction before this one ended with a look for signals."""
        code = frame.f_code
        if code not in _CODE:
            _CODE[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
        before = self._previous.get(id(frame), "")
        self._previous[id(frame)] = _CODE[code].get(frame.f_lasti, "")
        return before.startswith(_LOOKING) and "INTRINSIC" not in before
