"""The log: the logger `kcache` of the standard library, imported for the first message.

Importing `logging` takes 8 ms. A cache hit in a fresh process need not pay this: as long as no code
has imported it, no code can have asked for messages below a warning.

Daemon threads log nothing once the interpreter ends. The interpreter kills them in the middle of a
line, and then aborts the process (SIGABRT), because it can't flush standard error any more.
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
#: The process group that reads the log, if it is not this process's own.
_readers: int | None = None


@cache
def _logger() -> Logger:
    with importing:
        import logging  # noqa: PLC0415  5 ms

    return logging.getLogger("kcache")


def _wants(level: int) -> bool:
    """Return whether messages of a level of `logging` are wanted."""
    return "logging" in sys.modules and _logger().isEnabledFor(level) and not is_ending()


def _texts(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments in a form that any handler can write and that keeps no traceback alive.

    A path may hold bytes that are not text, which Python shows as lone surrogates.
    """
    return tuple(
        str(arg).encode("utf-8", "backslashreplace").decode()
        if isinstance(arg, (str, BaseException))
        else arg
        for arg in args
    )


#: Returns whether messages at debug level are wanted; to make them may take long.
debugging = partial(_wants, _DEBUG)


def _log(level: int, message: str, *args: object) -> None:
    """Log `message % args` at a level."""
    if _wants(level):
        _logger().log(level, message, *_texts(args))


debug = partial(_log, _DEBUG)
info = partial(_log, _INFO)


def warning(message: str, *args: object) -> None:
    """Log a warning."""
    if not is_ending():
        with suppress(OSError):  # no descriptor is left for its import
            logger = _logger()
            if not logger.hasHandlers():  # Python writes the bare message to standard error
                message = f"kcache: warning: {message}"
            logger.warning(message, *_texts(args))


def warning_once(message: str) -> None:
    """Log a warning that this process has not logged yet."""
    if message not in _logged:
        _logged.add(message)
        warning("%s", message)


def group() -> int:
    """Return the process group that reads the log; 0 on systems without process groups."""
    if _readers is not None:
        return _readers
    return os.getpgrp() if hasattr(os, "getpgrp") else 0


def set_readers(readers: int) -> None:
    """Record that another process group reads the log of this process."""
    global _readers  # noqa: PLW0603  the logger is the process's, too
    _readers = readers


def log_to_stderr(level: str) -> None:
    """Log from `level` on (`"debug"`, `"info"`, ...) to standard error, once per process."""
    logger = _logger()
    import logging  # noqa: PLC0415

    class Handler(logging.Handler):
        """Writes lines as the command `kcache` does, also where standard error was replaced."""

        def emit(self, record: logging.LogRecord) -> None:
            line = plain(f"kcache: {record.levelname.lower()}: {record.getMessage()}")
            with suppress(AttributeError, OSError, ValueError):  # there is no standard error
                sys.stderr.write(f"{line}\n")

    logger.setLevel(level.upper())
    if not any(handler.get_name() == "kcache" for handler in logger.handlers):
        handler = Handler()
        handler.set_name("kcache")
        logger.addHandler(handler)
