"""CompileService: answers the programs under `kcache run` from one cache, in a daemon."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kcache.daemons.sockets import DONE, NO
from kcache.dropin import libraries, protocol
from kcache.dropin import run_environment as env
from kcache.dropin.protocol import DeclinedError, Program
from kcache.util import log
from kcache.util.wire import WireError, split_texts

if TYPE_CHECKING:
    from kcache.daemons.daemon_server import Client
    from kcache.dropin.nvrtc_handler import NvrtcHandler
    from kcache.nvcc.handler import NvccHandler
    from kcache.remote import daemon_client

#: After its program has ended, the daemon stays up to this many seconds to warn of remotes that do
#: not answer.
_LAST_WARNINGS = 2.0


def make(settings: bytes, group: int, stderr_fd: int) -> CompileService:
    """Return the object that answers in the daemon; `kcache.daemons.daemon_server` calls this.

    Args:
        settings: what `run_environment.service` has packed; empty if no program will ask anything.
        group: the process group whose programs get warnings, or 0 if no program gets any.
        stderr_fd: a descriptor of the program's standard error; it is closed after the warnings.
    """
    os.chdir("/")  # the program's directory may be removed, or its disk unmounted
    if env.current().get(env.LOG):
        os.dup2(stderr_fd, 2)
        log.set_readers(group)
    service = CompileService(dict(zip(*[iter(split_texts(settings))] * 2, strict=True)))
    if group:
        service.complaining = threading.Thread(target=_complain, args=(service, stderr_fd, group))
        service.complaining.daemon = True
        service.complaining.start()
    else:
        os.close(stderr_fd)
    if settings:
        threading.Thread(target=service.warm_up, daemon=True).start()
    return service


def _complain(service: CompileService, stderr_fd: int, group: int) -> None:
    """While the program runs, warn it of wrong settings and of remotes that do not answer.

    If no setting of kcache is in the environment, nothing is checked, because the imports would
    delay the first answer.
    """

    def warn(line: str) -> None:
        with suppress(OSError):
            os.write(stderr_fd, f"kcache: warning: {line}\n".encode("utf-8", "backslashreplace"))

    with suppress(Exception):  # the program works without the warnings
        if env.settings(env.current()):
            from kcache.engine.opening import find_cache  # noqa: PLC0415

            config, _ = find_cache({}, look=True, complain=warn)
            if config.remote.value:
                from kcache.kernels.remotes import report_remotes  # noqa: PLC0415

                service.remotes = report_remotes(config, group, warn)
    os.close(stderr_fd)


class CompileService:
    """Answers programs, and counts the answers. The first thread that needs the cache opens it.

    Threads: several threads may use one object.

    Args:
        settings: the settings of the cache, which `status` returns.

    Attributes:
        complaining: the thread that warns of wrong settings and of remotes that do not answer, or
            None.
        remotes: a connection to the daemon for remotes, or None. While the connection is open, the
            same process group is not warned of the same remotes again.
    """

    patient = True
    #: No work is left to do after a program has ended.
    pending = 0

    def __init__(self, settings: dict[str, str]) -> None:
        self.counts = Counts()
        self.complaining: threading.Thread | None = None
        self.remotes: daemon_client.DaemonClient | None = None
        self._settings = settings
        self._handler: NvrtcHandler | None = None
        self._nvcc: NvccHandler | None = None
        self._making = threading.Lock()

    def warm_up(self) -> None:
        """Prepare the first hit while the program is still starting."""
        with suppress(Exception):  # a program that asks later gets the same error as its reason
            self.answers().warm_up()

    def answers(self) -> NvrtcHandler:
        """Return the handler that answers NVRTC calls. The first call opens the cache.

        Raises:
            ConfigError: a setting has a wrong value, or the cache's directory is unsafe.
        """
        with self._making:
            if self._handler is None:
                from kcache.dropin.nvrtc_handler import NvrtcHandler  # noqa: PLC0415
                from kcache.kernel_cache import KernelCache  # noqa: PLC0415

                home = env.cache_home(env.current())
                folder = None if home is None else os.path.join(home, "kcache-dropin")
                self._handler = NvrtcHandler(KernelCache(), folder)
            return self._handler

    def status(self) -> dict[str, object]:
        """Return the settings and the counts."""
        stats = None if self._handler is None else self._handler.cache.stats()
        of_cache = {name: getattr(stats, name, 0) for name in _CACHE_COUNTS}
        return {"settings": self._settings, "counts": {**self.counts.as_dict(), **of_cache}}

    def close(self) -> None:
        """Close the cache, if it was opened.

        First wait up to `_LAST_WARNINGS` seconds until all warnings are written, because the
        program may have ended before that.
        """
        if self.complaining is not None:
            self.complaining.join(_LAST_WARNINGS)
        if self.remotes is not None:
            self.remotes.close()
        if self._handler is not None:
            self._handler.cache.close()

    def leave(self, client: Client) -> None:
        """Do nothing, because the counts of a client that has disconnected are kept."""

    # -- questions ---------------------------------------------------------------------------------

    def answer(self, question: Sequence[bytes], client: Client) -> Sequence[bytes]:
        """Return the answer to a program's question, or `NO` and the reason why there is no answer.

        Raises:
            WireError: the question is unknown or malformed; OSError: the program has ended.
        """
        self.counts.asked(client.process)
        try:
            return self._answer(question, client)
        except (WireError, ConnectionError, TimeoutError):
            raise
        except Exception as error:  # such as a setting with a wrong value
            log.debug("a program's question is not answered: %r", error)
            return [NO, f"{type(error).__name__}: {error}".encode()]

    def _answer(self, question: Sequence[bytes], client: Client) -> Sequence[bytes]:
        match question:
            case [protocol.COMPILE, *fields]:
                return self._compile(protocol.unpack_program(fields))
            case [protocol.QUERY, path, standing]:
                version, archs = self.answers().about(path, standing)
                return [DONE, *(b"%d" % number for number in (*version, *archs))]
            case [protocol.NVCC, standing, *fields]:
                return self._start_nvcc(standing, fields, client)
            case [protocol.NOTE, reason]:
                with suppress(Exception):  # opening the cache sets up the log
                    self.answers()
                self._left(reason.decode(errors="replace"))
                return [DONE]
            case _:
                raise WireError("a program has sent an unknown question")

    def _compile(self, program: Program) -> Sequence[bytes]:
        try:
            answer = self.answers().answer(program)
        except DeclinedError as error:
            self._left(str(error), f"{program.name.decode(errors='replace')}: ")
            return [NO, str(error).encode()]
        self.counts.answered(hit=answer.hit, failed=answer.result != 0)
        return [DONE, *protocol.pack_answer(answer)]

    def _left(self, reason: str, which: str = "") -> None:
        self.counts.handed(reason[:80])
        log.debug("not cached, the real NVRTC compiles: %s%s", which, reason)

    def _start_nvcc(
        self, standing: bytes, fields: Sequence[bytes], client: Client
    ) -> Sequence[bytes]:
        from kcache.nvcc.handler import FAILED, NvccHandler  # noqa: PLC0415

        if standing != protocol.standing():
            return [NO, b"nvcc has another user, root directory or mount namespace than the server"]
        cache = self.answers().cache
        with self._making:  # the first call may have to build the libraries
            if self._nvcc is None:
                recorder = libraries.for_nvcc(env.current(), libraries.RECORDER)
                self._nvcc = NvccHandler(cache, recorder)
        answer = self._nvcc.answer(fields, client)
        if answer[0] == DONE or answer[1] == FAILED:
            self.counts.answered(hit=answer[1:2] == [b"hit"], failed=answer[0] == NO)
        return answer


# -- counts ----------------------------------------------------------------------------------------

_NAMES = ("hits", "misses", "failed", "handed_over", "programs")
#: The counts of the cache that the summary shows, too.
_REMOTE_COUNTS = ("remote_hits", "remote_misses", "remote_errors")
_CACHE_COUNTS = ("saved_seconds", *_REMOTE_COUNTS)

#: How many names of programs, and how many reasons, are counted separately. All further ones are
#: counted together as "others".
_MOST = 256
#: How many processes are remembered. A process that asks again after this many others is counted
#: twice.
_MOST_PROCESSES = 1 << 14


class Counts:
    """Counts answers and the processes that asked.

    Threads: several threads may use one object. The counts are lost when the process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(_NAMES, 0))
        self._reasons: Counter[str] = Counter()
        self._names: Counter[str] = Counter()
        self._processes: dict[int, None] = {}

    def answered(self, *, hit: bool, failed: bool) -> None:
        """Count an answer as a failed compile, a hit or a miss."""
        with self._lock:
            self._counts["failed" if failed else "hits" if hit else "misses"] += 1

    def handed(self, reason: str) -> None:
        """Count a compile that was left to the real NVRTC, and the reason."""
        with self._lock:
            self._counts["handed_over"] += 1
            self._reasons[_bounded(reason, self._reasons)] += 1

    def asked(self, process: int) -> None:
        """Count the process with the id `process`, unless it has asked before."""
        with self._lock:
            if process in self._processes:
                return
            if len(self._processes) >= _MOST_PROCESSES:
                del self._processes[next(iter(self._processes))]
            self._processes[process] = None
            self._counts["programs"] += 1
            self._names[_bounded(_name_of(process), self._names)] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as a dict that can be converted to JSON."""
        with self._lock:
            return {**self._counts, "reasons": dict(self._reasons), "names": dict(self._names)}


def _bounded(name: str, counted: Counter[str]) -> str:
    return name if name in counted or len(counted) < _MOST else "others"


def _name_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm", "rb") as file:
            name = os.fsdecode(file.read()).strip()
            return "nvcc" if name == libraries.CLIENT else name
    except OSError:
        return "unknown"


def since(before: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    """Return `counts` minus `before`; both are in the form of `Counts.as_dict`."""
    plain = counts.keys() - {"reasons", "names"}
    difference: dict[str, Any] = {name: counts[name] - before[name] for name in plain}
    for name in ("reasons", "names"):
        difference[name] = Counter[str](counts[name]) - Counter[str](before[name])
    return difference


def summary(counts: dict[str, Any]) -> str:
    """Return one line that describes the counts of a daemon."""
    who = ", ".join(
        name if number == 1 else f"{number} x {name}" for name, number in counts["names"].items()
    )
    reasons = ", ".join(f"{name}: {number}" for name, number in counts["reasons"].items())
    parts = [
        f"hits {counts['hits']}",
        f"misses {counts['misses']}",
        f"compile errors {counts['failed']}",
        f"uncacheable {counts['handed_over']}" + (f" ({reasons})" if reasons else ""),
        f"saved {counts['saved_seconds']:.1f} s",
        f"programs: {who or 'none used NVRTC or nvcc'}",
    ]
    hits, misses, errors = (counts.get(name, 0) for name in _REMOTE_COUNTS)
    if hits or misses or errors:
        parts.append(f"remotes: hits {hits}, misses {misses}, without an answer {errors}")
    return "; ".join(parts)
