"""Uploads: a bounded queue to one remote, sent while programs continue or after they ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcache.remote.protocol import Upload
    from kcache.remote.tier import Tier

__all__ = ["Uploads"]

#: Most uploads that may wait for one remote, and most bytes of them; further ones are dropped. A
#: run of CUTLASS examples makes some hundred kernels of up to 10 MB.
MAX_WAITING = 1024
MAX_BYTES = 256 << 20
#: Uploads at a time to one remote, so that their latencies overlap.
THREADS = 4


class Uploads:
    """A queue to one remote, and threads that empty it.

    Threads: safe to share; it starts up to `THREADS` threads when there is something to send.

    Args:
        tier: the remote that gets the uploads.
        done: called after each upload, successful or not.
    """

    def __init__(self, tier: Tier, done: Callable[[Upload], object]) -> None:
        self._tier = tier
        self._done = done
        self._changed = threading.Condition()
        self._waiting: deque[Upload] = deque()
        self._bytes = 0
        self._busy = 0
        self._threads = 0

    def add(self, upload: Upload) -> None:
        """Queue an upload; drop and count it if the queue is full, or if no thread can start."""
        with self._changed:
            room = len(self._waiting) < MAX_WAITING and self._bytes + upload.size <= MAX_BYTES
            if (
                room
                and self._threads < THREADS
                and self._threads <= self._busy + len(self._waiting)
            ):
                with suppress(RuntimeError):  # the machine has no more threads
                    threading.Thread(target=self._work, daemon=True).start()
                    self._threads += 1
            taken = room and self._threads > 0
            if taken:
                self._waiting.append(upload)
                self._bytes += upload.size
                self._changed.notify()
        if not taken:
            self._tier.counts.add("dropped")
            self._done(upload)

    @property
    def pending(self) -> int:
        """How many uploads wait or are under way."""
        with self._changed:
            return len(self._waiting) + self._busy

    def flush(self, deadline: float) -> bool:
        """Wait until nothing is pending; tell whether that happened before the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._busy, max(0.0, deadline - time.monotonic())
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                upload = self._waiting.popleft()
                self._bytes -= upload.size
                self._busy += 1
            try:
                self._upload(upload)
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _upload(self, upload: Upload) -> None:
        """Put the kernel first, because a manifest must not name a missing kernel."""
        try:
            there = upload.kernel is None or self._tier.put(*upload.kernel)
            if there and upload.manifest is not None:
                self._tier.merge(*upload.manifest)
        finally:
            self._done(upload)
