"""RangeLocks: exclude threads, handles and processes, and go with the process that held them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from core.helpers import fork, wait

from kcache.util import locks as locks_module
from kcache.util.locks import RangeLocks


@contextmanager
def opened(path: Path) -> Iterator[RangeLocks]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield RangeLocks(fd)
    finally:
        os.close(fd)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def count_up(locks: RangeLocks, counter: Path, times: int) -> None:
    """Adds to the number in a file in three steps that must not be mixed with another's."""
    for _ in range(times):
        with locks.held(64, 32):
            value = int(counter.read_text())
            os.sched_yield()
            counter.write_text(str(value + 1))


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "counter"
    path.write_text("0")
    return path


def test_excludes_threads(file: Path, counter: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with opened(file) as locks:
            threads = [threading.Thread(target=count_up, args=(locks, counter, 50)) for _ in "1234"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counter.read_text() == "200"


def test_excludes_processes(file: Path, counter: Path) -> None:
    def work() -> None:
        with opened(file) as locks:
            count_up(locks, counter, 50)

    children = [fork(work) for _ in range(4)]
    assert [wait(child) for child in children] == [0] * 4
    assert counter.read_text() == "200"


def test_excludes_two_handles_in_one_process(file: Path) -> None:
    with opened(file) as one, opened(file) as two:
        with one.held(0, 32):
            assert not two.claim(0, 32)
            assert not two.claim(31, 1)
            assert two.claim(32, 32)
        assert two.claim(0, 32)


def test_other_ranges_are_free_while_one_is_held(file: Path) -> None:
    with opened(file) as locks, locks.held(0, 32), locks.held(32, 32), opened(file) as other:
        assert not other.claim(0, 32)
        assert not other.claim(32, 32)
        assert other.claim(64, 32)


def test_closing_another_handle_of_the_file_keeps_the_lock(file: Path) -> None:
    with opened(file) as locks, locks.held(0, 32):
        file.read_bytes()
        with opened(file) as other:
            assert not other.claim(0, 32)
        with opened(file) as other:
            assert not other.claim(0, 32)


def test_an_exception_in_the_block_releases_it(file: Path) -> None:
    with opened(file) as one, opened(file) as two:
        with pytest.raises(KeyError), one.held(0, 32):
            raise KeyError
        assert two.claim(0, 32)


def test_a_claim_lasts_until_the_file_is_closed(file: Path) -> None:
    with opened(file) as other:
        with opened(file) as locks:
            assert locks.claim(0, 32)
            assert not other.claim(0, 32)
        assert other.claim(0, 32)


@pytest.mark.parametrize("how", ["held", "claim"])
def test_the_kernel_releases_what_a_killed_process_held(how: str, file: Path) -> None:
    reading, writing = os.pipe()

    def work() -> None:
        with opened(file) as locks:
            if how == "claim":
                assert locks.claim(0, 32)
                os.write(writing, b"x")
                signal.pause()
            with locks.held(0, 32):
                os.write(writing, b"x")
                signal.pause()

    child = fork(work)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    with opened(file) as locks:
        assert not locks.claim(0, 32)
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL
        assert locks.claim(0, 32)


def test_a_child_that_closes_its_copy_of_the_file_releases_nothing(file: Path) -> None:
    with opened(file) as locks, locks.held(0, 32):
        assert wait(fork(lambda: os.close(locks.fd))) == 0
        with opened(file) as other:
            assert not other.claim(0, 32)


def test_where_locks_are_refused_threads_still_exclude_each_other(
    file: Path, counter: Path
) -> None:
    with opened(file) as locks:
        with locks.held(-1, 1):  # no file system has such a range
            assert not locks.supported
        threads = [threading.Thread(target=count_up, args=(locks, counter, 25)) for _ in "1234"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not locks.claim(0, 32)
    assert counter.read_text() == "100"


def test_waits_in_vain_do_not_add_up(file: Path) -> None:
    """Three hundred compiles beside a process that was stopped wait once."""
    with opened(file) as holder, opened(file) as waiter:
        with holder.held(0, 1):
            with pytest.raises(TimeoutError), waiter.held(0, 1, timeout=0.01):
                pytest.fail("two hold it")
            for _ in range(300):
                with pytest.raises(TimeoutError), waiter.held(0, 1, timeout=3600):
                    pytest.fail("two hold it")
            with waiter.held(1, 1, timeout=3600):
                pass
        with waiter.held(0, 1, timeout=3600):  # free again, so that no wait is needed
            pass


def test_an_interrupt_at_any_line_leaves_the_range_to_the_others(file: Path) -> None:
    """Ctrl-C in a put must not cost every later put of the process ten seconds."""
    with opened(file) as locks:
        for line in range(100):
            left = [line]

            def tracer(frame: Any, event: str, _: object, left: list[int] = left) -> Any:
                if not frame.f_code.co_filename.endswith("kcache/util/locks.py"):
                    return None
                if event == "line" and "_unlock" not in frame.f_code.co_name:
                    left[0] -= 1
                    if left[0] == 0 and not releases(frame):
                        raise KeyboardInterrupt
                return tracer

            sys.settrace(tracer)
            try:
                with locks.held(0, 1, timeout=60):
                    pass
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            others = threading.Thread(target=count_up_once, args=(locks,))
            others.start()
            others.join()
            assert not locks._given_up


def releases(frame: Any) -> bool:
    """Tells whether the release itself is under way: nothing helps against interrupts of that."""
    callers = (frame.f_code.co_name, frame.f_back.f_code.co_name)
    return frame.f_lineno in RELEASING or any("_unlock" in name for name in callers)


def count_up_once(locks: RangeLocks) -> None:
    with locks.held(0, 1, timeout=0.05):
        pass


RELEASING = {
    number
    for number, line in enumerate(Path(locks_module.__file__).read_text().splitlines(), 1)
    if "release()" in line or "_is_owned()" in line or "self._unlock(" in line
}
