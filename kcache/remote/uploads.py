"""Uploads: a bounded queue to one remote, sent while programs continue or after they ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcache.remote.protocol import Upload
    from kcache.remote.remote import Remote

__all__ = ["Uploads"]

#: Most uploads that may wait for one remote, and most bytes of them; further ones are dropped. A
#: run of CUTLASS examples makes some hundred kernels of up to 10 MB.
MAX_WAITING = 1024
MAX_BYTES = 256 << 20
#: Uploads at a time to one remote, so that their latencies overlap.
THREADS = 4


class Uploads:
    """A queue to one remote.

    Threads: safe to share; it has up to `THREADS` of its own.

    Args:
        remote: gets the uploads.
        done: called after each upload, successful or not.
    """

    def __init__(self, remote: Remote, done: Callable[[Upload], object]) -> None:
        self._remote = remote
        self._done = done
        self._pool = ThreadPoolExecutor(THREADS)
        self._changed = threading.Condition()
        self._bytes = 0
        #: How many uploads wait or are under way.
        self.pending = 0

    def add(self, upload: Upload) -> None:
        """Queue an upload; drop and count it if the queue is full."""
        with self._changed:
            has_room = self.pending < MAX_WAITING and self._bytes + upload.size <= MAX_BYTES
            if has_room:
                self.pending += 1
                self._bytes += upload.size
        if has_room:
            with suppress(RuntimeError):  # no thread can start: it waits for the next upload
                self._pool.submit(self._upload, upload)
        else:
            self._remote.counts.add("dropped")
            self._done(upload)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is pending; tell whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, seconds)

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _upload(self, upload: Upload) -> None:
        """Put the kernel first, because a manifest must not name a missing kernel."""
        try:
            there = upload.kernel is None or self._remote.put(*upload.kernel)
            if there and upload.manifest is not None:
                self._remote.merge(*upload.manifest)
        finally:
            self._done(upload)
            with self._changed:
                self.pending -= 1
                self._bytes -= upload.size
                self._changed.notify_all()
