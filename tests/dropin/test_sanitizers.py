"""The interface library under the C compiler's sanitizers: threads, forks, malicious servers."""

import random
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, Dropin, Fake, Told

from kcache.dropin import build
from kcache.util.wire import WireError, heading, receive

pytestmark = pytest.mark.slow  # the library and its client are built for each sanitizer

_QUIET = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",
}
_FLAGS = ("-g", "-fno-omit-frame-pointer")


def _found_nothing(told: Told) -> None:
    assert (told.code, told.output) == (0, "done\n"), told.errors
    assert "Sanitizer" not in told.errors
    assert "runtime error" not in told.errors


@pytest.fixture(params=["address,undefined", "thread"])
def sanitized(
    request: pytest.FixtureRequest, real: Path, dropin: Dropin, tmp_path: Path
) -> Callable[..., Told]:
    """A function that runs `threads.c`. It and the libraries are built with the same sanitizer."""
    compiler = build.compiler()
    assert compiler is not None
    flags = [f"-fsanitize={request.param}", *_FLAGS]
    program = tmp_path / "threads"
    command = [compiler, *flags, CLIENTS / "threads.c", "-o", program, "-ldl", "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    trial = subprocess.run([program, "/nonexistent"], capture_output=True, text=True, check=False)
    if made.returncode != 0 or "line " not in trial.stderr:
        pytest.skip(f"no -fsanitize={request.param} here: {made.stderr or trial.stderr}")
    folder = tmp_path / "sanitized"
    build.build(str(folder), flags=flags)
    # With the sanitizer, NVRTC's RPATH has no effect. Reports about NVRTC itself are suppressed.
    (tmp_path / "suppressions").write_text(f"called_from_lib:{real.name}\n")
    options = {
        **_QUIET,
        "KCACHE_DROPIN_LIBRARIES": str(folder),
        "LD_LIBRARY_PATH": str(real.parent),
    }
    options["TSAN_OPTIONS"] += f":suppressions={tmp_path / 'suppressions'}"

    def run(rounds: int, socket: str | None = None) -> Told:
        if socket is None:
            return dropin.run(program, real, rounds, **options)
        where = ("env", f"KCACHE_DROPIN_SOCKET={socket}")
        return dropin.run(*where, program, real, rounds, "apart", **options)

    return run


def test_threads_and_forks(sanitized: Callable[..., Told]) -> None:
    told = sanitized(60)
    _found_nothing(told)
    assert told.misses == 6
    assert "uncacheable 0" in told.line


def _lie(chance: random.Random) -> bytes:
    """Return a random wrong answer, which may be empty."""
    sizes = (chance.randrange(40) for _ in range(chance.randrange(12)))
    fields = [chance.choice((b"done", b"wait", b"no", b"", b"?"))]
    fields += [chance.choice((b"1", chance.randbytes(size))) for size in sizes]
    frame = heading(fields) + b"".join(fields)
    return b"" if chance.random() < 0.3 else frame * chance.choice((1, 1, 2))


def test_invalid_answers_are_safe(sanitized: Callable[..., Told], dropin: Dropin) -> None:
    chance, lies = random.Random(7), []

    def attend(connection: socket.socket) -> None:
        with connection, suppress(WireError):
            while receive(connection.recv):
                lies.append(_lie(chance))
                connection.sendall(lies[-1])
                # After such an answer the connection is closed, or the program would wait.
                if b"wait" in lies[-1] or not lies[-1]:
                    return

    with closing(Fake(dropin.runtime, attend)) as liar:
        _found_nothing(sanitized(4, liar.path))
    assert len(lies) > 10


def test_malicious_answers_are_read_within_their_bounds(dropin: Dropin, tmp_path: Path) -> None:
    """If a malicious server sends wrong sizes, no byte beyond its answer is read."""
    compiler = build.compiler()
    assert compiler is not None
    flags = ("-fsanitize=address,undefined", *_FLAGS, "-DKCACHE_MAJOR=13", f"-I{build.SOURCES}")
    parts = [Path(build.SOURCES) / name for name in ("bytes.c",)]
    program = tmp_path / "lies"
    command = [compiler, *flags, CLIENTS / "lies.c", *parts, "-o", program, "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in made.stderr and "asan" in made.stderr:
        pytest.skip(f"no sanitizer here: {made.stderr}")
    assert made.returncode == 0, made.stderr
    _found_nothing(dropin.bare(program, **_QUIET))
