"""The log: messages to the logger `kcache` of the module `logging`.

`logging` is imported for the first message, because the import takes 8 ms, which a cache hit in a
new process need not spend. As long as no code has imported `logging`, no code can have requested
messages below a warning.

While the interpreter is ending, daemon threads log nothing. The interpreter could kill such a
thread in the middle of a line, and would then abort the process (SIGABRT), because it could no
longer flush standard error.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from kcache.util.forks import importing, is_ending
from kcache.util.units import plain

if TYPE_CHECKING:
    from logging import Logger

#: Levels of `logging`.
_DEBUG, _INFO = 10, 20
_logged: set[str] = set()
#: The process group of the program for whose user this process writes its log, if it is not this
#: process's own group.
_readers: int | None = None


@cache
def _logger() -> Logger:
    with importing:
        import logging  # noqa: PLC0415  5 ms

    return logging.getLogger("kcache")


def _wants(level: int) -> bool:
    """Return whether the program logs messages of kcache at `level`, a level of `logging`."""
    return "logging" in sys.modules and _logger().isEnabledFor(level) and not is_ending()


def _texts(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments of a message, with texts and exceptions as text that can be encoded.

    A path may have bytes that are not UTF-8; Python represents them as lone surrogates, which not
    every handler can write. An exception would keep its traceback alive.
    """
    return tuple(
        str(arg).encode("utf-8", "backslashreplace").decode()
        if isinstance(arg, (str, BaseException))
        else arg
        for arg in args
    )


#: Returns whether messages at debug level are logged. If not, a caller need not prepare one.
debugging = partial(_wants, _DEBUG)


def _log(level: int, message: str, *args: object) -> None:
    """Log `message % args` at `level`, a level of `logging`."""
    if _wants(level):
        _logger().log(level, message, *_texts(args))


debug = partial(_log, _DEBUG)
info = partial(_log, _INFO)


def warning(message: str, *args: object) -> None:
    """Log `message % args` as a warning."""
    if not is_ending():
        with suppress(OSError):  # importing `logging` fails if no descriptor is left
            logger = _logger()
            if not logger.hasHandlers():  # Python writes the bare message to standard error
                message = f"kcache: warning: {message}"
            logger.warning(message, *_texts(args))


def warning_once(message: str) -> None:
    """Log `message` as a warning, unless this process has already logged it by this function."""
    if message not in _logged:
        _logged.add(message)
        warning("%s", message)


def group() -> int:
    """Return the process group of the program for whose user this process writes its log.

    This is the group of this process, unless `set_readers` was called. On systems without process
    groups, it is 0.
    """
    if _readers is not None:
        return _readers
    return os.getpgrp() if hasattr(os, "getpgrp") else 0


def set_readers(readers: int) -> None:
    """Record that this process writes its log for the user of the process group `readers`."""
    global _readers  # noqa: PLW0603  there is also one logger for the whole process
    _readers = readers


def log_to_stderr(level: str) -> None:
    """Write kcache's messages from `level` on (`"debug"`, `"info"`, ...) to standard error.

    Further calls change the level, but do not write messages twice.
    """
    logger = _logger()
    import logging  # noqa: PLC0415

    class Handler(logging.Handler):
        """Writes messages to the present `sys.stderr`, in the format of the command `kcache`."""

        def emit(self, record: logging.LogRecord) -> None:
            line = plain(f"kcache: {record.levelname.lower()}: {record.getMessage()}")
            with suppress(AttributeError, OSError, ValueError):  # there is no standard error
                sys.stderr.write(f"{line}\n")

    logger.setLevel(level.upper())
    if not any(handler.get_name() == "kcache" for handler in logger.handlers):
        handler = Handler()
        handler.set_name("kcache")
        logger.addHandler(handler)
