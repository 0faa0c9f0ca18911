"""Answers: asks the operating system the rarer questions of a trace again.

Each answer must have the form that `workers/recorder.py` wrote down when the compiler asked.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TypeAlias

import xxhash

__all__ = ["Question", "answer_now", "error_now"]

#: `lstat`, `listdir`, `readlink`, `realpath`, or `access` and a mode.
Question: TypeAlias = str


def answer_now(question: Question, path: str) -> bytes | None:
    """Return the answer, or None if the question is not known here."""
    if question == "lstat":
        return _link_kind(path)
    if question == "listdir":
        try:
            names = b"\0".join(sorted(os.listdir(os.fsencode(path))))
        except OSError as error:
            return b"%d" % (error.errno or 0)
        return xxhash.xxh3_128_digest(names)
    if question == "readlink":
        try:
            return os.readlink(os.fsencode(path))
        except OSError:
            return b""
    if question == "realpath":
        try:
            return os.path.realpath(os.fsencode(path), strict=True)
        except OSError:
            return b""
    mode = question.removeprefix("access")
    return _access(path, int(mode)) if mode != question and mode.isdecimal() else None


def error_now(path: str) -> int:
    """Return the errno with which stat or open of a path fails; 0 for none."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode):
            # A forged manifest may name a file that acts when it is opened.
            return 0 if os.access(path, os.R_OK) else errno.EACCES
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        os.close(os.open(path, flags))
    except OSError as error:
        return error.errno or 0
    return 0


def _link_kind(path: str) -> bytes:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return b"-"
    return b"f" if stat.S_ISREG(mode) else b"d" if stat.S_ISDIR(mode) else b"o"


def _access(path: str, mode: int) -> bytes:
    if os.access(path, mode):
        return b"0"
    try:
        os.stat(path)
    except OSError as error:
        return b"%d" % (error.errno or 0)
    return b"13"  # EACCES
