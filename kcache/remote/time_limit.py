"""TimeLimit: a limit for the whole time of a call, whatever the call waits for.

A client of a protocol limits each wait for bytes. A server that sends a byte a second, a name
server that does not answer, and a client with a defect have no such limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kcache.remote.remote_client import RemoteError, RemoteTimeout

__all__ = ["TimeLimit"]

_T = TypeVar("_T")


class TimeLimit:
    """Calls functions, each in a thread of its own, and waits for them as long as is allowed.

    Threads: safe to share. A call that takes longer goes on in its thread; its result is dropped.
    """

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_late(self) -> bool:
        """Whether a call that took too long still runs."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return bool(self._late)

    def call(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Return the result of `work`.

        Raises:
            RemoteTimeout: it takes longer than `seconds`.
            RemoteError: it has raised something that is no Exception.
            RuntimeError: the machine has no more threads.
            Exception: whatever `work` raises.
        """
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # a panic of Rust is no Exception
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors and isinstance(errors[0], Exception):
            raise errors[0]
        if errors:
            raise RemoteError(repr(errors[0])) from errors[0]
        if results:
            return results[0]
        self._late.append(thread)
        raise RemoteTimeout(f"no answer within {seconds:g} s")
