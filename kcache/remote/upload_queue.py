"""UploadQueue: the uploads that wait for one remote, and the threads that perform them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcache.remote.daemon_protocol import Upload
    from kcache.remote.guarded_storage import GuardedStorage

#: Most uploads that may wait for one remote, and most bytes of them; further ones are dropped. A
#: run of CUTLASS examples makes some hundred kernels of up to 10 MB.
MAX_WAITING = 1024
MAX_BYTES = 256 << 20
#: Uploads at a time to one remote, so that their latencies overlap.
THREADS = 4


class UploadQueue:
    """A queue to one remote.

    Threads: safe to share; it has up to `THREADS` of its own.

    Args:
        remote: gets the uploads.
        done: called after each upload, successful or not.
    """

    def __init__(self, remote: GuardedStorage, done: Callable[[Upload], object]) -> None:
        self._remote = remote
        self._done = done
        self._pool = ThreadPoolExecutor(THREADS)
        self._adding = threading.Lock()
        #: What waits or is under way, and its bytes.
        self._sizes: dict[Future[None], int] = {}

    @property
    def pending(self) -> int:
        """How many uploads wait or are under way."""
        return len(self._sizes)

    def add(self, upload: Upload) -> None:
        """Queue an upload; drop and count it if the queue is full."""
        future: Future[None] = Future()
        with self._adding:
            size = upload.size + sum(list(self._sizes.values()))
            has_room = self.pending < MAX_WAITING and size <= MAX_BYTES
            if has_room:
                self._sizes[future] = upload.size
        if not has_room:
            self._remote.counts.add("dropped")
            self._done(upload)
            return
        future.add_done_callback(self._sizes.pop)
        with suppress(RuntimeError):  # no thread can start: it waits for the next upload
            self._pool.submit(self._upload, upload, future)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is pending; return whether that happened in time."""
        return not wait(list(self._sizes), seconds).not_done

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _upload(self, upload: Upload, future: Future[None]) -> None:
        """Put the kernel first, because a manifest must not name a missing kernel."""
        try:
            there = upload.kernel is None or self._remote.put(*upload.kernel)
            if there and upload.manifest is not None:
                self._remote.merge(*upload.manifest)
        finally:
            self._done(upload)
            future.set_result(None)
