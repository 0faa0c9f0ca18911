"""Worker: the program that a worker process runs.

It loads one libnvrtc, and compiles one request at a time. Requests are messages on its standard
input, and replies are messages on its standard output. The worker exits when its input is closed or
its parent exits, even during a compile. It reads only the files that the compiler asks for, and
keeps no state of its own between requests. The compiler may keep state; therefore the program ends
a worker whose next result might differ from that of a new worker.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial

from kcache.environment import WORKING_DIRECTORY, worker_variables
from kcache.nvrtc.options import BUNDLED, parse_options
from kcache.nvrtc.workers.messages import (
    BEGUN,
    Ask,
    FileAnswer,
    Hello,
    Reply,
    Status,
    Trace,
    pack,
)
from kcache.nvrtc.workers.nvrtc import Nvrtc
from kcache.nvrtc.workers.recorder import Recorder
from kcache.util.wire import WireError, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcache.nvrtc.options import ParsedOptions
    from kcache.nvrtc.workers.slots import Slot, Slots

#: Milliseconds between two heartbeats, and between two checks that the parent still exists.
_BEAT_EVERY_MS = 500
#: The name of a file that NVRTC writes beside its own headers. NVRTC installs the headers if this
#: file is missing. The file contains the time of the installation, so its content differs between
#: directories; no compile reads it.
_INSTALLED = b".nvrtc_headers_version"
#: How many bytes before and after a word are examined to find out how the text uses the word.
_CONTEXT = 80
_WORD, _WORD_END = re.compile(rb"\w"), re.compile(rb"\w\Z")
_ARGUMENT = re.compile(rb"""(?:[(,=]|#[ \t]*define[ \t]+\w+)[ \t]*["<]?\Z""")
_ARGUMENT_END = re.compile(rb"""[ \t]*(?:[,)\r\n">]|\Z)""")


def main() -> None:
    """Run in the new process: answer requests until the input is closed."""
    source, target = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # the compiler's own output is not a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path, parent = sys.argv[1], int(sys.argv[2])
    channel = _Channel(target)
    threading.Thread(target=_watch, args=(source, parent, channel), daemon=True).start()
    try:
        worker = _Worker(path)
    except OSError as error:
        channel.send(pack(Hello("", (0, 0), (), str(error))))
        os._exit(0)
    try:
        channel.send(pack(worker.hello))
        while True:
            ask = Ask.unpack(receive(partial(os.read, source)))
            channel.working = True
            with channel.compiling(ask.slots):
                reply = worker.answer(ask)
            worker.tidy()
            channel.send(pack(reply))
            channel.working = False
    except (WireError, OSError):
        os._exit(0)


class _Channel:
    """Sends replies and heartbeats to the program.

    Threads: All methods may be called from several threads at the same time.

    Attributes:
        working: whether the program may be waiting for a reply.
    """

    def __init__(self, target: int) -> None:
        self._write = partial(os.write, target)
        self._sending = threading.Lock()
        self._slot: Slot | None = None
        self.working = False

    def send(self, fields: Sequence[bytes]) -> None:
        with self._sending:
            send(self._write, fields)

    @contextmanager
    def compiling(self, slots: Slots | None) -> Generator[None]:
        """Wait for a slot, report that the compile begins, and hold the slot during the block.

        During the block, `beat` updates the heartbeat of the slot. If `slots` is None, there is no
        slot to wait for.
        """
        with nullcontext() if slots is None else slots.held() as slot:
            self.send([BEGUN])
            self._slot = slot
            try:
                yield
            finally:
                with self._sending:
                    self._slot = None

    def beat(self) -> None:
        """If the program may be waiting, send it a heartbeat, and update the slot's heartbeat."""
        if self.working:
            with suppress(OSError), self._sending:  # the disk is full, or the program has ended
                if self._slot is not None:
                    self._slot.beat()
                send(self._write, [])


def _watch(source: int, parent: int, channel: _Channel) -> None:
    """End this process when its input is closed or its parent exits, even during a compile.

    Until then, send heartbeats.
    """
    poll = select.poll()
    poll.register(source, select.POLLHUP)
    while os.getppid() == parent:
        if any(event & select.POLLHUP for _, event in poll.poll(_BEAT_EVERY_MS)):
            break
        channel.beat()
    os._exit(0)


class _Worker:
    """A loaded NVRTC library, and the recorder of what it asks the operating system.

    Raises:
        OSError: the library can't be loaded, or what it asks can't be recorded.
    """

    def __init__(self, path: str) -> None:
        self._environment = worker_variables()
        self._nvrtc = Nvrtc(path)
        try:
            self._recorder = Recorder(os.path.realpath(path))
        except (OSError, ValueError, LookupError) as error:
            raise OSError(f"what NVRTC asks can't be recorded here: {error!r}") from error
        self.hello = self._nvrtc.hello()
        #: Removes files that the compiler leaves. It is called before the reply is sent, because
        #: the program may end the worker as soon as it has the reply.
        self.tidy = self._recorder.tidy

    def answer(self, ask: Ask) -> Reply:
        """Compile the request `ask`, and return the reply."""
        environment = _changed(self._environment, ask.environment)
        directory = _encoded(ask.directory)
        recorder, options = self._recorder, parse_options(ask.flags)
        if recorder.environment.has_changed(environment, directory):
            return Reply(Status.ELSEWHERE)
        try:
            _enter(directory)
            installed = self._install(options)
            recorder.begin(environment, directory, ask.clock)
            recorder.real_process_id = any("pch" in each.name for each in options)
            recorder.paused = installed is None
            if installed is None:
                recorder.unfollowed.append("the compiler's own headers can't be installed")
            elif installed:
                ask = ask._replace(flags=options.with_bundled_as_plain())
            for folder in installed or ():
                recorder.note(os.path.join(folder, _INSTALLED))
            reply = self._nvrtc.compile(ask)
        except (OSError, MemoryError) as error:
            return Reply(Status.FAILED, text=f"{type(error).__name__}: {error}")
        reply = reply._replace(peak=_peak())
        if ask.clock and recorder.is_poisoned(reply):
            return reply._replace(status=Status.POISONED)
        return reply._replace(trace=self._trace(recorder, ask, environment))

    def _install(self, options: ParsedOptions) -> list[bytes] | None:
        """Install the compiler's own headers in the folders that `options` name; return these.

        The installation can't be recorded, so it is done before the compile. If it fails, the
        result is None, and the compiler gets the options unchanged, so that it reports the error.
        """
        folders = [each.bundled for each in options if each.name == BUNDLED]
        found = [_encoded(folder) for folder in folders if folder is not None]
        self._recorder.paused = True
        try:
            done = len(found) == len(folders) and all(map(self._nvrtc.install_headers, found))
        finally:
            self._recorder.paused = False
        return found if done else None

    @staticmethod
    def _trace(recorder: Recorder, ask: Ask, environment: Mapping[bytes, bytes]) -> Trace:
        return Trace(
            {
                os.fsdecode(path): FileAnswer(
                    found.kind,
                    found.error,
                    found.stamp,  # type: ignore[arg-type]
                    recorder.digest_of(found),
                )
                for path, found in recorder.files.items()
            },
            {
                os.fsdecode(name): None if value is None else os.fsdecode(value)
                for name, value in recorder.environment.asked.items()
            },
            recorder.effects(),
            _found(ask, recorder, environment) if ask.sought else (),
        )


def _found(ask: Ask, recorder: Recorder, environment: Mapping[bytes, bytes]) -> list[str]:
    """Return the conditions in `ask.sought` whose words all occur in what the compiler has read."""
    # The include directories are left out, because no text can use them.
    options = parse_options(ask.flags).without_include_paths()
    own = map(_encoded, (ask.source, *ask.headers.values(), *options, *ask.names))
    files = (each.content for each in recorder.files.values() if each.content)
    # `PWD` is left out, because it is LLVM that asks for it, and no text can use its value.
    asked = recorder.environment.asked.keys() - {_encoded(WORKING_DIRECTORY)}
    variables = (environment.get(name, b"") for name in asked)
    read = (*own, *files, *variables)

    @cache
    def occurs(word: str) -> bool:
        raw = _encoded(word)
        return any(_spells(text, raw.removesuffix(b"/"), raw.endswith(b"/")) for text in read)

    return [name for name, words in ask.sought.items() if all(map(occurs, words))]


def _spells(text: bytes, word: bytes, in_path: bool) -> bool:
    """Return whether `text` contains `word` as a whole word.

    With `in_path`, the word counts only where it may become part of a path: next to a slash, as an
    argument of a macro, or as the body of a macro.
    """
    at = text.find(word)
    while at >= 0:
        before, after = (
            text[max(0, at - _CONTEXT) : at],
            text[at + len(word) : at + len(word) + _CONTEXT],
        )
        if not (_WORD_END.search(before) or _WORD.match(after)) and (
            not in_path
            or before.endswith(b"/")
            or after.startswith(b"/")
            or (_ARGUMENT.search(before) and _ARGUMENT_END.match(after))
        ):
            return True
        at = text.find(word, at + 1)
    return False


def _enter(directory: bytes) -> None:
    """Change the working directory to `directory`, unless it is the working directory already.

    A new worker is already in the program's directory, and some directories can't be entered again,
    because their path is too long, or because a user who is no longer root may not search a parent
    directory.

    Raises:
        OSError: the directory can't be entered.
    """
    with suppress(OSError):
        if os.getcwdb() == directory:
            return
    os.chdir(directory)


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _changed(
    environment: dict[bytes, bytes], changes: Mapping[str, str | None]
) -> dict[bytes, bytes]:
    new = {os.fsencode(n): None if v is None else os.fsencode(v) for n, v in changes.items()}
    return {name: value for name, value in {**environment, **new}.items() if value is not None}


def _peak() -> int:
    try:
        import resource  # noqa: PLC0415
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
